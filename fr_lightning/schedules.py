"""Learning-rate schedules that take plain numbers, so that a YAML file can name them by class_path."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class WarmupCosine(LambdaLR):
    """Linear warm-up, then a cosine down to a floor, then the floor (PAPER: 3 % warm-up, down to 10 % of the peak).

    Args:
        optimizer: its learning rate is the peak.
        total_steps: updates until the floor is reached; usually the trainer's `max_steps`.
        warmup: share of `total_steps` spent rising from 0. The first update already moves: it has 1/(steps + 1) of
            the peak.
        floor: share of the peak at the end.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup: float = 0.03, floor: float = 0.1):
        if total_steps < 1 or not 0 <= warmup < 1 or not 0 <= floor <= 1:
            raise ValueError(
                f"need total_steps ≥ 1, 0 ≤ warmup < 1 and 0 ≤ floor ≤ 1, got {total_steps}, {warmup}, {floor}"
            )
        warmup_steps = math.ceil(warmup * total_steps)

        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / (warmup_steps + 1)
            progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

        super().__init__(optimizer, factor)


class Constant(LambdaLR):
    """The peak throughout, after an optional linear warm-up of `warmup_steps` updates."""

    def __init__(self, optimizer: Optimizer, warmup_steps: int = 0):
        super().__init__(optimizer, lambda step: min(1.0, (step + 1) / (warmup_steps + 1)))

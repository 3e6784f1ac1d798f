"""Reward baselines: from the rewards of a whole batch to one advantage per trajectory.

Invariant: pure functions of the rewards of the **whole** batch, all ranks together; no division by a standard
deviation anywhere. A batch of equal rewards therefore has advantages of exactly zero.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Baseline = Literal["batch", "group", "none"]


def advantages(
    rewards: Tensor, *, baseline: str = "batch", groups: Tensor | None = None, positive_only: bool = False
) -> Tensor:
    """A_i = R_i − baseline (PAPER: "The update" and the knobs `baseline` and `signal`).

    Args:
        rewards: [B] float32 or float64, the whole batch. Other types are computed in float32.
        baseline: `batch` subtracts the batch mean, `group` the mean over rollouts of the same prompt, `none` nothing.
        groups: [B] integers naming each trajectory's prompt; needed by `group` only.
        positive_only: the ablation A ← max(A, 0).

    Returns:
        [B] advantages in the rewards' precision.

    Raises:
        ValueError: wrong shape, non-finite reward, unknown baseline, or missing groups.
    """
    if rewards.ndim != 1 or rewards.numel() == 0:
        raise ValueError(f"rewards must be a non-empty vector [B], got shape {tuple(rewards.shape)}")
    if not rewards.is_floating_point() or rewards.dtype.itemsize < 4:
        rewards = rewards.float()
    if not torch.isfinite(rewards).all():
        bad = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
        raise ValueError(f"rewards must be finite; not so in rows {bad}")
    if baseline == "batch":
        centred = _minus_mean(rewards)
    elif baseline == "group":
        if groups is None or groups.shape != rewards.shape:
            raise ValueError('baseline "group" needs `groups`, one prompt number per trajectory [B]')
        centred = torch.empty_like(rewards)
        for group in groups.unique():
            members = groups == group
            centred[members] = _minus_mean(rewards[members])
    elif baseline == "none":
        centred = rewards.clone()
    else:
        raise ValueError(f"unknown baseline {baseline!r}; choose one of {', '.join(get_args(Baseline))}")
    return centred.clamp(min=0.0) if positive_only else centred


def _minus_mean(rewards: Tensor) -> Tensor:
    if (rewards == rewards[0]).all():  # 0.1 + 0.1 + 0.1 is not 3 × 0.1: a uniform batch must give exactly zero
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()

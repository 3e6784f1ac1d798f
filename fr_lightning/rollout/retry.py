"""How often an episode that failed is played again, and how much failure a run puts up with.

Invariant: a failure is retried, then counted; never scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fr_lightning.rollout.runner import FAILURE_KINDS, FailureKind


@dataclass(frozen=True)
class Retries:
    """What happens to episodes that fail.

    Attributes:
        attempts: how often a task is played before it is closed under the failure's name.
        backoff: seconds before the second attempt, doubled for each further one.
        max_failure_share: of the latest 64 attempts; when more than this share failed, the run stops with a diagnosis.
    """

    attempts: int = 3
    backoff: float = 0.2
    max_failure_share: float = 0.5

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.backoff < 0 or not 0 < self.max_failure_share <= 1:
            raise ValueError(f"need attempts ≥ 1, backoff ≥ 0 and 0 < max_failure_share ≤ 1, got {self}")


@dataclass(frozen=True)
class RetryPolicy(Retries):
    """What happens to episodes that fail, whatever of, and to those of one kind.

    Attributes:
        by_kind: other values for failures of one kind: env_error, tool_unavailable, verifier_unverifiable,
            engine_error, timeout or prompt_too_long. Its share counts failures of that kind alone.
    """

    by_kind: Mapping[str, Retries] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = set(self.by_kind) - set(FAILURE_KINDS)
        if unknown:
            raise ValueError(
                f"data.retry.by_kind names {', '.join(sorted(unknown))}; failures are of the kinds "
                f"{', '.join(FAILURE_KINDS)}"
            )

    def of(self, kind: FailureKind) -> Retries:
        return self.by_kind.get(kind, self)

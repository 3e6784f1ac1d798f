"""What one episode leaves behind, as plain data.

Invariant: a trajectory is token-exact. `token_ids` is what the engine was prompted with and what it sampled, in order,
never decoded and tokenised again; the four token sequences are aligned and a slot is a policy token if and only if the
policy sampled it. Most trajectories are one context; where the policy was prompted anew there are several, end to end,
and no token of one is ever conditioned on another. Nothing here knows of networks, engines, environments or Lightning.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]

NO_VERSION = -1
"""`policy_versions` in a slot that no policy sampled."""

NO_EXPERT = -1
"""`routed_experts` where nothing was recorded: the model's own choice stands."""


@dataclass(frozen=True)
class Task:
    """One thing to attempt: what `env.reset` is given, and nothing about how the attempt went.

    `id` names the task in logs, ledgers and evaluation tables. `row` is the dataset row, or None for an environment
    that makes its problems up from `seed`. `group` is the prompt's number, shared by rollouts of the same prompt. `set`
    names the set of tasks it comes from, where there are several.
    """

    id: str
    seed: int
    row: Mapping[str, Any] | None = None
    split: str = "train"
    group: int = 0
    set: str = ""

    def reset_options(self) -> dict[str, Any]:
        return {"task": self.row, "split": self.split}


@dataclass(frozen=True)
class Turn:
    """One call of the engine inside a trajectory: `token_ids[start:stop]` are its policy tokens."""

    start: int
    stop: int
    finish_reason: FinishReason
    tool_calls: int = 0
    generate_seconds: float = 0.0
    env_seconds: float = 0.0


@dataclass(frozen=True)
class Timing:
    """Where an episode's wall time went, in seconds. `queue` is how long it waited, finished, for the learner."""

    generate: float = 0.0
    env: float = 0.0
    queue: float = 0.0


@dataclass(eq=False)
class Trajectory:
    """One finished episode of N tokens. Sequences may be given as lists; they are kept as 1-D tensors.

    Args:
        token_ids: [N] int64.
        policy_mask: [N] bool, True where the policy sampled the token.
        behavior_logprobs: [N] float32, log-probability under the distribution that sampled it; 0.0 elsewhere.
        policy_versions: [N] int64, number of updates behind the weights that sampled it; -1 elsewhere.
        reward: sum of the environment's rewards.
        success: the environment's own verdict (`info["success"]`), which a shaped reward need not equal.
        terminated: the environment ended the episode.
        truncated: a limit ended it: turns, tokens, context or the environment's step limit.
        temperature: the sampling temperature behind `behavior_logprobs`; the learner applies the same one.
        contexts: slots at which the policy was prompted anew, 0 first. From each on it saw nothing of what is before.
        routed_experts: [N, L, k], the experts that each token, as input, was sent to in each of the L layers of a
            mixture-of-experts model when it first passed through it; -1 (`NO_EXPERT`) where the engine recorded none,
            as for the last token, which nothing followed. Kept as int8 or int16, whichever is enough. None: no record.

    Raises:
        ValueError: lengths differ, no policy token, a missing log-prob or version on a policy token, or contexts that
            are not ascending slots from 0, each of a token that the policy did not sample.
    """

    token_ids: Tensor
    policy_mask: Tensor
    behavior_logprobs: Tensor
    policy_versions: Tensor
    reward: float
    success: bool = False
    terminated: bool = True
    truncated: bool = False
    task_id: str = ""
    rollout_id: str = ""
    group: int = 0
    turns: tuple[Turn, ...] = ()
    tool_calls: int = 0
    temperature: float = 1.0
    metrics: dict[str, float] = field(default_factory=dict)
    timing: Timing = Timing()
    contexts: tuple[int, ...] = (0,)
    routed_experts: Tensor | None = None

    def __post_init__(self) -> None:
        self.token_ids = torch.as_tensor(self.token_ids, dtype=torch.int64)
        self.policy_mask = torch.as_tensor(self.policy_mask, dtype=torch.bool)
        self.behavior_logprobs = torch.as_tensor(self.behavior_logprobs, dtype=torch.float32)
        self.policy_versions = torch.as_tensor(self.policy_versions, dtype=torch.int64)
        lengths = {
            name: tuple(getattr(self, name).shape)
            for name in ("token_ids", "policy_mask", "behavior_logprobs", "policy_versions")
        }
        if len(set(lengths.values())) != 1 or self.token_ids.ndim != 1:
            raise ValueError(f"token sequences of a trajectory must share one length [N], got {lengths}")
        if not self.policy_mask.any():
            raise ValueError(f"trajectory {self.rollout_id or self.task_id!r} holds no policy token")
        self.contexts = tuple(self.contexts)
        ascending = all(a < b for a, b in itertools.pairwise((*self.contexts, len(self))))
        if not ascending or self.contexts[:1] != (0,):
            raise ValueError(f"contexts are ascending slots of {len(self)}, from 0 on, got {self.contexts}")
        if self.policy_mask[list(self.contexts)].any():
            raise ValueError("a context starts with a prompt: its first token cannot be a policy token")
        sampled = self.behavior_logprobs[self.policy_mask]
        if not torch.isfinite(sampled).all() or (sampled > 0).any():
            raise ValueError(
                f"trajectory {self.rollout_id or self.task_id!r}: every policy token needs a finite, non-positive "
                "behavior log-probability"
            )
        if (self.policy_versions[self.policy_mask] < 0).any():
            raise ValueError(f"trajectory {self.rollout_id or self.task_id!r}: a policy token has no policy version")
        if self.routed_experts is not None:
            routes = torch.as_tensor(self.routed_experts)
            if routes.ndim != 3 or len(routes) != len(self):
                raise ValueError(f"routed experts of {len(self)} tokens must be [N, L, k], got {tuple(routes.shape)}")
            narrow = torch.int8 if int(routes.max()) <= torch.iinfo(torch.int8).max else torch.int16
            self.routed_experts = routes.to(narrow)

    def state_dict(self) -> dict[str, Any]:
        """As tensors, numbers and text: what a checkpoint may hold and be loaded from without running code."""
        return {**vars(self), "turns": [asdict(turn) for turn in self.turns], "timing": asdict(self.timing)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Trajectory:
        turns = tuple(Turn(**turn) for turn in state["turns"])
        return cls(**{**state, "turns": turns, "timing": Timing(**state["timing"])})

    def __len__(self) -> int:
        return self.token_ids.numel()

    @property
    def num_policy_tokens(self) -> int:
        """T_i: policy tokens over all turns."""
        return int(self.policy_mask.sum())

    @property
    def oldest_version(self) -> int:
        """The oldest policy that sampled any of its tokens."""
        return int(self.policy_versions[self.policy_mask].min())

    def policy_lag(self, version: int) -> Tensor:
        """Learner version minus sampling version, per policy token: [T_i] int64."""
        return version - self.policy_versions[self.policy_mask]


@dataclass(frozen=True)
class PaddedRows:
    """Some trajectories of a batch, right-padded to one rectangle [b, N]; `policy_mask` is False in padding.

    `context_starts` is True at the slots where a context begins: slot 0 of every row, and mostly no other.
    `routed_experts` is [b, N, L, k] int16, `NO_EXPERT` in padding and where nothing was recorded; None if nowhere.
    """

    token_ids: Tensor
    attention_mask: Tensor
    policy_mask: Tensor
    behavior_logprobs: Tensor
    context_starts: Tensor
    temperature: Tensor  # [b]
    routed_experts: Tensor | None = None

    def to(self, device: torch.device | str) -> PaddedRows:
        moved: dict[str, Any] = {
            name: None if value is None else value.to(device, non_blocking=True) for name, value in vars(self).items()
        }
        return PaddedRows(**moved)


class TrajectoryBatch:
    """The fresh batch of one optimizer step: B whole trajectories, with columns [B] for what is one number each.

    Deliberately no `Sequence` and no dataclass: Lightning would take it apart to move it to the device whole, and only
    one micro-batch at a time belongs there.
    """

    def __init__(self, trajectories: Iterable[Trajectory]):
        self.trajectories = tuple(trajectories)
        if not self.trajectories:
            raise ValueError("a batch needs at least one trajectory")

    def __len__(self) -> int:
        return len(self.trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __getitem__(self, index: int) -> Trajectory:
        return self.trajectories[index]

    def subset(self, rows: Iterable[int]) -> TrajectoryBatch:
        return TrajectoryBatch(self.trajectories[row] for row in rows)

    def _column(self, values: Iterable[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype)

    @property
    def rewards(self) -> Tensor:
        return self._column((t.reward for t in self.trajectories), torch.float64)

    @property
    def groups(self) -> Tensor:
        return self._column((t.group for t in self.trajectories), torch.int64)

    @property
    def failed(self) -> Tensor:
        return self._column((not t.success for t in self.trajectories), torch.bool)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each trajectory, prompt and observations included."""
        return [len(t) for t in self.trajectories]

    @property
    def policy_lengths(self) -> Tensor:
        """T_i of each trajectory."""
        return self._column((t.num_policy_tokens for t in self.trajectories), torch.int64)

    def pad(self, rows: Sequence[int], pad_token_id: int = 0) -> PaddedRows:
        """The named rows as one rectangle, in the order given.

        Raises:
            ValueError: their routed experts are of different models.
        """
        chosen = [self.trajectories[row] for row in rows]

        def rectangle(sequences: Iterable[Tensor], value: float) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True, padding_value=value)

        return PaddedRows(
            token_ids=rectangle((t.token_ids for t in chosen), pad_token_id),
            attention_mask=rectangle((torch.ones_like(t.policy_mask) for t in chosen), False),
            policy_mask=rectangle((t.policy_mask for t in chosen), False),
            behavior_logprobs=rectangle((t.behavior_logprobs for t in chosen), 0.0),
            context_starts=rectangle((_starts(t) for t in chosen), False),
            temperature=self._column((t.temperature for t in chosen), torch.float32),
            routed_experts=rectangle(routes, NO_EXPERT) if (routes := _routes(chosen)) else None,
        )


def _starts(trajectory: Trajectory) -> Tensor:
    """[N] bool."""
    starts = torch.zeros_like(trajectory.policy_mask)
    starts[list(trajectory.contexts)] = True
    return starts


def _routes(chosen: Sequence[Trajectory]) -> list[Tensor]:
    """Each trajectory's routed experts [N, L, k] int16; empty if there are none at all."""
    shapes = {t.routed_experts.shape[1:] for t in chosen if t.routed_experts is not None}
    if len(shapes) > 1:
        raise ValueError(f"routed experts of one batch differ in layers or experts per token: {sorted(shapes)}")
    return [
        torch.full((len(t), *shape), NO_EXPERT, dtype=torch.int16)
        if t.routed_experts is None
        else t.routed_experts.to(torch.int16)
        for shape in shapes
        for t in chosen
    ]

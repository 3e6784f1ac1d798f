"""What a generation engine is: token ids in; token ids, their log-probabilities and their policy versions out.

Invariants of every engine: the log-probability of a token is that of the distribution it was drawn from (temperature
and every filter applied), in float32, for every token; the version of a token is that of the weights whose forward
pass produced its distribution; an engine that cannot say either raises `EngineError` and never fills in a value. All
methods are coroutines of one event loop.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fr_lightning.trajectory import FinishReason


class EngineError(RuntimeError):
    """The engine failed, not the policy: the request may be played again and is never scored."""


class PromptTooLong(ValueError):
    """The prompt leaves no room for a single token in the engine's context: no retry can help."""


@dataclass(frozen=True)
class Sampling:
    """How to draw tokens. The defaults draw from the policy itself, as training must.

    Attributes:
        temperature: divides the logits; 0 is greedy (evaluation only).
        top_p, top_k, min_p: nucleus, top-k (0: off) and min-p filters, for evaluation only.
        max_tokens: most tokens to draw in one call.
        stop_token_ids: drawing one of these ends the turn; it is kept as the turn's last token.
        stop: strings that end the turn once its text holds one of them, special tokens counting as they are written.
            The token that completes the string is kept, whole, as the turn's last.
        seed: of this request alone, so that equal requests draw equal tokens whatever else is in flight; None: fresh.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be ≥ 0, got {self.temperature}")
        if not 0 < self.top_p <= 1 or self.top_k < 0 or not 0 <= self.min_p < 1:
            raise ValueError(f"need 0 < top_p ≤ 1, top_k ≥ 0, 0 ≤ min_p < 1; got {self}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be ≥ 1, got {self.max_tokens}")
        if isinstance(self.stop, str) or not all(isinstance(string, str) and string for string in self.stop):
            raise ValueError(f"stop must be a tuple of strings, none of them empty, got {self.stop!r}")

    @property
    def full_support(self) -> bool:
        """Whether every token keeps a positive probability, as importance sampling needs."""
        return self.temperature > 0 and self.top_p == 1.0 and self.top_k == 0 and self.min_p == 0.0


@dataclass(frozen=True)
class Completion:
    """The sampled tokens of one call; the three lists have one length.

    Attributes:
        routed_experts: [R, L, k] int16, where the engine was asked for them (`Engine.record_routes`): of prompt and
            sampled tokens together, without the last, which was not run, those of the last R. Tokens before these
            were told of by earlier completions of the same session. A token that is run again, because an update
            emptied the KV cache, is told of as it was run first.
    """

    token_ids: list[int]
    logprobs: list[float]
    policy_versions: list[int]
    finish_reason: FinishReason
    routed_experts: np.ndarray | None = field(default=None, compare=False)


def check_limits(
    *,
    kv_cache_on_update: str,
    max_context: int,
    max_sequences: int,
    threads: int,
    max_restarts: int,
    stall_timeout: float,
    start_timeout: float,
) -> None:
    """The settings that every engine of ours has.

    Raises:
        ValueError: names the one that makes no sense.
    """
    if kv_cache_on_update not in ("recompute", "keep"):
        raise ValueError(f"kv_cache_on_update must be recompute or keep, got {kv_cache_on_update!r}")
    if min(max_sequences, threads) < 1 or max_context < 8 or max_restarts < 0:
        raise ValueError("need max_sequences ≥ 1, threads ≥ 1, max_context ≥ 8, max_restarts ≥ 0")
    if stall_timeout <= 0 or start_timeout <= 0:
        raise ValueError("timeouts must be positive")


def checked_prompt(token_ids: Sequence[int], *, vocab_size: int, max_context: int) -> list[int]:
    """The prompt as plain integers.

    Raises:
        ValueError: it is empty, or holds an id the model does not know.
        PromptTooLong: it leaves no room for a single token.
    """
    tokens = [int(token) for token in token_ids]
    if not tokens:
        raise ValueError("an empty prompt cannot be continued")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ValueError(f"token ids must lie in 0..{vocab_size - 1}, got {min(tokens)}..{max(tokens)}")
    if len(tokens) >= max_context:
        raise PromptTooLong(f"{len(tokens)} prompt tokens leave no room in a context of {max_context}")
    return tokens


class Engine(abc.ABC):
    """A generation engine. Life: construct (cheap) → `start` → `generate`/`update_weights`, concurrently → `close`."""

    version: int = 0
    """Version of the weights that the next token will be drawn under."""

    dtype: str = "float32"
    """Of weights and activations: how closely its log-probabilities can match a learner's."""

    pause_seconds: float = 0.0
    """How long generation stood still for the last update."""

    record_routes: bool = False
    """Whether completions tell which experts each token was sent to. Set before `start`, which raises `EngineError` if
    the model is no mixture of experts."""
    sleep_while_learning: bool = False
    """Whether `sleep` frees memory: for a device that engine and learner use in turns."""

    @abc.abstractmethod
    async def start(self, model: str | None = None) -> None:
        """Load the model (a folder or name; None: the one given at construction) and be ready to generate."""

    @abc.abstractmethod
    async def generate(
        self, token_ids: list[int], sampling: Sampling | None = None, *, session: str | None = None
    ) -> Completion:
        """Continue a prompt. Cancelling the call aborts the request and frees its place.

        Args:
            token_ids: the whole prompt, N ≥ 1 ids.
            sampling: how to draw; None: the defaults.
            session: names a conversation whose calls extend one another, so that its KV cache may be kept between
                turns. Only speed depends on it.

        Raises:
            PromptTooLong: the prompt fills the context.
            EngineError: the engine failed.
        """

    @abc.abstractmethod
    async def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load parameters by their names in the Hugging Face model; requests in flight go on under the new ones.

        Returns when every later token is drawn under them and stamped `version`.
        """

    async def sleep(self) -> None:
        """Nothing will be asked before the next update: what generation needs may go until then. Only memory depends on
        it; a request that comes all the same is answered."""
        return

    async def forget(self, session: str) -> None:
        """A conversation has ended: whatever was kept for it may go. Only memory depends on it."""
        return

    @abc.abstractmethod
    async def close(self) -> None:
        """Free everything; requests in flight raise `EngineError`. Safe to call twice."""

"""The FlashREINFORCE objective: importance ratio, drift, admission, reduction → one scalar loss.

Reads like the paper's section "The update". Invariant: advantages, masks, behavior log-probabilities and ratios are
constants of the gradient, and every denominator is the whole batch's, so that the losses of any partition of a batch
into micro-batches and ranks add up to the loss of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

Gate = Literal["sequence", "token", "none"]
Reduction = Literal["sample_mean", "token_mean", "constant"]

LOG_RATIO_LIMIT = 30.0
PROBABILITY_FLOOR = 1e-6


@dataclass(frozen=True)
class Objective:
    """One point in the paper's table of variants; the defaults are FlashREINFORCE itself.

    Attributes:
        delta: drift threshold δ, in nats; a drift equal to it is admitted and `inf` admits all.
        gate: `sequence` rejects whole trajectories by mean drift, `token` drops single tokens, `none` neither.
        reduction: weight of a token: `sample_mean` 1/(B·T_i), `token_mean` 1/ΣT, `constant` 1/(B·L).
        length_scale: L of `constant`, in tokens.
        importance_sampling: off, the denominator is the current policy itself: ratio 1, drift 0, gate inert.
        failure_token_fraction: q; of a failed trajectory only the ceil(q·T_i) tokens of highest entropy count.
        ppo_clip: ε of PPO's clip, for the GRPO baseline only: a token whose ratio has left [1 − ε, 1 + ε] in the
            direction its advantage pushes gives no gradient. None is FlashREINFORCE.
    """

    delta: float = 1e-3
    gate: Gate = "sequence"
    reduction: Reduction = "sample_mean"
    length_scale: float | None = None
    importance_sampling: bool = True
    failure_token_fraction: float = 1.0
    ppo_clip: float | None = None

    def __post_init__(self) -> None:
        if not self.delta >= 0:
            raise ValueError(f"delta must be a drift ≥ 0 in nats (inf admits everything), got {self.delta}")
        if self.gate not in get_args(Gate):
            raise ValueError(f"gate must be one of {get_args(Gate)}, got {self.gate!r}")
        if self.reduction not in get_args(Reduction):
            raise ValueError(f"reduction must be one of {get_args(Reduction)}, got {self.reduction!r}")
        if self.reduction == "constant" and not (self.length_scale and 0 < self.length_scale < math.inf):
            raise ValueError('reduction "constant" needs length_scale > 0, the L of 1/(B·L)')
        if not 0.0 <= self.failure_token_fraction <= 1.0:
            raise ValueError(f"failure_token_fraction is q in [0, 1], got {self.failure_token_fraction}")
        if self.ppo_clip is not None and not self.ppo_clip > 0:
            raise ValueError(f"ppo_clip must be > 0 or None, got {self.ppo_clip}")


class ImportanceRatio(NamedTuple):
    """Statistics of ρ over the policy tokens of the rows given (before any gate), detached scalars."""

    mean: Tensor
    std: Tensor
    min: Tensor
    max: Tensor


@dataclass(frozen=True)
class LossOutput:
    """`loss` carries the graph on `logprobs`; the rest is detached, one value per row [B]."""

    loss: Tensor
    drift: Tensor
    admitted: Tensor
    kept_tokens: Tensor
    importance_ratio: ImportanceRatio


def policy_loss(
    logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    policy_mask: Tensor,
    objective: Objective,
    *,
    num_trajectories: int | None = None,
    num_tokens: int | None = None,
    entropies: Tensor | None = None,
    failed: Tensor | None = None,
) -> LossOutput:
    """−(1/B) Σ_i m_i·A_i/T_i · Σ_t ρ.detach()·log π, and its variants.

    Args:
        logprobs: [B, T] log π of each token under the current policy; carries the graph.
        behavior_logprobs: [B, T] log μ, as sampled.
        advantages: [B], already centred over the whole batch.
        policy_mask: [B, T] bool. Rows are complete trajectories; other slots may hold anything, NaN included.
        objective: the variant.
        num_trajectories: B of the whole batch when the rows are one micro-batch of it; default these rows.
        num_tokens: ΣT of the whole batch, likewise.
        entropies: [B, T] full-vocabulary entropies in nats; needed when q < 1.
        failed: [B] bool, the environment's verdict; needed when q < 1.

    Raises:
        ValueError: shapes that do not fit, a row without policy tokens, a non-finite advantage, a non-finite or
            positive log-probability on a policy token, or missing entropies/failed when q < 1.
    """
    mask = policy_mask.bool()
    _check(logprobs, behavior_logprobs, advantages, mask)
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    log_pi = torch.where(mask, logprobs.to(dtype), 0.0)  # [B, T]
    log_mu = torch.where(mask, behavior_logprobs.to(dtype), 0.0) if objective.importance_sampling else log_pi.detach()
    lengths = mask.sum(dim=1)  # T_i

    ratio = (log_pi.detach() - log_mu).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    drift = torch.where(mask, token_drift(log_mu, log_pi.detach()), 0.0)
    sequence_drift = drift.sum(dim=1) / lengths

    admitted = torch.ones_like(lengths, dtype=torch.bool)
    kept = mask
    if objective.gate == "sequence":
        admitted = sequence_drift <= objective.delta
    elif objective.gate == "token":
        kept = kept & (drift <= objective.delta)
    if objective.failure_token_fraction < 1.0:
        kept = kept & _failure_token_filter(mask, lengths, entropies, failed, objective.failure_token_fraction)
    if objective.ppo_clip is not None:
        outside = torch.where(advantages[:, None] > 0, ratio > 1 + objective.ppo_clip, ratio < 1 - objective.ppo_clip)
        kept = kept & ~outside
    kept = kept & admitted[:, None]

    batch = len(lengths) if num_trajectories is None else num_trajectories
    if objective.reduction == "sample_mean":
        weight = 1.0 / (batch * lengths.to(dtype))  # [B]
    elif objective.reduction == "token_mean":
        weight = torch.full_like(sequence_drift, 1.0 / (int(lengths.sum()) if num_tokens is None else num_tokens))
    else:
        assert objective.length_scale is not None
        weight = torch.full_like(sequence_drift, 1.0 / (batch * objective.length_scale))

    surrogate = (torch.where(kept, ratio, 0.0) * log_pi).sum(dim=1)  # [B]
    loss = -(weight.to(dtype) * advantages.detach().to(dtype) * surrogate).sum()
    ratios = ratio[mask]
    statistics = ImportanceRatio(ratios.mean(), ratios.std(correction=0), ratios.min(), ratios.max())
    return LossOutput(loss, sequence_drift, admitted, kept.sum(dim=1), statistics)


def token_drift(log_mu: Tensor, log_pi: Tensor) -> Tensor:
    """KL divergence, in nats, between the two Bernoulli laws "this token or any other", per token.

    A lower bound of the full-vocabulary KL(μ‖π). Computed in float64: near equality its terms cancel, and the
    thresholds in use (1e-3) are small beside float32 rounding of probabilities near one.
    """
    p = log_mu.double().exp().clamp(PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR)
    q = log_pi.double().exp().clamp(PROBABILITY_FLOOR, 1 - PROBABILITY_FLOOR)
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def _failure_token_filter(
    mask: Tensor, lengths: Tensor, entropies: Tensor | None, failed: Tensor | None, fraction: float
) -> Tensor:
    """[B, T] bool: in failed rows the ceil(q·T_i) policy tokens of highest entropy, earlier first among equals."""
    if entropies is None or failed is None:
        raise ValueError("failure_token_fraction < 1 needs `entropies` [B, T] and `failed` [B]")
    if entropies.shape != mask.shape or failed.shape != lengths.shape:
        raise ValueError(f"entropies must be {tuple(mask.shape)} and failed {tuple(lengths.shape)}")
    if not torch.isfinite(entropies[mask]).all():
        raise ValueError("entropies must be finite on every policy token")
    quota = Fraction(str(fraction))  # exact: 0.55 · 100 is 55, not 56
    keep = torch.tensor([math.ceil(quota * int(length)) for length in lengths], device=mask.device)
    score = torch.where(mask, entropies.detach().double(), -torch.inf)
    rank = score.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return torch.where(failed.bool()[:, None], rank < keep[:, None], True)


def _check(logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> None:
    if logprobs.ndim != 2 or behavior_logprobs.shape != logprobs.shape or mask.shape != logprobs.shape:
        raise ValueError(
            "logprobs, behavior_logprobs and policy_mask must share one shape [B, T], got "
            f"{tuple(logprobs.shape)}, {tuple(behavior_logprobs.shape)}, {tuple(mask.shape)}"
        )
    if advantages.shape != logprobs.shape[:1]:
        raise ValueError(f"advantages must be [B] = [{logprobs.shape[0]}], got {tuple(advantages.shape)}")
    if not torch.isfinite(advantages).all():
        raise ValueError("advantages (and the rewards behind them) must be finite")
    empty = (~mask.any(dim=1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"a trajectory needs at least one policy token; rows {empty} have none")
    for name, values in (("logprobs", logprobs), ("behavior_logprobs", behavior_logprobs)):
        values = values.detach()[mask]
        if not torch.isfinite(values).all() or (values > 0).any():
            raise ValueError(f"{name} must be finite and ≤ 0 on every policy token")

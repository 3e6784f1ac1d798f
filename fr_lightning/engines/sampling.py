"""Drawing one token per row of logits, each row by its own settings and its own uniform number.

Invariant: a token of probability zero is never drawn without its row being reported as not finite, and the
log-probability returned is that of the very distribution that was inverted.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fr_lightning.engines.base import Sampling

VOCABULARY_BLOCK = 256


def sample(logits: Tensor, samplings: list[Sampling], uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution at a uniform number.

    Temperature comes first, then top-k, top-p over what is left, and min-p. The log-probability is that of the
    distribution drawn from; a greedy row (temperature 0) reports the model's own, at temperature 1.

    Args:
        logits: [n, V], of any floating type.
        samplings: one per row.
        uniforms: [n] float64 in [0, 1).

    Returns:
        token ids [n] int64, log-probabilities [n] float32, and whether the row's logits were finite [n] bool (-inf,
        a token ruled out, is allowed).
    """
    device = logits.device
    scores = logits.float()
    if any(s.temperature not in (0.0, 1.0) for s in samplings):
        scores = scores / torch.tensor([s.temperature or 1.0 for s in samplings], device=device)[:, None]
    filtered = [row for row, s in enumerate(samplings) if s.temperature > 0 and not s.full_support]
    if filtered:
        scores = scores.index_copy(
            0, torch.tensor(filtered, device=device), _filter(scores[filtered], [samplings[row] for row in filtered])
        )
    probabilities = scores.softmax(-1)
    ids = _invert(probabilities, uniforms[:, None])
    greedy = [row for row, s in enumerate(samplings) if s.temperature == 0]
    if greedy:
        ids[greedy] = scores[greedy].argmax(-1, keepdim=True)
    logprobs = probabilities.gather(-1, ids)[:, 0].log()
    return ids[:, 0], logprobs.clamp(max=0.0), logprobs.isfinite()


def _invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Token [n, 1] at which the cumulative sum of a row [n, V] passes the uniform number [n, 1].

    First the block of the vocabulary, then the token in it: a cumulative sum over the whole of a large vocabulary in
    float64 would cost as much as several layers of a small model. A token of probability zero adds nothing to a sum,
    and `right=True` finds the first entry *above* a target that is below the last one: no number falls to it.
    """
    below_one = 1 - 2**-53
    blocks = F.pad(probabilities, (0, -probabilities.shape[1] % VOCABULARY_BLOCK)).unflatten(-1, (-1, VOCABULARY_BLOCK))
    cumulative = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    target = uniforms * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
    target -= F.pad(cumulative, (1, 0)).gather(-1, block)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, VOCABULARY_BLOCK))[:, 0].cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(inside, torch.minimum(target, inside[:, -1:] * below_one), right=True)
    return (block * VOCABULARY_BLOCK + token).clamp_(max=probabilities.shape[1] - 1)


def _filter(scores: Tensor, samplings: list[Sampling]) -> Tensor:
    """`scores` [n, V] with what top-k, top-p and min-p rule out at -inf; of equal scores the lower id ranks first."""
    device, vocab = scores.device, scores.shape[1]
    top_k = torch.tensor([s.top_k or vocab for s in samplings], device=device)[:, None]
    top_p = torch.tensor([s.top_p for s in samplings], device=device)[:, None]
    min_p = torch.tensor([s.min_p for s in samplings], device=device)[:, None]
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    ranked = ranked.masked_fill(torch.arange(vocab, device=device) >= top_k, -torch.inf)
    probabilities = ranked.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    dropped = (before >= top_p) & (top_p < 1)  # the token that crosses top-p stays
    dropped[:, 0] = False
    dropped |= probabilities < min_p * probabilities[:, :1]
    return torch.empty_like(scores).scatter_(-1, order, ranked.masked_fill(dropped, -torch.inf))

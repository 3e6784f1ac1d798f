"""From hidden states to log-probabilities and entropies, without ever holding [tokens, vocabulary].

Invariant: whatever the number of tokens M, only `chunk_tokens × V` logits exist at a time, in the forward pass and in
the backward pass; autograd keeps the hidden states, the targets and one log-normaliser per token. The values are those
of `log_softmax(logits / temperature)` in float32 (float64 for float64 inputs); matrix products run in the weights'
precision, or in autocast's where it is on.

`torch.nn.functional.linear_cross_entropy` (2.13) does not serve, though it chunks over tokens and, with
`reduction="none"`, has the right gradients: it returns neither entropies nor the normaliser, so entropies would take a
second product with the head; a temperature could only be folded into the hidden states, in their precision; and in
bfloat16 on a CPU it took ten times as long as this (1,024 tokens, vocabulary 49,152: 10.6 s against 0.9 s).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    chunk_tokens: int = 128,
) -> tuple[Tensor, Tensor]:
    """log π(target) and the entropy of π, for logits `logit_scale · (hidden @ weightᵀ + bias) / temperature`.

    Args:
        hidden: [M, D] hidden states; M may be 0.
        weight: [V, D] of the language-model head.
        targets: [M] int64.
        temperature: [M], positive.
        bias: [V] or None.
        logit_scale: constant factor of the model's own logits.
        chunk_tokens: memory in use is that of this many tokens' logits.

    Returns:
        log-probabilities [M] (≤ 0, with gradient) and full-vocabulary entropies [M] in nats (detached), float32 or
        float64.
    """
    return _TokenLogProbs.apply(hidden, weight, bias, targets, temperature, logit_scale, chunk_tokens)


class _TokenLogProbs(torch.autograd.Function):
    """Forward runs over blocks of tokens, so that each softmax is whole. Backward knows the normalisers and runs over
    blocks of the vocabulary: each row of the weight's gradient is then written once, by one product over all tokens,
    where blocks of tokens would add up [V, D] again and again, rounding each time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: Tensor,
        logit_scale: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        product, softmax = _dtypes(hidden, weight)
        h = hidden.to(product)
        scale = logit_scale / temperature.to(softmax)
        log_normaliser, target_logit, entropies = (h.new_empty(len(h), dtype=softmax) for _ in range(3))
        with torch.autocast(h.device.type, enabled=False):
            w, b = weight.to(product), None if bias is None else bias.to(product)
            logits, probabilities = (h.new_empty(min(chunk, len(h)), len(w), dtype=softmax) for _ in range(2))
            raw = logits if product == softmax else torch.empty_like(logits, dtype=product)
            for start in range(0, len(h), chunk):
                rows = slice(start, min(start + chunk, len(h)))
                size = rows.stop - start
                z, p = logits[:size], probabilities[:size]
                _product(h[rows], w.t(), b, out=raw[:size])
                torch.mul(raw[:size], scale[rows, None], out=z)
                torch.gather(z, 1, targets[rows, None], out=target_logit[rows, None])
                torch.logsumexp(z, dim=1, out=log_normaliser[rows])
                torch.exp(z.sub_(log_normaliser[rows, None]), out=p)  # z is log π from here on
                torch.linalg.vecdot(p, z, out=entropies[rows])
        ctx.save_for_backward(h, weight, bias, targets, scale, log_normaliser)
        ctx.chunk, ctx.dtypes, ctx.hidden_dtype = chunk, (product, softmax), hidden.dtype
        entropies = entropies.neg_()
        ctx.mark_non_differentiable(entropies)
        return (target_logit - log_normaliser).clamp_(max=0.0), entropies

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        h, weight, bias, targets, scale, log_normaliser = ctx.saved_tensors
        product, softmax = ctx.dtypes
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        # ∂ log π(y) / ∂ logit_v = scale · (1[v = y] − π(v))
        pull = grads[0].to(softmax) * scale
        vocabulary = len(weight)
        width = min(vocabulary, max(1, ctx.chunk * vocabulary // max(1, len(h))))
        grad_hidden = torch.zeros_like(h, dtype=softmax) if need_hidden else None
        grad_weight = torch.empty_like(weight) if need_weight else None
        grad_bias = torch.empty_like(bias) if need_bias else None
        with torch.autocast(h.device.type, enabled=False):
            buffer = h.new_empty(len(h) * width, dtype=softmax)
            raw_buffer = buffer if product == softmax else torch.empty_like(buffer, dtype=product)
            for start in range(0, vocabulary, width):
                block = slice(start, min(start + width, vocabulary))
                size = block.stop - start
                w = weight[block].to(product)
                z = buffer[: len(h) * size].view(len(h), size)
                raw = raw_buffer[: len(h) * size].view(len(h), size)
                _product(h, w.t(), None if bias is None else bias[block].to(product), out=raw)
                torch.mul(raw, scale[:, None], out=z)
                z.sub_(log_normaliser[:, None]).exp_().mul_(-pull[:, None])
                inside = (targets >= start) & (targets < block.stop)
                z.scatter_add_(1, (targets - start).clamp(0, size - 1)[:, None], (pull * inside)[:, None])
                if grad_bias is not None:
                    grad_bias[block] = z.sum(dim=0)
                g = raw.copy_(z)
                if grad_hidden is not None:
                    grad_hidden += g @ w
                if grad_weight is not None:
                    grad_weight[block] = g.t() @ h
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(ctx.hidden_dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _dtypes(hidden: Tensor, weight: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Precision of the matrix products and of the softmax. Autocast leaves float64 alone, and so does this."""
    device = hidden.device.type
    product = torch.promote_types(hidden.dtype, weight.dtype)
    if torch.is_autocast_enabled(device) and product != torch.float64:
        product = torch.get_autocast_dtype(device)
    return product, torch.promote_types(product, torch.float32)


def _product(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)

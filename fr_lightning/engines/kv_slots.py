"""Keys and values of many conversations at once, and the attention over them, for models of transformers.

The new tokens of a step are packed into one row `[1, T]` without padding, whatever mixture of single decoded tokens
and pieces of prompts they are; `KVSlots.attention` is registered as the model's attention function, stores the step's
keys and values in their conversations' slots and lets each token attend to its own conversation only.

Invariant: what a token's attention sees is positions 0..p of its own slot, p being the token's own position. Whatever
else lies in the tensors (older conversations, unused tails) has no weight, and is finite: it cannot leak as NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LENGTH_BLOCK = 256
"""Slots grow by this many tokens."""

DECODE_GROUP = 16
"""Rows decoded by one call of the attention kernel, padded to the longest among them."""


class Span(NamedTuple):
    """The new tokens of one conversation in a step: positions `start..start + tokens - 1` of slot `slot`."""

    slot: int
    start: int
    tokens: int


@dataclass(frozen=True)
class _Step:
    """What the layers of one forward pass share. The first `decoded` tokens belong to slots 0..decoded - 1."""

    decoded: int
    slots: Tensor  # [T]
    positions: Tensor  # [T]
    decode_masks: list[Tensor]  # per group of rows [rows, 1, 1, L], 0 or -inf
    prompts: list[
        tuple[int, Span, Tensor | None]
    ]  # first token in the step, span, mask [G · tokens, end] unless start = 0


class UnsupportedAttention(ValueError):
    """The model's attention is not plain causal attention."""


class KVSlots:
    """Slot tensors `[slots, kv_heads, length, head_dim]` per layer, grown as they are needed.

    Args:
        max_slots: most conversations held.
        max_length: most tokens in one of them.
    """

    def __init__(self, max_slots: int, max_length: int):
        self.max_slots = max_slots
        self.max_length = max_length
        self._slots = 0
        self._length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._step: _Step | None = None

    def plan(self, decoded: int, spans: list[Span], device: torch.device, dtype: torch.dtype, groups: int) -> Tensor:
        """Prepare one forward pass over the tokens of `spans`, in their order.

        Args:
            decoded: how many spans at the front are single tokens of slots 0, 1, 2, …
            groups: query heads that share one key head.

        Returns:
            position ids, [1, T] int64.
        """
        self._reserve(1 + max(span.slot for span in spans), max(span.start + span.tokens for span in spans))
        slots: list[int] = []
        positions: list[int] = []
        prompts: list[tuple[int, Span, Tensor | None]] = []
        for index, span in enumerate(spans):
            if index >= decoded:
                prompts.append((len(slots), span, _chunk_mask(span, groups, device, dtype) if span.start else None))
            slots.extend([span.slot] * span.tokens)
            positions.extend(range(span.start, span.start + span.tokens))
        where = torch.tensor([slots, positions], device=device)
        masks = []
        for first in range(0, decoded, DECODE_GROUP):
            last = min(first + DECODE_GROUP, decoded)
            length = 1 + max(positions[first:last])
            beyond = torch.arange(length, device=device) > where[1, first:last, None]
            masks.append(
                torch.zeros(beyond.shape, dtype=dtype, device=device).masked_fill_(beyond, -torch.inf)[:, None, None]
            )
        self._step = _Step(decoded, where[0], where[1], masks, prompts)
        return where[1:2]

    def attention(
        self,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention function in the form transformers calls: query [1, H, T, D], key and value [1, H_kv, T, D]."""
        step = self._step
        assert step is not None, "plan() comes before the forward pass"
        if sliding_window is not None and sliding_window < self.max_length:
            raise UnsupportedAttention(
                f"the model attends to a window of {sliding_window} tokens only: set max_context ≤ {sliding_window}"
            )
        for option in ("softcap", "s_aux", "position_bias"):
            if kwargs.get(option) is not None:
                raise UnsupportedAttention(f"the model's attention needs {option}")
        keys, values = self._layer(module.layer_idx, key, value)  # pyright: ignore[reportArgumentType]
        keys[step.slots, :, step.positions] = key[0].transpose(0, 1)
        values[step.slots, :, step.positions] = value[0].transpose(0, 1)

        _, heads, tokens, _ = query.shape
        kv_heads = key.shape[1]
        output = value.new_empty(1, tokens, heads, value.shape[-1])
        # The query heads of one key head are folded into the query length: no copy of the keys per query head.
        folded = query[0].view(kv_heads, heads // kv_heads, tokens, -1)  # [H_kv, G, T, D]
        for index, mask in enumerate(step.decode_masks):
            first, rows, length = index * DECODE_GROUP, mask.shape[0], mask.shape[-1]
            stop = first + rows
            attended = F.scaled_dot_product_attention(
                folded[:, :, first:stop].permute(2, 0, 1, 3),  # [rows, H_kv, G, D]
                keys[first:stop, :, :length],
                values[first:stop, :, :length],
                attn_mask=mask,
                scale=scaling,
            )
            output[0, first:stop] = attended.flatten(1, 2)
        for first, span, mask in step.prompts:
            stop, end = first + span.tokens, span.start + span.tokens
            row_keys, row_values = keys[span.slot, None, :, :end], values[span.slot, None, :, :end]
            if mask is None:
                attended = F.scaled_dot_product_attention(
                    query[:, :, first:stop], row_keys, row_values, is_causal=True, scale=scaling, enable_gqa=True
                )[0]
            else:
                attended = F.scaled_dot_product_attention(
                    folded[None, :, :, first:stop].flatten(2, 3), row_keys, row_values, attn_mask=mask, scale=scaling
                )
                attended = attended.view(heads, span.tokens, -1)
            output[0, first:stop] = attended.transpose(0, 1)
        return output, None

    def swap(self, a: int, b: int, length_a: int, length_b: int) -> None:
        """Exchange two slots of which the first `length_a` and `length_b` tokens matter."""
        if a == b:
            return
        for tensor in (tensor for layer in self._layers.values() for tensor in layer):
            aside = tensor[a, :, :length_a].clone()
            tensor[a, :, :length_b] = tensor[b, :, :length_b]
            tensor[b, :, :length_a] = aside

    def scrub(self, slot: int) -> None:
        """Make a slot finite again after a forward pass that was not."""
        for keys, values in self._layers.values():
            keys[slot].zero_()
            values[slot].zero_()

    def _reserve(self, slots: int, length: int) -> None:
        if slots <= self._slots and length <= self._length:
            return
        if slots > self._slots:
            self._slots = min(self.max_slots, max(slots, 2 * self._slots, 4))
        if length > self._length:
            blocks = -(-max(length, self._length * 5 // 4) // LENGTH_BLOCK)
            self._length = min(self.max_length, blocks * LENGTH_BLOCK)
        for index, (keys, values) in self._layers.items():
            self._layers[index] = (self._grown(keys), self._grown(values))

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(self._slots, old.shape[1], self._length, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def _layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if index not in self._layers:
            self._layers[index] = (
                key.new_zeros(self._slots, key.shape[1], self._length, key.shape[3]),
                value.new_zeros(self._slots, value.shape[1], self._length, value.shape[3]),
            )
        return self._layers[index]


def _chunk_mask(span: Span, groups: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[G · tokens, start + tokens]: token i of the chunk sees the positions up to start + i."""
    visible = torch.ones(span.tokens, span.start + span.tokens, dtype=torch.bool, device=device).tril_(span.start)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
    return mask.repeat(groups, 1)

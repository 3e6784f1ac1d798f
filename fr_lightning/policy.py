"""The policy: a causal language model as a function from trajectories to log-probabilities and entropies.

Invariant: the same weights give the same log-probabilities whatever the padding, packing, chunking or activation
checkpointing. So dropout is removed, not merely switched off; padding never reaches a policy token; and a model whose
logits are not a scaled linear map of its last hidden state is refused at construction. Every parameter, the head's
included, is used inside `forward`, as FSDP2 needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from fr_lightning.logprobs import token_logprobs
from fr_lightning.lora import Lora, adapt
from fr_lightning.models import load_causal_lm
from fr_lightning.routing import ExpertRouting
from fr_lightning.trajectory import NO_EXPERT, PaddedRows

Dtype = Literal["float32", "bfloat16", "float64"]
Attention = Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "varlen"]

_UNPADDED = ("flash_attention_2", "flash_attention_3", "varlen")
_NO_DROPOUT = ("drop", "jitter")


@dataclass(frozen=True)
class PolicyConfig:
    """Which model, and how its forward runs; none of the rest but `routing_replay` changes a log-probability beyond
    rounding.

    Attributes:
        name: as `fr_lightning.models.resolve_model` takes it.
        dtype: of the weights. Mixed precision is the trainer's `precision`, not this.
        activation_checkpointing: recompute each decoder layer in backward instead of keeping its activations.
        attention: `auto` is `varlen` on CUDA in half precision where the model allows it, else the model's own default
            (mostly `sdpa`). `varlen` is PyTorch's own flash attention over sequences of unequal length.
        packed: rows laid end to end without padding; None packs for the kernels that gain from it (flash, varlen).
            With `sdpa` and `eager` packing gives equal values but costs a mask [ΣN, ΣN].
        chunk_tokens: how many tokens' logits exist at a time. 128 was fastest or near it of 32 to 1,024 on a CPU
            with 49,152 tokens of vocabulary.
        trust_remote_code: run Python code that comes with the model.
        compile: `torch.compile` the decoder's layers.
        routing_replay: of a mixture of experts, send each token to the experts that the rollout engine sent it to (R3);
            the engine records them then.
        lora: train low-rank adapters and leave the model's own weights as they are; null: train those.
    """

    name: str = "embedded"
    dtype: Dtype = "float32"
    activation_checkpointing: bool = False
    attention: Attention = "auto"
    packed: bool | None = None
    chunk_tokens: int = 128
    trust_remote_code: bool = False
    compile: bool = False
    routing_replay: bool = False
    lora: Lora | None = None

    def __post_init__(self) -> None:
        if self.dtype not in get_args(Dtype):
            raise ValueError(f"dtype must be one of {get_args(Dtype)}, got {self.dtype!r}")
        if self.attention not in get_args(Attention):
            raise ValueError(f"attention must be one of {get_args(Attention)}, got {self.attention!r}")
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be ≥ 1, got {self.chunk_tokens}")
        if self.compile and self.routing_replay:
            raise ValueError("model.policy.routing_replay does not go with model.policy.compile: set one to false")


class PolicyOutput(NamedTuple):
    """[b, N] each, float32 (float64 for float64 weights); 0.0 where the policy sampled nothing.

    Slot t of `logprobs` is log π(token_t | tokens before t) at the row's temperature and carries the graph; slot t of
    `entropies` is the entropy, in nats, of the distribution token_t was drawn from, detached.
    """

    logprobs: Tensor
    entropies: Tensor


class Policy(nn.Module):
    """Any Hugging Face causal language model with a linear head.

    Args:
        config: what to load and how to run it.
        model: an already built model to wrap; None loads `config.name`.

    Raises:
        ValueError: the model's logits are not those of its head alone; or routing is to be replayed and it has none.
    """

    def __init__(self, config: PolicyConfig, model: PreTrainedModel | None = None):
        super().__init__()
        self.config = config
        if model is None:
            dtype = getattr(torch, config.dtype)
            model = load_causal_lm(config.name, dtype, trust_remote_code=config.trust_remote_code)
        self.model = model
        self.logit_scale = _logit_scale(model.config)
        self._own_attention = str(model.config._attn_implementation)
        self._can_pack = True
        self._routing = ExpertRouting(model) if config.routing_replay else None
        _remove_dropout(model)
        self.train()
        if not next(model.parameters()).is_meta:  # there is something to compute with
            self.verify()
        if config.lora is not None:
            adapt(model, config.lora)
        if config.activation_checkpointing:
            options: dict[str, Any] = {"use_reentrant": False}
            if self._routing is not None:
                options["context_fn"] = self._routing.checkpoint_contexts
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        if config.compile:  # layer by layer: their code is one, and FSDP2 gathers between them
            for layer in self.layers:
                layer.compile(dynamic=True)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's.

        Raises:
            ValueError: it has none that can be told apart.
        """
        lists = [module for module in self.decoder.children() if isinstance(module, nn.ModuleList)]
        if not lists:
            raise ValueError(
                f"{type(self.decoder).__name__} has no list of layers: it can be neither sharded nor compiled"
            )
        return max(lists, key=len)

    def verify(self) -> None:
        """Run a few tokens through the model, to see that it is one that this class computes rightly. For a model on
        `meta` it is left to whoever gives it its weights. Computes with all parameters, as `forward` does.

        Raises:
            ValueError: the model's logits are not those of its head alone.
        """
        with torch.compiler.set_stance("force_eager") if self.config.compile else contextlib.nullcontext():
            with (
                contextlib.nullcontext() if self._routing is None else self._routing.record()
            ):  # what cannot be is refused
                self._check_head()
            self._can_pack = self._rows_stay_apart()

    @property
    def packed(self) -> bool:
        """Whether forward lays rows end to end, so that a micro-batch costs the sum of its lengths.

        Raises:
            ValueError: packing was asked for, and this model's layers look from one packed row into another.
        """
        packed = self._attention in _UNPADDED if self.config.packed is None else self.config.packed
        if packed and not self._can_pack:
            raise ValueError(f"{type(self.model).__name__} cannot tell packed rows apart: use attention sdpa, unpacked")
        return packed

    def forward(self, rows: PaddedRows) -> PolicyOutput:
        """Log-probabilities and entropies of the rows' policy tokens. Rows without any are allowed.

        Raises:
            ValueError: a context starts with a policy token, which nothing predicts; or routing is to be replayed and
                the rows hold none, or another model's.
        """
        if self.model.config._attn_implementation != self._attention:
            self.model.set_attn_implementation(self._attention)
        row, slot = rows.policy_mask.nonzero(as_tuple=True)  # [M], row by row
        if (rows.policy_mask & rows.context_starts).any():
            raise ValueError("the first slot of a context is a prompt token: no policy can have sampled it")
        hidden, index = self._packed_states(rows) if self.packed else self._padded_states(rows)
        head = self._head
        logprobs, entropies = token_logprobs(
            hidden.flatten(0, 1)[index[row, slot - 1]],
            head.weight,
            rows.token_ids[row, slot],
            rows.temperature[row],
            bias=head.bias,
            logit_scale=self.logit_scale,
            chunk_tokens=self.config.chunk_tokens,
        )
        empty = logprobs.new_zeros(rows.policy_mask.shape)
        return PolicyOutput(
            logprobs=empty.masked_scatter(rows.policy_mask, logprobs),
            entropies=empty.masked_scatter(rows.policy_mask, entropies),
        )

    def named_published_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """What an engine needs after an update: each parameter once, by its name in the Hugging Face model.

        A head tied to the embeddings comes once, as the embeddings. Under FSDP2 the tensors are sharded (DTensor).
        Adapters (`lora`) are still beside the weights that they belong to; `fr_lightning.lora.merged` puts them in.
        """
        return self.model.named_parameters(remove_duplicate=True)

    @property
    def decoder(self) -> nn.Module:
        """The model without its head."""
        return self.model.get_decoder()

    @property
    def _head(self) -> nn.Linear:
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"{type(self.model).__name__} has no linear language-model head, but {type(head).__name__}"
            )
        return head

    @property
    def _attention(self) -> str:
        """Chosen at each forward: the device and the precision are the trainer's, and come after construction."""
        if self.config.attention != "auto":
            return self.config.attention
        parameter = next(self.parameters())
        half = torch.is_autocast_enabled("cuda") or parameter.dtype in (torch.bfloat16, torch.float16)
        varlen = parameter.is_cuda and half and self._can_pack and self.model._supports_attention_backend
        return "varlen" if varlen else self._own_attention

    def _states(self, rows: PaddedRows, arranged: Callable[[Tensor, int], Tensor], **options: Any) -> Tensor:
        """Last hidden states of the rows' tokens, and their routes replayed, both arranged by a function of columns
        [b, N, …] and a filling.
        """
        replay: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._routing is not None:
            if rows.routed_experts is None:
                raise ValueError(
                    "model.policy.routing_replay is on and no trajectory holds routed experts: the engine recorded "
                    "none (Engine.record_routes)"
                )
            replay = self._routing.replay(arranged(rows.routed_experts, NO_EXPERT).flatten(0, 1))
        with replay:
            return self.decoder(input_ids=arranged(rows.token_ids, 0), use_cache=False, **options).last_hidden_state

    def _padded_states(self, rows: PaddedRows) -> tuple[Tensor, Tensor]:
        """Last hidden states [contexts, longest context, D], and where each slot [b, N] is in them once flattened.

        Padding is on the right and the decoder is causal, so nothing looks at padding and no mask is needed; without
        one, the kernels take their fast causal path.
        """
        context, position = _contexts(rows)
        mask = rows.attention_mask
        size = int(context.max()) + 1, int(position[mask].max()) + 1

        def arranged(column: Tensor, filling: int) -> Tensor:
            rectangle = column.new_full((*size, *column.shape[2:]), filling)
            rectangle[context[mask], position[mask]] = column[mask]
            return rectangle

        return self._states(rows, arranged), context * size[1] + position

    def _packed_states(self, rows: PaddedRows) -> tuple[Tensor, Tensor]:
        """The same with contexts end to end: hidden states [1, ΣN, D]. Positions start anew at each, which is how
        transformers tells them apart; flash kernels are told outright.
        """
        mask = rows.attention_mask
        context, position = _contexts(rows)
        lengths = torch.bincount(context[mask])
        options: dict[str, Any] = {}
        if self._attention in _UNPADDED:
            boundaries = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
            longest = int(lengths.max())
            options = {
                "cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries,
                "max_length_q": longest, "max_length_k": longest,
            }  # fmt: skip
        hidden = self._states(
            rows, lambda column, filling: column[mask][None], position_ids=position[mask][None], **options
        )
        return hidden, mask.flatten().cumsum(0).view_as(rows.token_ids) - 1

    @torch.no_grad()
    def _check_head(self) -> None:
        """The model's own logits of four tokens must be what this class computes from its hidden states."""
        ids = torch.arange(4, device=next(self.parameters()).device)[None] + 1
        expected = self.model(input_ids=ids, use_cache=False).logits.float()
        hidden = self.decoder(input_ids=ids, use_cache=False).last_hidden_state
        found = self._head(hidden).float() * self.logit_scale
        tolerance = 8 * torch.finfo(hidden.dtype).eps * max(1.0, float(expected.abs().max()))
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=0.0, atol=tolerance):
            raise ValueError(
                f"{type(self.model).__name__}: the model's logits are not a scaled linear map of its last hidden state "
                "(final soft-capping, or several heads): its log-probabilities would be wrong here"
            )

    @torch.no_grad()
    def _rows_stay_apart(self) -> bool:
        """Whether a row's hidden states are the same alone and packed behind another: some models ignore positions,
        and recurrent ones carry their state across.
        """
        ids = torch.arange(6, device=next(self.parameters()).device)[None] % 4 + 1
        try:
            alone = self.decoder(input_ids=ids[:, 3:], use_cache=False).last_hidden_state
            positions = torch.arange(6, device=ids.device)[None] % 3
            packed = self.decoder(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[:, 3:]
        except TypeError:  # no positions in its signature
            return False
        return float((packed - alone).norm() / alone.norm()) < torch.finfo(alone.dtype).eps ** 0.5


def _contexts(rows: PaddedRows) -> tuple[Tensor, Tensor]:
    """Of each slot [b, N]: the number of its context, counted row by row, and its position in it."""
    starts = rows.context_starts
    slots = torch.arange(starts.shape[1], device=starts.device)
    first = torch.where(starts, slots, 0).cummax(dim=1).values
    return starts.flatten().cumsum(0).view_as(starts) - 1, slots - first


def _logit_scale(config: Any) -> float:
    """The constant by which a model multiplies (Cohere) or divides (Granite) its logits."""
    if getattr(config, "final_logit_softcapping", None):
        raise ValueError(f"{config.model_type}: soft-capped logits (final_logit_softcapping) are not supported")
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


def _remove_dropout(model: nn.Module) -> None:
    """Zero every dropout and router jitter, so that a model in training mode (activation checkpointing needs it) is
    the deterministic function that the engine runs.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and any(part in name for part in _NO_DROPOUT):
                setattr(module, name, 0.0)


def _varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface over `varlen_attn`: query [1, heads, ΣN, d] → [1, ΣN, heads, d]."""
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError('attention "varlen" has neither soft-capping nor sinks: choose "sdpa" or "eager"')
    if cu_seq_lens_q is None:  # not packed: the start-up check, or generation
        batch, _, length, _ = query.shape
        cu_seq_lens_q = torch.arange(batch + 1, device=query.device, dtype=torch.int32) * length
        max_length_q = length
    device = query.device.type
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    q, k, v = (states.transpose(1, 2).flatten(0, 1).to(half) for states in (query, key, value))
    output = varlen_attn(
        q, k, v, cu_seq_lens_q, cu_seq_lens_q, int(max_length_q or 0), int(max_length_q or 0),
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(output, Tensor)
    return output.view(query.shape[0], query.shape[2], *output.shape[1:]), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """`varlen_attn` knows the rows' boundaries and is causal by itself."""


AttentionInterface.register("varlen", _varlen_attention)
AttentionMaskInterface.register("varlen", _no_mask)

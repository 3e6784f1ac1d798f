"""Which experts the tokens of a mixture-of-experts model go to: recorded in one forward pass, replayed in another.

Routing replay (R3: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers",
arXiv 2510.11370; PAPER, "MoE"): two engines that differ in the last bit may send a token to other experts, and then
differ in its log-probability by far more than a bit. The learner therefore sends each token where the rollout engine
sent it.

Invariant: a replayed selection is the recorded one, expert for expert and in its order; the weights of the selected
experts are what the model makes of its own router's scores for them, so that gradients reach the router; a token
without a record, and any model that nothing is replayed in, goes where its router says.

Routers differ in all but one thing: they select by `topk` over the scores of all experts. That call is where this
module reaches in, inside the blocks that hold experts and nowhere else; what a router makes of the selected scores
(softmax before or after, sigmoid, renormalising, scaling) stays its own code. One kind of router is not served: one
that hides scores before it selects *and* weighs by the hidden scores (DeepSeek-V2's `group_limited_greedy`), which
gives no weight to a replayed expert that it hid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from fr_lightning.trajectory import NO_EXPERT


class NotRouted(ValueError):
    """The model has no experts to choose from, or chooses in a way that cannot be replayed."""


class ExpertRouting:
    """The routed layers of one model. Made once; what it adds to a forward pass is nothing until it records or replays.

    Args:
        model: a mixture of experts of transformers, whose routed blocks hold a module called `experts`. Changed: its
            blocks carry hooks from here on.

    Attributes:
        num_layers: L, decoder layers of the model, those without experts included: the numbering that vLLM uses.

    Raises:
        NotRouted: the model is no mixture of experts.
    """

    def __init__(self, model: PreTrainedModel):
        self.num_layers: int = model.config.get_text_config().num_hidden_layers
        self._name = type(model).__name__
        self._replayed: Tensor | None = None  # [T, L, k] of the tokens in the forward pass
        self._recorded: dict[int, Tensor] | None = None  # layer → [T, k]
        self._open: list[_Selection | None] = []  # one for each block being run
        found = 0
        for name, block in model.get_decoder().named_modules():
            experts = getattr(block, "experts", None)
            if isinstance(experts, nn.Module):
                layer = next(int(part) for part in name.split(".") if part.isdigit())  # "layers.3.mlp"
                self._watch(block, layer, _count(experts))
                found += 1
        if not found:
            raise NotRouted(
                f"{self._name} is no mixture of experts, there is nothing to replay: set model.policy.routing_replay "
                "to false"
            )

    @contextlib.contextmanager
    def record(self) -> Iterator[dict[int, Tensor]]:
        """What is selected in a forward pass inside, as it comes: layer → [T, k] int64, T tokens in their order."""
        outer, self._recorded = self._recorded, {}
        try:
            yield self._recorded
        finally:
            self._recorded = outer

    @contextlib.contextmanager
    def replay(self, routes: Tensor) -> Iterator[None]:
        """A forward pass inside sends tokens where they were sent before.

        Args:
            routes: [T, L, k] integers, for the T tokens of the pass, row by row as the model flattens them; NO_EXPERT
                where nothing was recorded (padding, say): those go where the router says.

        Raises:
            ValueError: the routes are of another model (also inside, by the layer that cannot use them).
        """
        if routes.ndim != 3 or routes.shape[1] != self.num_layers:
            raise ValueError(
                f"routes must be [tokens, {self.num_layers} layers, experts per token] for {self._name}, got "
                f"{tuple(routes.shape)}"
            )
        with self._again(routes):
            yield

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """`context_fn` of `torch.utils.checkpoint`: a layer is recomputed long after `replay` was left, and must then
        send the tokens where this forward pass does."""
        return contextlib.nullcontext(), self._again(self._replayed)

    def stack(self, recorded: Mapping[int, Tensor]) -> Tensor:
        """What `record` gave, as [T, L, k] int16 on the CPU; NO_EXPERT in layers without experts."""
        some = next(iter(recorded.values()))
        routes = some.new_full((len(some), self.num_layers, some.shape[-1]), NO_EXPERT, dtype=torch.int16)
        for layer, selected in recorded.items():
            routes[:, layer] = selected
        return routes.cpu()

    @contextlib.contextmanager
    def _again(self, routes: Tensor | None) -> Iterator[None]:
        outer, self._replayed = self._replayed, routes
        try:
            yield
        finally:
            self._replayed = outer

    def _watch(self, block: nn.Module, layer: int, num_experts: int) -> None:
        def enter(block: nn.Module, args: Any) -> None:
            selection = None
            if self._replayed is not None or self._recorded is not None:
                selection = _Selection(num_experts, None if self._replayed is None else self._replayed[:, layer])
                selection.__enter__()
            self._open.append(selection)

        def leave(block: nn.Module, args: Any, output: Any) -> None:
            selection = self._open.pop()
            if selection is None:
                return
            selection.__exit__(None, None, None)
            if output is None:  # the block failed, or checkpointing has recomputed all it needs
                return
            if selection.experts is None:
                wanted = "experts" if selection.wanted is None else f"{list(selection.wanted.shape)} experts"
                raise NotRouted(
                    f"layer {layer} of {self._name} selects no {wanted} by a topk over {num_experts} scores: nothing "
                    "can be replayed there (model.policy.routing_replay)"
                )
            if self._recorded is not None:
                self._recorded[layer] = selection.experts.detach().flatten(0, -2)

        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave, always_call=True)


class _Selection(TorchFunctionMode):
    """Inside it, `topk` over all experts returns the wanted ones with their scores.

    Of several such calls in a block (DeepSeek's groups, where there is one group) the last is the selection.
    """

    def __init__(self, num_experts: int, wanted: Tensor | None):
        self.num_experts = num_experts
        self.wanted = wanted  # [T, k], or None: the router's own
        self.experts: Tensor | None = None  # […, k] as selected

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        if scores.shape[-1] != self.num_experts:
            return result
        if self.wanted is not None:
            if self.wanted.shape[-1] != result.indices.shape[-1] or self.wanted.numel() != result.indices.numel():
                return result
            wanted = self.wanted.reshape(result.indices.shape).to(result.indices)
            selected = torch.where(wanted == NO_EXPERT, result.indices, wanted)
            result = torch.return_types.topk((scores.gather(-1, selected), selected))
        self.experts = result.indices
        return result


def _count(experts: nn.Module) -> int:
    count = getattr(experts, "num_experts", None)
    if isinstance(count, int):
        return count
    if isinstance(experts, nn.ModuleList):
        return len(experts)
    raise NotRouted(f"{type(experts).__name__} does not say how many experts it holds: its routing cannot be replayed")

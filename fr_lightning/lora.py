"""Low-rank adapters (LoRA): the base model is frozen, and only W + scale·B·A is learnt, with peft's layers.

Invariant: an adapted model is the base model with the weights that `merged` gives, under the base model's own names. So
engines, exports and everybody else see a plain model and never an adapter; training weights are left as they are.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

_ADAPTER = "default"
_PART = re.compile(rf"(?P<layer>.+)\.(?P<part>base_layer|lora_A\.{_ADAPTER}|lora_B\.{_ADAPTER})\.(?P<kind>weight|bias)")


class NoSuchLayer(ValueError):
    """`model.policy.lora.target_modules` and the model do not go together; the message says how."""


@dataclass(frozen=True)
class Lora:
    """Which layers carry an adapter, and how large it is.

    Attributes:
        rank: of B·A; a layer [out, in] learns rank · (out + in) numbers.
        alpha: the adapter's output is scaled by alpha / rank.
        target_modules: names of linear layers, or the ends of their names; one string is a regular expression for the
            whole name; `all-linear` is every linear layer but the head. Fused experts are no linear layers.
        dropout: must be 0: the engine has none, and log-probabilities must be those that it sampled with.
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: list[str] | str = "all-linear"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise ValueError(f"model.policy.lora needs rank ≥ 1 and alpha > 0, got {self.rank} and {self.alpha}")
        if self.dropout != 0:
            raise ValueError("model.policy.lora.dropout must be 0: the policy must be the function the engine samples")
        if not self.target_modules:
            raise ValueError("model.policy.lora.target_modules is empty: no layer would learn")

    @property
    def scale(self) -> float:
        """By which B·A is multiplied."""
        return self.alpha / self.rank


def adapt(model: PreTrainedModel, lora: Lora) -> None:
    """Freeze the model and give its layers adapters that change nothing yet (B = 0). A is drawn by torch's seed alone,
    so that all ranks, and a run of one process, begin with the same.

    Adapters are in float32 where the model is in half precision: steps of training are small beside their weights. They
    are on the CPU, and real, where the model's own weights are still on `meta`.

    Raises:
        ImportError: peft is missing.
        NoSuchLayer: a name in `target_modules` matches no linear layer, or the head.
    """
    config = _peft_config(lora)
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    head = model.get_output_embeddings()
    try:
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    except ValueError as error:
        raise NoSuchLayer(_matches_nothing(lora.target_modules, model)) from error
    adapters = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for target in [lora.target_modules] if isinstance(lora.target_modules, str) else lora.target_modules:
        ends = "" if isinstance(lora.target_modules, str) else f".{target}"
        if not any(f".{name}".endswith(ends) for name in adapters):
            raise NoSuchLayer(_matches_nothing(target, model))
    for name, layer in adapters.items():
        base = layer.get_base_layer()
        if not isinstance(base, nn.Linear) or base is head:
            raise NoSuchLayer(
                f"model.policy.lora.target_modules matches {name}: only linear layers but the head can be adapted"
            )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed())
        for layer in adapters.values():
            weight: Any = layer.get_base_layer().weight
            dtype = torch.float32 if weight.dtype in (torch.float16, torch.bfloat16) else weight.dtype
            for part in (layer.lora_A, layer.lora_B):
                part.to_empty(device="cpu" if weight.is_meta else weight.device).to(dtype)
            layer.reset_lora_parameters(_ADAPTER, init_lora_weights=True)


@torch.no_grad()
def merged(named: Iterable[tuple[str, Tensor]], scale: float) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model without adapters, out of those of a model with them.

    Args:
        named: whole parameters (not shards) by their names in the adapted model.
        scale: `Lora.scale`.

    Returns:
        by their names in the base model, one at a time: W + scale·B·A in the more precise type of the two, so that
        whoever wants another type rounds once; parameters without an adapter as they are. A weight is held back until
        its adapter has come.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named:
        match = _PART.fullmatch(name)
        if match is None:
            yield name, tensor
        elif match["kind"] == "bias":
            yield f"{match['layer']}.bias", tensor
        else:
            parts = waiting.setdefault(match["layer"], {})
            parts[match["part"].partition(".")[0]] = tensor
            if len(parts) == 3:
                weight, down, up = (parts[part] for part in ("base_layer", "lora_A", "lora_B"))
                del waiting[match["layer"]]
                dtype = torch.promote_types(weight.dtype, up.dtype)
                yield (
                    f"{match['layer']}.weight",
                    torch.addmm(weight.to(dtype), up.to(dtype), down.to(dtype), alpha=scale),
                )
    if waiting:
        raise ValueError(f"{next(iter(waiting))} has only a part of its adapter")


def base_name(name: str) -> str:
    """Of a frozen parameter, in the base model."""
    return name.replace(".base_layer.", ".")


def save_adapter(named: Iterable[tuple[str, Tensor]], lora: Lora, folder: Path, model: str) -> None:
    """Write the adapter alone, as `peft.PeftModel.from_pretrained` reads it.

    Args:
        named: whole parameters by their names in the adapted model.
        lora: how they were trained.
        folder: made if it is not there.
        model: the base model's name, for whoever finds the adapter.
    """
    config = _peft_config(lora)
    config.base_model_name_or_path, config.inference_mode = model, True
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    parts = {
        f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}": tensor.contiguous()
        for name, tensor in named
        if (match := _PART.fullmatch(name)) and match["part"] != "base_layer"
    }
    save_file(parts, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def check_installed() -> None:
    """Raises ImportError with what to do about it where peft is missing."""
    if importlib.util.find_spec("peft") is None:
        raise ImportError("model.policy.lora needs peft: pip install 'fr-lightning[lora]'")


def _peft_config(lora: Lora) -> Any:
    check_installed()
    from peft import LoraConfig

    targets = lora.target_modules
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType] (peft takes any number)
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


def _matches_nothing(target: list[str] | str, model: PreTrainedModel) -> str:
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return (
        f"model.policy.lora.target_modules {target!r} matches no linear layer of {type(model).__name__}, which has "
        f"{', '.join(sorted(names - {'lm_head'}))}"
    )

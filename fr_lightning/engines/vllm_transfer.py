"""Weights from a safetensors file into a running vLLM model: the worker's side of a publication.

The file lies in shared memory or on a disk that both sides see, so it works wherever vLLM does, a CPU included. It is
read one parameter at a time.

Invariant: after `finish_weight_update` every layer computes with the new weights. vLLM's own reload misses one case: on
a CPU, layers compute with a packed copy of their weight, and a head tied to the embeddings has no weight of its own
that could be loaded, so its copy would stay old, without a word.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from safetensors import safe_open
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform


@dataclass
class SafetensorsInit(WeightTransferInitInfo):
    """Nothing needs to be agreed on beforehand."""


@dataclass
class SafetensorsUpdate(WeightTransferUpdateInfo):
    """Where the file is."""

    path: str


class SafetensorsTransfer(WeightTransferEngine[SafetensorsInit, SafetensorsUpdate]):
    """vLLM's interface for loading weights from a trainer; its worker calls these in their order."""

    init_info_cls = SafetensorsInit
    update_info_cls = SafetensorsUpdate

    def init_transfer_engine(self, init_info: SafetensorsInit) -> None:
        return

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: SafetensorsUpdate) -> None:
        self.model.load_weights(_tensors(update_info.path))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            pack_shared_weights(self.model)

    def shutdown(self) -> None:
        return


def _tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.offset_keys():  # layer by layer, so that vLLM holds one at a time
            yield name, file.get_tensor(name)


def pack_shared_weights(model: nn.Module) -> None:
    """Pack anew every weight that vLLM keeps beside its packed copy: embeddings, and the heads tied to them."""
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and isinstance(weight, Tensor) and weight.numel():
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)

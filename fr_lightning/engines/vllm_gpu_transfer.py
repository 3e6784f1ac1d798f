"""Publications sent to vLLM's workers over NCCL (other GPUs, other machines) or CUDA IPC (a GPU that both sides use).

Unproven: written against the interfaces of vLLM 0.32 and exercised only as far as a machine without a GPU goes. The
start-up check compares engine and learner whatever the transport, so a fault here ends a run at its start.

Invariant: what is sent is the latest publication, whole, as it lies in shared memory; a replica that starts anew can be
sent it again without the learner.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.utils.network_utils import get_ip

if TYPE_CHECKING:
    from fr_lightning.engines.publications import Publication
    from fr_lightning.engines.vllm_replica import Replica


class GPUSender:
    """vLLM's own trainer-side sender for one replica; its methods block and belong in a thread.

    Args:
        transport: "nccl" or "ipc".
        replica: whose workers receive.
        loop: the event loop that the replica lives in.
        workers: how many the replica has.
    """

    def __init__(
        self, transport: Literal["nccl", "ipc"], replica: Replica, loop: asyncio.AbstractEventLoop, workers: int
    ):
        self._transport = transport
        self._control = _Control(replica, loop)
        self._source = _PublishedWeights()
        self._workers = workers
        self._sender: Any = None

    def send(self, publication: Publication) -> None:
        """The whole update between pause and resume, its version included."""
        self._source.publication = self._control.publication = publication
        with torch.cuda.device(publication.device):  # a new thread would use the first GPU
            if self._sender is None:
                self._sender = WeightTransferTrainerFactory.trainer_init(
                    self._init_info(), client=self._control, source=self._source
                )
            self._sender.send_weights()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.shutdown()

    def _init_info(self) -> Any:
        # Each rank of a distributed learner has an engine of its own, and is the one sender of its group.
        if self._transport == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(rank=0, packed=True)
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return NCCLTrainerInitInfo(rank=0, master_address=get_ip(), master_port=port, world_size=1 + self._workers)


class _PublishedWeights(WeightSource):
    """vLLM's view of a publication: what there is, and the tensors one by one, on the GPU."""

    publication: Publication

    def metadata(self) -> list[ParamMeta]:
        with safe_open(self.publication.path, framework="pt") as file:
            tensors = ((name, file.get_tensor(name)) for name in file.offset_keys())  # mapped, not read
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        with safe_open(self.publication.path, framework="pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name).to(self.publication.device)


class _Control:
    """vLLM's `VLLMWeightSyncClient`: blocking calls from the sender's thread to the replica's event loop."""

    publication: Publication

    def __init__(self, replica: Replica, loop: asyncio.AbstractEventLoop):
        self._replica, self._loop = replica, loop

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._wait(self._replica.init_transfer(init_info))

    def start_weight_update(self) -> None:
        self._wait(self._replica.start_transfer())

    def update_weights(self, update_info: Any) -> None:
        self._wait(self._replica.transfer(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._wait(self._replica.finish_transfer(str(self.publication.version)))

    def _wait(self, call: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(call, self._loop).result()

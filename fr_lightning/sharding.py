"""The policy in shards from its first byte on (FSDP2): built without weights, sharded, and only then given them.

Invariant: names and values of parameters are those of the model that one process would load, and no rank's device ever
holds all of them: only its shards, and one layer or one tensor at a time. In host memory neither, with one exception
(`_load_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fr_lightning.lora import base_name
from fr_lightning.models import empty_causal_lm, load_causal_lm, resolve_model
from fr_lightning.policy import Policy, PolicyConfig


def sharded_policy(config: PolicyConfig, mesh: DeviceMesh, *, offload: bool = False) -> Policy:
    """The policy with its weights, sharded over the mesh. Collective.

    Args:
        config: as for `Policy`.
        mesh: all ranks, by `data_parallel` and `tensor_parallel` coordinate.
        offload: keep shards, gradients and optimizer states in host memory; a layer comes to the device for its turn.

    Raises:
        ValueError: the model's decoder is not a list of layers, or as `Policy`.
    """
    dtype = getattr(torch, config.dtype)
    policy = Policy(config, empty_causal_lm(config.name, dtype, trust_remote_code=config.trust_remote_code))
    split_layers(policy, mesh["tensor_parallel"])
    shard(policy, mesh["data_parallel"], offload=offload)
    _load_weights(policy, mesh, torch.device("cpu") if offload else _device_of(mesh))
    register_fsdp_forward_method(policy, "verify")
    policy.verify()
    assert isinstance(policy, FSDPModule)
    policy.reshard()  # the root stays whole after a forward, and an optimizer must not see it so
    return policy


def split_layers(policy: Policy, team: DeviceMesh) -> None:
    """Each decoder layer over the ranks of a team, as transformers says for the architecture: heads of attention,
    columns of feed-forward networks.

    Args:
        policy: with its weights, or on `meta`; changed.
        team: one-dimensional.

    Raises:
        ValueError: the model is not one that this can be done with, or not over so many ranks.
    """
    size = team.size()
    if size == 1:
        return
    config = policy.model.config.get_text_config()
    refused = f"trainer.strategy.init_args.tensor_parallel_size {size}: "
    of_decoder: dict[str, str] = config.base_model_tp_plan or {}
    plan = {name: style for name, style in of_decoder.items() if name.startswith("layers.")}  # not embeddings and head
    unknown = sorted({style for style in plan.values() if style not in _STYLES})
    if not plan or unknown:
        raise ValueError(f"{refused}{type(policy.model).__name__} cannot be split so ({unknown or 'no plan for it'})")
    if policy.config.lora is not None:
        raise ValueError(refused + "adapters (model.policy.lora) are not split")
    heads = {name: getattr(config, name, size) for name in ("num_attention_heads", "num_key_value_heads")}
    for name, count in {**heads, "intermediate_size": config.intermediate_size}.items():
        if count % size:
            raise ValueError(f"{refused}the model's {name} is {count}, not a multiple of it")
    parallelize_module(policy.decoder, team, {name: _STYLES[style]() for name, style in plan.items()})


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # norms of each head, [b, N, heads, d]: the same weights on all ranks, whose gradients are summed over them
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}


def shard(policy: Policy, mesh: DeviceMesh, *, offload: bool = False) -> None:
    """Shard each decoder layer by itself, so that one layer at a time is whole, and the rest (embeddings, head, final
    norm) as the root.

    Args:
        policy: with its weights, or on `meta`; changed.
        mesh: one-dimensional, over the ranks that share a copy of the policy.
        offload: keep the shards in host memory.

    Raises:
        ValueError: the model's decoder is not a list of layers.
    """
    placement = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh, offload_policy=placement)
    fully_shard(policy, mesh=mesh, offload_policy=placement)


@torch.no_grad()
def _load_weights(policy: Policy, mesh: DeviceMesh, device: torch.device) -> None:
    """Real parameters in place of those on `meta`: each rank reads its slices of the files. Where the files hold other
    tensors than the model has (experts that it fuses, say), rank 0 loads it in host memory and deals them out.
    """
    model, config = policy.model, policy.config
    folder = resolve_model(config.name, trust_remote_code=config.trust_remote_code)
    weights: dict[str, nn.Parameter] = {}  # tied ones under both names, as one
    made: dict[int, nn.Parameter] = {}
    for name, empty in model.named_parameters(remove_duplicate=False):
        if empty.is_meta:
            if id(empty) not in made:
                made[id(empty)] = nn.Parameter(torch.empty_like(empty, device=device), empty.requires_grad)
            weights[name] = made[id(empty)]
    kept = model.state_dict()  # buffers that files hold
    wanted = {base_name(name): weights[name].detach() for name, _ in model.named_parameters() if name in weights}
    wanted |= {name: kept[name] for name, _ in model.named_buffers() if name in kept}
    on_file = dict(_shapes(folder))
    if all(on_file.get(name) == tensor.shape for name, tensor in wanted.items()):
        load(wanted, storage_reader=HuggingFaceStorageReader(path=folder))
    else:
        _deal_out(wanted, config, mesh)
    model.load_state_dict(weights, strict=False, assign=True)


def _shapes(folder: str) -> Iterator[tuple[str, torch.Size]]:
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                yield name, torch.Size(opened.get_slice(name).get_shape())


def _deal_out(wanted: dict[str, Tensor], config: PolicyConfig, mesh: DeviceMesh) -> None:
    """From rank 0 to all, one tensor at a time on the device."""
    whole: dict[str, Tensor] = {}
    if mesh.get_rank() == 0:
        model = load_causal_lm(config.name, getattr(torch, config.dtype), trust_remote_code=config.trust_remote_code)
        whole = model.state_dict()
    device = _device_of(mesh)
    for name, shards in wanted.items():
        source = whole[name].to(device) if whole else torch.empty(shards.shape, dtype=shards.dtype, device=device)
        torch.distributed.broadcast(source, 0)
        if isinstance(shards, DTensor):
            mine = distribute_tensor(source, shards.device_mesh, shards.placements, src_data_rank=None)
            shards.to_local().copy_(mine.to_local())
        else:
            shards.copy_(source)


def _device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's."""
    return torch.device("cpu") if mesh.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())

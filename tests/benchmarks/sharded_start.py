"""How much host memory a rank takes to load a policy under FSDP2: whole and then sharded, or in shards from the start.

    python -m tests.benchmarks.sharded_start --ranks 2

On a random model of some 200 MiB in float32, whose files are in bfloat16, as most published ones are. Printed for each
rank: the peak, while it loads, of memory that is the process's own (`RssAnon`: pages of the model's files, which the
system drops when it needs room, do not count), above what it had before, and its share of the weights. Then the peak
of the first forward, of a few tokens, which costs the same either way and leaves memory with the allocator.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import threading
import time

import torch
import torch._dynamo  # loaded by the first forward of FSDP2, and large
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.multiprocessing.spawn import start_processes

from fr_lightning.policy import Policy, PolicyConfig
from fr_lightning.sharding import shard, sharded_policy

HOW = ("whole", "shards")


def own_memory() -> int:
    """Bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


class Peak:
    """Of own memory above the start, while the block runs, looked at every two milliseconds."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.start = self.peak = own_memory()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, own_memory())

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()
        self.rise = (self.peak - self.start) / 2**20


def one_rank(rank: int, ranks: int, how: str, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{how}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    distributed.all_reduce(torch.randn(64, 64) @ torch.randn(64, 64))
    config = PolicyConfig(name=folder)
    check, Policy.verify = Policy.verify, lambda self: None  # a forward, in the midst of loading
    began = time.perf_counter()
    with Peak() as loading:
        if how == "whole":
            policy = Policy(config)
            shard(policy, mesh)
        else:
            policy = sharded_policy(config, mesh)
    seconds = time.perf_counter() - began
    Policy.first_forward = check  # pyright: ignore[reportAttributeAccessIssue]
    register_fsdp_forward_method(policy, "first_forward")
    with Peak() as forward:
        policy.first_forward()  # pyright: ignore[reportCallIssue]
    policy.reshard()  # pyright: ignore[reportCallIssue]
    mine = sum(parameter.to_local().nbytes for parameter in policy.parameters()) / 2**20  # pyright: ignore[reportCallIssue]
    print(
        f"{how:>6}, rank {rank}: peak {loading.rise:.0f} MiB for {mine:.0f} MiB of shards in {seconds:.1f} s; first "
        f"forward {forward.rise:.0f} MiB more",
        flush=True,
    )
    distributed.barrier()
    distributed.destroy_process_group()


def random_model(rank: int, folder: str) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=16_384, hidden_size=512, num_hidden_layers=16, intermediate_size=1408, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    size = sum(parameter.nbytes for parameter in model.parameters())
    largest = max(parameter.nbytes for parameter in model.parameters())
    model.bfloat16().save_pretrained(folder)
    print(f"model: {size / 2**20:.0f} MiB, largest parameter {largest / 2**20:.0f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # forked: what is imported is there already, and this process stays as small as that
        start_processes(random_model, (folder,), nprocs=1, start_method="fork")
        for how in HOW:
            start_processes(one_rank, (args.ranks, how, folder), nprocs=args.ranks, start_method="fork")


if __name__ == "__main__":
    main()

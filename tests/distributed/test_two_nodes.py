"""Two "nodes": network namespaces of their own joined by one virtual cable, torchrun meeting over it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.distributed.test_gradient import assert_equal, gradients

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
]
NODES = {"fr-node-0": "10.77.0.1", "fr-node-1": "10.77.0.2"}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def two_nodes() -> Iterator[None]:
    try:
        for name in NODES:
            ip("netns", "add", name)
        ip("link", "add", "fr-veth-0", "netns", "fr-node-0", "type", "veth", "peer", "fr-veth-1", "netns", "fr-node-1")
        for number, (name, address) in enumerate(NODES.items()):
            ip("-n", name, "address", "add", f"{address}/24", "dev", f"fr-veth-{number}")
            ip("-n", name, "link", "set", f"fr-veth-{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in NODES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_gradient_over_two_nodes_is_that_of_one_process(tiny_model, tmp_path, two_nodes, strategy):
    output = tmp_path / "gradients.pt"
    processes = []
    for number, name in enumerate(NODES):
        launcher = ["--nnodes", "2", "--nproc_per_node", "1", "--local_addr", NODES[name]]
        launcher += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{NODES['fr-node-0']}:29400", "--rdzv_id", "test"]
        launcher += ["--rdzv_conf", f"is_host={int(number == 0)}"]  # a namespace's host name is not its own
        program = ["-m", "tests.distributed.one_update", "--model", tiny_model, "--strategy", strategy]
        program += ["--ranks", "1", "--nodes", "2", "--output", str(output)]
        command = [sys.executable, "-m", "torch.distributed.run", *launcher, *program]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"fr-veth-{number}"}
        inside = ["ip", "netns", "exec", name]
        processes.append(
            subprocess.Popen(
                [*inside, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
            )
        )
    for process in processes:
        said, _ = process.communicate(timeout=280)
        assert process.returncode == 0, said[-4000:]
    assert_equal(torch.load(output, weights_only=True), gradients(tmp_path, tiny_model), 1e-10)

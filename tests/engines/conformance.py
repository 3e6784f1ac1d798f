"""What the tests of engines share: a model, each kind of engine on it, a plain forward pass to compare with."""

import asyncio
import functools
import importlib.util
import random
from dataclasses import dataclass

import psutil
import pytest
import torch

from fr_lightning.engines.base import Completion, Engine
from fr_lightning.engines.embedded import EmbeddedEngine
from fr_lightning.engines.server import VLLMServers
from fr_lightning.engines.vllm import VLLMEngine
from fr_lightning.models import SMOLLM2, load_causal_lm

CONTEXT = 512
SLOTS = 8
TOLERANCE = 2e-4

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup-vllm"
)

KINDS = {
    "embedded": (EmbeddedEngine, {"dtype": "float32"}, "embedded_worker"),
    "vllm": (VLLMEngine, {"dtype": "float32", "kv_cache_gib": 0.25}, "EngineCore"),
    "servers": (VLLMServers, {"servers": 2, "dtype": "float32", "kv_cache_gib": 0.25}, "vllm_plugin"),
}
EVERY_KIND = [pytest.param(kind, marks=[] if kind == "embedded" else needs_vllm) for kind in KINDS]
EVERY_KIND_ON_EVERY_MODEL = [
    pytest.param(
        (kind, model),
        id=f"{kind}-{model.rpartition('/')[2]}",
        marks=([] if kind == "embedded" else [needs_vllm]) + ([] if model == "embedded" else [pytest.mark.slow]),
    )
    for model in ("embedded", SMOLLM2)
    for kind in KINDS
]


@dataclass
class Kind:
    """One engine under test, started, with its event loop and its model."""

    name: str
    model: str
    engine: Engine
    loop: asyncio.AbstractEventLoop

    def run(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    def weights(self, seed: int = 0):
        return make_model(seed, self.model)

    def prompts(count: int, seed: int = 0, longest: int = 40, vocabulary: int = 512) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocabulary) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def processes(kind: str) -> list[psutil.Process]:
    """Those that serve engines of a kind, oldest first."""
    name = KINDS[kind][2]
    found = []
    for child in psutil.Process().children(recursive=kind != "servers"):
        with_name = [child.name(), *child.cmdline()] if alive(child.pid) else []
        if any(name in part for part in with_name):
            found.append(child)
    return sorted(found, key=lambda child: child.create_time())


def alive(pid: int) -> bool:
    """A process that nobody has reaped yet is dead."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

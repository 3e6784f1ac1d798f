"""What the tests of engines share: a model, each kind of engine on it, a plain forward pass to compare with."""

import asyncio
import functools
import importlib.util
import os
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
MODELS = tuple(os.environ.get("CONFORMANCE_MODELS", f"embedded {SMOLLM2}").split())
"""What the engines serve, named as in `fr_lightning.models`; all but "embedded" are for `-m slow`."""

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
    for model in MODELS
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

    def prompts(self, count: int, seed: int = 0) -> list[list[int]]:
        return prompts(count, seed, vocabulary=self.weights().config.vocab_size)


def make(kind: str, model: str = "embedded", **settings) -> Engine:
    engine, own, _ = KINDS[kind]
    return engine(**{"model": model, "max_context": CONTEXT, "max_sequences": SLOTS, **own, **settings})


def make_one(kind: str) -> Engine:
    """Of a fleet one server, where more would show nothing more."""
    return make(kind, **({"servers": 1} if kind == "servers" else {}))


@functools.lru_cache(maxsize=4)
def make_model(seed: int = 0, name: str = "embedded"):
    """The model, with a head tied to its embeddings: the case in which an update can be lost without a word. Each
    `seed` above 0 moves its weights elsewhere, far enough that other log-probabilities show."""
    model = load_causal_lm(name)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if seed and parameter.ndim == 2:
                parameter += 0.2 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return model


@torch.no_grad()
def reference(model, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probabilities of a completion by one plain forward pass over everything."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()


def assert_from_versions(completion: Completion, prompt: list[int], models: dict) -> None:
    """Each token's log-probability is what the model of its version says about everything before it."""
    by_version = {version: reference(model, prompt, completion.token_ids) for version, model in models.items()}
    expected = [by_version[version][index] for index, version in enumerate(completion.policy_versions)]
    assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE)


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

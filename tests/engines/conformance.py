"""What the tests of engines share: a tiny model, each kind of engine on it, a plain forward pass to compare with."""

import asyncio
import importlib.util
import random
from dataclasses import dataclass

import psutil
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from fr_lightning.assets.embedded import build_tokenizer, corpus
from fr_lightning.engines.base import Completion, Engine
from fr_lightning.engines.embedded import EmbeddedEngine
from fr_lightning.engines.server import VLLMServers
from fr_lightning.engines.vllm import VLLMEngine

VOCABULARY = len(build_tokenizer(corpus()))
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


@dataclass
class Kind:
    """One engine under test, started, and its event loop."""

    name: str
    engine: Engine
    loop: asyncio.AbstractEventLoop

    def run(self, coroutine):
        return self.loop.run_until_complete(coroutine)


def make(kind: str, folder: str, **settings) -> Engine:
    engine, own, _ = KINDS[kind]
    return engine(**{"model": folder, "max_context": CONTEXT, "max_sequences": SLOTS, **own, **settings})


def make_one(kind: str, folder: str) -> Engine:
    """Of a fleet one server, where more would show nothing more."""
    return make(kind, folder, **({"servers": 1} if kind == "servers" else {}))


def make_model(seed: int = 0):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,  # the case in which an update can be lost without a word
        initializer_range=0.15,  # far from uniform, so that a wrong distribution shows
        bos_token_id=None,
        eos_token_id=0,  # an ordinary token here: only what a request asks for ends a turn
    )
    return Qwen3ForCausalLM(config).eval()


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


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest))] for _ in range(count)]


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

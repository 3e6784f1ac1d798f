"""What several tests share: a tiny random model with the embedded policy's tokenizer."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from fr_lightning.assets.embedded import POLICIES, build_tokenizer, corpus

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "initializer_range": 0.15,  # far from uniform, so that log-probs have something to disagree about
}


def _save(folder: Path, model: type[PreTrainedModel], config: type[PreTrainedConfig], **further: Any) -> str:
    tokenizer = build_tokenizer(corpus(POLICIES["embedded"].lessons()))
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    model(config(**_SIZES, **ids, **further, vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Folder of a random two-layer Qwen3 (tied head, grouped heads) that can chat, in its way."""
    return _save(tmp_path_factory.mktemp("tiny_model"), Qwen3ForCausalLM, Qwen3Config)


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory) -> str:
    """The same as a mixture of eight experts, two for each token."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return _save(tmp_path_factory.mktemp("tiny_moe"), Qwen3MoeForCausalLM, Qwen3MoeConfig, **experts)

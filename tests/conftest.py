"""What several tests share: a tiny random model with the embedded policy's tokenizer."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from fr_lightning.assets.embedded import POLICIES, build_tokenizer, corpus


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Folder of a random two-layer Qwen3 (tied head, grouped heads) that can chat, in its way."""
    folder = tmp_path_factory.mktemp("tiny_model")
    tokenizer = build_tokenizer(corpus(POLICIES["embedded"].lessons()))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.15,  # far from uniform, so that log-probs have something to disagree about
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)

"""A tokenizer with a chat template."""

import pytest
from transformers import PreTrainedTokenizerFast

from fr_lightning.assets.embedded import build_tokenizer
from fr_lightning.rollout.conversation import ChatFormat


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(["What is 1 + 2? The answer is 3."])


@pytest.fixture(scope="session")
def chat(tokenizer) -> ChatFormat:
    return ChatFormat(tokenizer)

"""A folder with the tiny model of `conformance`."""

import pytest
from conformance import make_model

from fr_lightning.assets.embedded import build_tokenizer, corpus


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    build_tokenizer(corpus()).save_pretrained(folder)
    return str(folder)

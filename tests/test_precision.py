"""bfloat16 only where the machine has units for it."""

import pytest
import torch

from fr_lightning import models
from fr_lightning.precision import AutoPrecision


def test_the_machine_decides_and_weights_stay_as_they_are(monkeypatch):
    weight = torch.nn.Linear(4, 4)
    found = {}
    for fast in (False, True):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda fast=fast: fast, raising=False)
        with AutoPrecision().forward_context():
            found[fast] = weight(torch.ones(1, 4)).dtype
        assert models.fast_dtype("cpu") == found[fast]
        assert AutoPrecision().precision == ("bf16-mixed" if fast else "32-true")
    assert found == {False: torch.float32, True: torch.bfloat16}
    assert weight.weight.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_its_dtype_is_float32():
    assert models.fast_dtype("cuda") == torch.float32

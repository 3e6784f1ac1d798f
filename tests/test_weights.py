"""Whole tensors come out under the names and in the order they went in, cut off from the graph."""

import torch

from fr_lightning.weights import whole_tensors


def test_plain_tensors_pass_through_detached():
    layer = torch.nn.Linear(2, 3)
    out = list(whole_tensors(layer.named_parameters()))
    assert [name for name, _ in out] == ["weight", "bias"]
    assert all(not tensor.requires_grad for _, tensor in out)
    assert out[0][1].data_ptr() == layer.weight.data_ptr()  # no copy: one parameter at a time is enough

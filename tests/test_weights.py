"""Whole tensors come out under their names, in order, cut off from the graph; clipping is by the norm of them all."""

import pytest
import torch

from fr_lightning.weights import clip_gradient, whole_tensors


def test_plain_tensors_pass_through_detached():
    layer = torch.nn.Linear(2, 3)
    out = list(whole_tensors(layer.named_parameters()))
    assert [name for name, _ in out] == ["weight", "bias"]
    assert all(not tensor.requires_grad for _, tensor in out)
    assert out[0][1].data_ptr() == layer.weight.data_ptr()  # no copy: one parameter at a time is enough


@pytest.mark.parametrize(("limit", "factor"), [(None, 1.0), (10.0, 1.0), (1.0, 0.2)])
def test_a_gradient_is_scaled_down_to_its_limit_and_its_norm_is_told(limit, factor):
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad, parameters[2].grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert float(clip_gradient(iter(parameters), limit)) == pytest.approx(5.0)
    assert parameters[0].grad.tolist() == pytest.approx([3.0 * factor, 0.0], rel=1e-5)
    assert parameters[1].grad is None
    assert parameters[2].grad.tolist() == pytest.approx([0.0, 4.0 * factor], rel=1e-5)

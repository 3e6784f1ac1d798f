"""Chunked log-probabilities and entropies against plain log_softmax, and the memory they promise not to take."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fr_lightning.logprobs import token_logprobs


def inputs(tokens=13, width=6, vocabulary=17, dtype=torch.float64, bias=True, seed=0):
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_()

    return {
        "hidden": normal(tokens, width),
        "weight": normal(vocabulary, width),
        "bias": normal(vocabulary) if bias else None,
        "targets": torch.randint(vocabulary, (tokens,), generator=random),
        "temperature": torch.rand(tokens, generator=random, dtype=torch.float64) + 0.5,
    }


def plain(hidden, weight, targets, temperature, bias=None, logit_scale=1.0):
    logits = linear(hidden, weight, bias) * logit_scale / temperature[:, None]
    distribution = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)
    return distribution.gather(1, targets[:, None])[:, 0], -(distribution.exp() * distribution).sum(dim=-1).detach()


def gradients(function, arguments, **options):
    """Values, entropies and the gradients of a sum with unequal weights, some of them zero."""
    leaves = [tensor for tensor in (arguments["hidden"], arguments["weight"], arguments["bias"]) if tensor is not None]
    logprobs, entropies = function(**arguments, **options)
    weights = torch.linspace(-1.0, 1.0, len(logprobs), dtype=logprobs.dtype)
    return logprobs, entropies, torch.autograd.grad((weights * logprobs).sum(), leaves)


def test_by_hand():
    # Logits (0, ln 3) at temperature 1, then (0, 2 ln 3): probabilities 1/4, 3/4 and 1/10, 9/10.
    logprobs, entropies = token_logprobs(
        torch.tensor([[1.0], [1.0]]),
        torch.tensor([[0.0], [math.log(3)]]),
        torch.tensor([0, 1]),
        torch.tensor([1.0, 0.5]),
    )
    assert logprobs.tolist() == pytest.approx([math.log(0.25), math.log(0.9)])
    assert entropies.tolist() == pytest.approx(
        [-0.25 * math.log(0.25) - 0.75 * math.log(0.75), -0.1 * math.log(0.1) - 0.9 * math.log(0.9)]
    )


@given(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.integers(0, 5))
@settings(deadline=None, max_examples=40)
def test_equals_log_softmax_for_any_chunking(tokens, chunk_tokens, bias, seed):
    arguments = inputs(tokens=tokens, bias=bias, seed=seed)
    found = gradients(token_logprobs, arguments, logit_scale=0.7, chunk_tokens=chunk_tokens)
    expected = gradients(plain, arguments, logit_scale=0.7)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert not found[1].requires_grad


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_gradcheck(bias, chunk_tokens):
    arguments = inputs(tokens=5, width=3, vocabulary=7, bias=bias)

    def logprobs(hidden, weight, bias):
        arguments.update(hidden=hidden, weight=weight, bias=bias)
        return token_logprobs(**arguments, logit_scale=1.3, chunk_tokens=chunk_tokens)[0]

    assert torch.autograd.gradcheck(logprobs, (arguments["hidden"], arguments["weight"], arguments["bias"]))


def rounded(arguments, dtype, factor=1.0):
    """The same arguments with their differentiable tensors as leaves of another precision."""
    return {
        name: (tensor.detach() * factor).to(dtype).requires_grad_() if tensor.requires_grad else tensor
        for name, tensor in arguments.items()
    }


def test_float32_against_float64():
    arguments = inputs(tokens=64, width=32, vocabulary=500)
    exact = gradients(plain, arguments)
    single = {
        k: v.detach().float().requires_grad_() if k in ("hidden", "weight", "bias") else v for k, v in arguments.items()
    }
    logprobs, entropies, grads = gradients(token_logprobs, single, chunk_tokens=10)
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close((logprobs, entropies, grads), exact, rtol=1e-4, atol=1e-4, check_dtype=False)


def relative_error(found, expected):
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "bf16 weights"])
def test_bfloat16_rounds_no_worse_than_the_plain_way(autocast):
    arguments = rounded(inputs(tokens=200, width=64, vocabulary=300), torch.bfloat16, factor=0.3)
    exact = gradients(plain, rounded(arguments, torch.float64))
    dtype = torch.float32 if autocast else torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = gradients(token_logprobs, rounded(arguments, dtype), chunk_tokens=32)
        usual = gradients(plain, rounded(arguments, dtype))
    assert found[0].dtype == found[1].dtype == torch.float32
    assert [grad.dtype for grad in found[2]] == [dtype] * 3
    for ours, theirs, truth in zip(
        (*found[:2], *found[2]), (*usual[:2], *usual[2]), (*exact[:2], *exact[2]), strict=True
    ):
        assert relative_error(ours, truth) < max(1.5 * relative_error(theirs, truth), 4e-3)


def test_backward_outside_autocast_is_backward_inside():
    arguments = inputs(dtype=torch.float32, bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, _ = token_logprobs(**arguments, chunk_tokens=4)
        inside = torch.autograd.grad(logprobs.sum(), arguments["weight"], retain_graph=True)
    assert torch.equal(*inside, *torch.autograd.grad(logprobs.sum(), arguments["weight"]))


def test_certain_tokens_stay_at_or_below_zero():
    hidden = torch.full((50, 1), 3.0) * torch.linspace(1, 40, 50)[:, None]
    logprobs, entropies = token_logprobs(
        hidden, torch.tensor([[1.0], [-1.0], [0.3]]), torch.zeros(50, dtype=torch.long), torch.ones(50)
    )
    assert (logprobs <= 0).all()
    assert torch.isfinite(entropies).all()
    assert (entropies >= 0).all()


def test_no_tokens_give_zero_gradients():
    arguments = inputs(tokens=0)
    logprobs, entropies = token_logprobs(**arguments)
    assert logprobs.shape == entropies.shape == (0,)
    (logprobs.sum() * 0).backward()
    assert torch.equal(arguments["weight"].grad, torch.zeros(17, 6, dtype=torch.float64))


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen_parts_get_no_gradient(frozen):
    arguments = inputs()
    expected = gradients(plain, arguments)[2]
    arguments[frozen] = arguments[frozen].detach()
    logprobs, _ = token_logprobs(**arguments)
    (torch.linspace(-1.0, 1.0, 13, dtype=torch.float64) * logprobs).sum().backward()
    for name, grad in zip(("hidden", "weight", "bias"), expected, strict=True):
        if name == frozen:
            assert arguments[name].grad is None
        else:
            torch.testing.assert_close(arguments[name].grad, grad)


class LargestTensor(TorchDispatchMode):
    """The most elements any tensor has that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.itemsize)
        return result


def test_no_tensor_of_tokens_times_vocabulary():
    tokens, vocabulary, chunk_tokens = 256, 1000, 16
    arguments = inputs(tokens=tokens, width=4, vocabulary=vocabulary, dtype=torch.float32)
    with LargestTensor() as largest:
        logprobs, _ = token_logprobs(**arguments, chunk_tokens=chunk_tokens)
        logprobs.sum().backward()
    assert largest.elements == chunk_tokens * vocabulary
    with LargestTensor() as largest:  # the meter itself, on the plain way
        plain(**arguments)
    assert largest.elements == tokens * vocabulary

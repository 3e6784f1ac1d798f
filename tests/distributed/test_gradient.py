"""The gradient of a batch is the same, however many ranks share it and however they hold the weights."""

import os
import subprocess
import sys

import pytest
import torch


def gradients(folder, model, *options, strategy="auto", ranks=1, dtype="float64"):
    """By variant and micro-batching, from a run of `ranks` processes."""
    output = folder / f"{strategy}-{ranks}-{dtype}.pt"
    arguments = ["--model", model, "--strategy", strategy, "--ranks", str(ranks), "--dtype", dtype, *options]
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "tests.distributed.one_update", *arguments, "--output", str(output)],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(output, weights_only=True)


@pytest.fixture(scope="module")
def alone(tiny_model, tmp_path_factory):
    """One process, all rows at once."""
    return gradients(tmp_path_factory.mktemp("alone"), tiny_model)


def assert_equal(found, alone, tolerance):
    for name in {name for name, _ in found}:
        reference = alone[name, 0]
        assert reference.norm() > 0, name
        for (variant, number), gradient in found.items():
            if variant == name:
                error = float((gradient - reference).norm() / reference.norm())
                assert error <= tolerance, (name, number, error)


def test_one_process_agrees_with_itself_over_micro_batches_and_orders(alone):
    assert_equal(alone, alone, 1e-10)


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        ("ddp", 3),
        ("fsdp2", 2),
        pytest.param("tensor", 2, marks=pytest.mark.slow),
        pytest.param("tensor", 4, marks=pytest.mark.slow),
    ],
)
def test_ranks_together_make_the_gradient_of_one_process(tiny_model, tmp_path, alone, strategy, ranks):
    assert_equal(gradients(tmp_path, tiny_model, strategy=strategy, ranks=ranks), alone, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_compiled_layers_make_it_too(tiny_model, tmp_path, alone, strategy):
    found = gradients(tmp_path, tiny_model, "--compile", strategy=strategy, ranks=2)
    assert_equal(
        found, alone, 1e-6
    )  # the model computes its norms in float32, and rounds otherwise where they are fused


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("auto", 1), ("ddp", 2), ("fsdp2", 2)])
def test_in_float32_to_its_precision(tiny_model, tmp_path, alone, strategy, ranks):
    found = gradients(tmp_path, tiny_model, strategy=strategy, ranks=ranks, dtype="float32")
    assert_equal({key: value.double() for key, value in found.items()}, alone, 1e-5)

"""The objective against independently computed vectors, hand-worked numbers, and its own invariants."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fr_lightning.advantage import advantages
from fr_lightning.objective import Objective, policy_loss

VECTORS = json.loads((Path(__file__).parent / "vectors" / "objective.json").read_text())
VECTOR_DELTA = 3e-3  # the vectors leave δ out where it is this


def _objective(options: dict) -> Objective:
    options = {key: value for key, value in options.items() if key not in ("baseline", "positive_only")}
    if "q" in options:
        options["failure_token_fraction"] = options.pop("q")
    return Objective(**{"delta": VECTOR_DELTA, **options})


def _inputs(case: dict):
    inputs, options = case["inputs"], case["options"]
    double = {key: torch.tensor(inputs[key], dtype=torch.float64) for key in ("logp", "mu", "rewards", "entropy")}
    centred = advantages(
        double["rewards"],
        baseline=options.get("baseline", "batch"),
        groups=torch.tensor(inputs["groups"]),
        positive_only=options.get("positive_only", False),
    )
    return double, centred, torch.tensor(inputs["mask"]), torch.tensor(inputs["failed"])


@pytest.mark.parametrize("number", range(len(VECTORS)))
def test_vectors_whole(number):
    case = VECTORS[number]
    double, centred, mask, failed = _inputs(case)
    logprobs = double["logp"].requires_grad_()
    out = policy_loss(
        logprobs, double["mu"], centred, mask, _objective(case["options"]), entropies=double["entropy"], failed=failed
    )
    out.loss.backward()
    expected = {key: torch.tensor(value, dtype=torch.float64) for key, value in case["expected"].items()}
    torch.testing.assert_close(centred, expected["advantages"], rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(out.loss.detach(), expected["loss"], rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(logprobs.grad, expected["grad"], rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(out.drift, expected["drift"], rtol=1e-9, atol=1e-12)
    assert out.admitted.tolist() == expected["admitted"].bool().tolist()
    assert out.kept_tokens.tolist() == expected["kept_tokens"].int().tolist()


@pytest.mark.parametrize("number", range(len(VECTORS)))
@pytest.mark.parametrize("rows_each", [1, 3])
def test_vectors_in_micro_batches(number, rows_each):
    case = VECTORS[number]
    double, centred, mask, failed = _inputs(case)
    logprobs = double["logp"].requires_grad_()
    total = 0.0
    for start in range(0, len(centred), rows_each):
        part = slice(start, start + rows_each)
        out = policy_loss(
            logprobs[part],
            double["mu"][part],
            centred[part],
            mask[part],
            _objective(case["options"]),
            num_trajectories=len(centred),
            num_tokens=int(mask.sum()),
            entropies=double["entropy"][part],
            failed=failed[part],
        )
        out.loss.backward()
        total += out.loss.item()
    assert total == pytest.approx(case["expected"]["loss"], rel=1e-10, abs=1e-14)
    expected = torch.tensor(case["expected"]["grad"], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, expected, rtol=1e-10, atol=1e-14)


def test_one_token_by_hand():
    # μ = 0.5, π = 0.6, A = 2, B = 1, T = 1: ρ = 1.2, loss = −2 · 1.2 · ln 0.6, gradient −2.4
    logprobs = torch.tensor([[math.log(0.6)]], dtype=torch.float64, requires_grad=True)
    out = policy_loss(
        logprobs,
        torch.tensor([[math.log(0.5)]], dtype=torch.float64),
        torch.tensor([2.0], dtype=torch.float64),
        torch.tensor([[True]]),
        Objective(delta=math.inf),
    )
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-2.4 * math.log(0.6), rel=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-2.4, rel=1e-12)
    assert out.drift.item() == pytest.approx(0.5 * math.log(0.5 / 0.6) + 0.5 * math.log(0.5 / 0.4), rel=1e-12)
    assert out.importance_ratio.mean.item() == pytest.approx(1.2, rel=1e-12)


def test_drift_equal_to_delta_is_admitted():
    logprobs = torch.tensor([[-1.0, -0.7]], dtype=torch.float64)
    behavior = torch.tensor([[-1.1, -0.5]], dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    drift = policy_loss(logprobs, behavior, torch.ones(1), mask, Objective()).drift.item()
    assert policy_loss(logprobs, behavior, torch.ones(1), mask, Objective(delta=drift)).admitted.all()
    below = math.nextafter(drift, 0.0)
    rejected = policy_loss(logprobs, behavior, torch.ones(1), mask, Objective(delta=below))
    assert not rejected.admitted.any()
    assert rejected.loss.item() == 0.0
    assert rejected.kept_tokens.tolist() == [0]


def test_ratio_is_clamped_at_thirty_nats():
    logprobs = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    behavior = torch.tensor([[-80.0]], dtype=torch.float64)
    out = policy_loss(logprobs, behavior, torch.ones(1), torch.ones(1, 1, dtype=torch.bool), Objective(gate="none"))
    assert out.importance_ratio.max.item() == pytest.approx(math.exp(30.0), rel=1e-12)


def test_log_ratios_are_float32_for_half_precision_inputs():
    logprobs = torch.tensor([[-1.0]], dtype=torch.bfloat16, requires_grad=True)
    behavior = torch.tensor([[-1.001]])  # bfloat16 would round it to −1
    out = policy_loss(logprobs, behavior, torch.ones(1), torch.ones(1, 1, dtype=torch.bool), Objective(gate="none"))
    assert out.importance_ratio.mean.item() == pytest.approx(math.exp(0.001), rel=1e-6)
    assert out.loss.dtype == torch.float32


def test_failure_token_count_is_exact():
    # 0.55 · 100 is 55.00000000000001 in floating point; ceil would keep 56
    tokens = 100
    out = policy_loss(
        torch.full((1, tokens), -1.0),
        torch.full((1, tokens), -1.0),
        torch.ones(1),
        torch.ones(1, tokens, dtype=torch.bool),
        Objective(failure_token_fraction=0.55),
        entropies=torch.zeros(1, tokens),
        failed=torch.tensor([True]),
    )
    assert out.kept_tokens.tolist() == [55]


def test_failure_tokens_of_equal_entropy_go_earlier_first():
    logprobs = torch.full((1, 4), -1.0, requires_grad=True)
    out = policy_loss(
        logprobs,
        torch.full((1, 4), -1.0),
        torch.ones(1),
        torch.tensor([[False, True, True, True]]),
        Objective(failure_token_fraction=0.5),
        entropies=torch.tensor([[9.0, 1.0, 1.0, 1.0]]),
        failed=torch.tensor([True]),
    )
    out.loss.backward()
    assert logprobs.grad is not None
    assert (logprobs.grad != 0).tolist() == [[False, True, True, False]]


def test_ppo_clip_drops_tokens_pushed_further_out():
    ratio = torch.tensor([[1.3, 0.7, 1.1]])
    behavior = torch.full((1, 3), -1.0)
    logprobs = behavior + ratio.log()
    for advantage, kept in ((1.0, [False, True, True]), (-1.0, [True, False, True])):
        leaf = logprobs.clone().requires_grad_()
        objective = Objective(gate="none", reduction="token_mean", ppo_clip=0.2)
        policy_loss(
            leaf, behavior, torch.tensor([advantage]), torch.ones(1, 3, dtype=torch.bool), objective
        ).loss.backward()
        # the independent way: autograd of PPO's own surrogate
        other = logprobs.clone().requires_grad_()
        rho = (other - behavior).exp()
        surrogate = torch.minimum(rho * advantage, rho.clamp(0.8, 1.2) * advantage)
        (-surrogate.sum() / 3).backward()
        assert leaf.grad is not None
        assert other.grad is not None
        assert (leaf.grad != 0).tolist() == [kept]
        torch.testing.assert_close(leaf.grad, other.grad)


def _random_batch(seed: int, rows: int, width: int):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=generator) < 0.6
    mask[torch.arange(rows), torch.randint(width, (rows,), generator=generator)] = True
    behavior = -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    logprobs = (behavior + 0.1 * torch.randn(rows, width, generator=generator, dtype=torch.float64)).clamp(max=0)
    return (
        logprobs,
        behavior,
        torch.randn(rows, generator=generator, dtype=torch.float64),
        mask,
        torch.rand(rows, width, generator=generator, dtype=torch.float64),
        torch.rand(rows, generator=generator) < 0.5,
    )


objectives = st.builds(
    Objective,
    delta=st.sampled_from([0.0, 1e-3, 1e-2, math.inf]),
    gate=st.sampled_from(["sequence", "token", "none"]),
    reduction=st.sampled_from(["sample_mean", "token_mean", "constant"]),
    length_scale=st.just(7.0),
    importance_sampling=st.booleans(),
    failure_token_fraction=st.sampled_from([0.0, 0.3, 1.0]),
    ppo_clip=st.sampled_from([None, 0.05]),
)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), objective=objectives, data=st.data())
def test_any_partition_order_and_padding_gives_the_same_gradient(seed, objective, data):
    rows, width = 6, 5
    logprobs, behavior, centred, mask, entropies, failed = _random_batch(seed, rows, width)
    whole = logprobs.clone().requires_grad_()
    policy_loss(whole, behavior, centred, mask, objective, entropies=entropies, failed=failed).loss.backward()

    order = data.draw(st.permutations(range(rows)))
    cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1))))
    padding = data.draw(st.integers(0, 3))
    parts = torch.zeros_like(logprobs).requires_grad_()
    total = parts + logprobs  # a leaf of its own, same values
    for low, high in zip([0, *cuts], [*cuts, rows], strict=True):
        pick = torch.tensor(order[low:high])

        def pad(values, pick=pick, fill=float("nan")):
            return torch.nn.functional.pad(values[pick], (0, padding), value=fill)

        policy_loss(
            pad(total),
            pad(behavior),
            centred[pick],
            torch.nn.functional.pad(mask[pick], (0, padding), value=False),
            objective,
            num_trajectories=rows,
            num_tokens=int(mask.sum()),
            entropies=pad(entropies),
            failed=failed[pick],
        ).loss.backward()
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-10, atol=1e-15)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), objective=objectives, reward=st.floats(-1e6, 1e6))
def test_a_uniform_batch_gives_exactly_zero(seed, objective, reward):
    logprobs, behavior, _, mask, entropies, failed = _random_batch(seed, 4, 5)
    logprobs.requires_grad_()
    centred = advantages(torch.full((4,), reward, dtype=torch.float64))
    policy_loss(logprobs, behavior, centred, mask, objective, entropies=entropies, failed=failed).loss.backward()
    assert logprobs.grad is not None
    assert (logprobs.grad == 0).all()


def test_non_policy_slots_may_hold_anything():
    mask = torch.tensor([[False, True, False]])
    logprobs = torch.tensor([[float("nan"), -1.0, 5.0]], requires_grad=True)
    behavior = torch.tensor([[float("inf"), -1.0, float("nan")]])
    out = policy_loss(logprobs, behavior, torch.ones(1), mask, Objective())
    out.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, -1.0, 0.0]]


GOOD = {
    "logprobs": torch.full((2, 3), -1.0),
    "behavior_logprobs": torch.full((2, 3), -1.0),
    "advantages": torch.ones(2),
    "policy_mask": torch.ones(2, 3, dtype=torch.bool),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": torch.full((2, 4), -1.0)}, "one shape"),
        ({"policy_mask": torch.ones(2, 2, dtype=torch.bool)}, "one shape"),
        ({"advantages": torch.ones(3)}, "advantages"),
        ({"advantages": torch.tensor([1.0, float("nan")])}, "finite"),
        ({"policy_mask": torch.tensor([[True] * 3, [False] * 3])}, "at least one policy token"),
        ({"logprobs": torch.full((2, 3), 0.1)}, "logprobs"),
        ({"behavior_logprobs": torch.full((2, 3), float("-inf"))}, "behavior_logprobs"),
        ({"behavior_logprobs": torch.full((2, 3), float("nan"))}, "behavior_logprobs"),
    ],
)
def test_bad_inputs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(**{**GOOD, **change}, objective=Objective())


def test_the_failure_filter_needs_its_inputs():
    with pytest.raises(ValueError, match="entropies"):
        policy_loss(**GOOD, objective=Objective(failure_token_fraction=0.5))
    with pytest.raises(ValueError, match="entropies"):
        policy_loss(
            **GOOD,
            objective=Objective(failure_token_fraction=0.5),
            entropies=torch.full((2, 3), float("nan")),
            failed=torch.tensor([True, False]),
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"delta": -1e-3},
        {"delta": float("nan")},
        {"gate": "trajectory"},
        {"reduction": "mean"},
        {"reduction": "constant"},
        {"reduction": "constant", "length_scale": 0.0},
        {"failure_token_fraction": 1.5},
        {"failure_token_fraction": -0.1},
        {"ppo_clip": 0.0},
    ],
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError):
        Objective(**settings)

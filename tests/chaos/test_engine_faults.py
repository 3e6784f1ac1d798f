"""The real engine dies, stalls and lies in mid-run: it is replaced, and nothing it garbled is trained on."""

import pytest
import torch

from fr_lightning.engines.base import EngineError
from fr_lightning.rollout.pool import PoolFailed
from fr_lightning.rollout.retry import RetryPolicy
from tests.chaos.faulty_engine import LIES, FaultyEngine
from tests.test_fit import run

PATIENT = RetryPolicy(backoff=0.0, max_failure_share=0.9)


def faulty_run(tiny_model, folder, faults, *, steps=5, every=9, max_restarts=100, retry=PATIENT):
    engine = FaultyEngine(
        faults, every, max_context=256, max_sequences=16, max_restarts=max_restarts, stall_timeout=3.0
    )
    seen, weights, module, data, _ = run(tiny_model, folder, steps=steps, engine=engine, retry=retry)
    return engine, seen, weights, module, data


def test_a_run_survives_an_engine_that_lies(tiny_model, tmp_path):
    engine, seen, weights, _, data = faulty_run(tiny_model, tmp_path, LIES)
    assert set(engine.injected) == set(LIES)
    failures = data.failures
    assert set(failures) == {"engine_error"}
    assert failures["engine_error"] >= len(engine.injected) - 16  # those of the last moment may not be booked
    assert data.ledger.counts["trained"] == len(set(seen.rollouts)) == 40
    assert max(seen.drifts) < 0.1
    assert torch.isfinite(weights).all()


def test_a_run_survives_an_engine_that_dies_and_stalls(tiny_model, tmp_path):
    engine, seen, _, module, data = faulty_run(tiny_model, tmp_path, ("dies", "stalls"), every=20, steps=6)
    assert set(engine.injected) == {"dies", "stalls"}
    assert module.policy_version == 6
    assert data.ledger.counts["trained"] == len(set(seen.rollouts)) == 48
    assert data.ledger.drawn == sum(data.ledger.counts.values())
    assert not data.failures  # it is replaced, and its requests start again


def test_an_engine_that_dies_too_often_ends_the_run_with_its_name(tiny_model, tmp_path):
    with pytest.raises((EngineError, PoolFailed), match="the engine was replaced 1 times and failed again"):
        faulty_run(tiny_model, tmp_path, ("dies",), every=5, max_restarts=1, steps=50)

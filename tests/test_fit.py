"""The whole way, from task to optimizer step, with the real engine in its own process and a real (tiny) model."""

import json
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from fr_lightning.callbacks import (
    Cost,
    Curves,
    Drift,
    Entropy,
    Lag,
    Length,
    ToolCalls,
    Transcripts,
    Truncation,
    WeightSync,
)
from fr_lightning.datamodule import RolloutDataModule
from fr_lightning.engines.base import Sampling
from fr_lightning.engines.embedded import EmbeddedEngine
from fr_lightning.envs.arithmetic import ArithmeticEnv, CalculatorEnv
from fr_lightning.envs.math_data import ProblemMix, ProblemSet
from fr_lightning.envs.math_problems import MathEnv
from fr_lightning.evaluation_plan import EvaluationPlan, SetPlan
from fr_lightning.module import FlashReinforce
from fr_lightning.policy import PolicyConfig
from fr_lightning.rollout.ledger import ResumeRefused
from fr_lightning.rollout.queue import LagLimit
from fr_lightning.rollout.runner import EpisodeLimits


def diagnostics() -> list[pl.Callback]:
    return [Entropy(), Length(), Truncation(), ToolCalls(), Drift(), Lag(), Cost()]


def run(tiny_model, folder, *, steps, callbacks=(), module_settings=None, ckpt_path=None, validate=False, **data):
    """One `fit`; returns what is left of it."""
    module = FlashReinforce(
        PolicyConfig(name=tiny_model),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        **(module_settings or {}),
    )
    settings = {
        "env": CalculatorEnv,
        "batch_size": 8,
        "concurrency": 16,
        "sampling": Sampling(max_tokens=12),
        "limits": EpisodeLimits(max_context=200, max_turns=3),
        "evaluation": EvaluationPlan(tasks=12),
        **data,
    }
    datamodule = RolloutDataModule(**{"engine": EmbeddedEngine(max_context=256, max_sequences=16), **settings})
    seen = Recorder()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=-1 if validate else 0,
        limit_val_batches=None if validate else 0,
        check_val_every_n_epoch=None,
        val_check_interval=2,
        callbacks=[
            WeightSync(),
            *callbacks,
            seen,
            pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1),
        ],
    )
    trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path)
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    return seen, weights, module, datamodule, trainer


class Recorder(pl.Callback):
    def __init__(self):
        self.rollouts: list[str] = []
        self.tokens: list[list[int]] = []
        self.lags: list[int] = []
        self.drifts: list[float] = []
        self.metrics: list[dict] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        update = dict(outputs)["update"]
        self.rollouts += [t.rollout_id for t in batch]
        self.tokens += [t.token_ids.tolist() for t in batch]
        self.lags += [int(t.policy_lag(update.version).max()) for t in batch]
        self.drifts += update.drift.tolist()
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_sync_runs_of_one_seed_are_equal_bit_for_bit_and_on_policy(tiny_model, tmp_path):
    first, weights, *_ = run(tiny_model, tmp_path / "a", steps=3, mode="sync", seed=5)
    second, again, *_ = run(tiny_model, tmp_path / "b", steps=3, mode="sync", seed=5)
    assert first.tokens == second.tokens
    assert torch.equal(weights, again)
    assert max(first.lags) == 0
    assert max(first.drifts) < 1e-6  # engine and learner agree on every token they both weighed
    other, *_ = run(tiny_model, tmp_path / "c", steps=1, mode="sync", seed=6)
    assert other.tokens != first.tokens[: len(other.tokens)]


class Sleepy(EmbeddedEngine):
    """Writes down what it is asked, and refuses what a sleeping engine cannot do."""

    sleep_while_learning = True

    def __init__(self, **settings):
        super().__init__(**settings)
        self.asleep = False
        self.asked: list[str] = []

    def ask(self, what):
        if self.asked[-1:] != [what]:
            self.asked.append(what)

    async def generate(self, *arguments, **keywords):
        assert not self.asleep
        self.ask("generate")
        return await super().generate(*arguments, **keywords)

    async def update_weights(self, named_tensors, version):
        self.asleep = False
        self.ask("update")
        await super().update_weights(named_tensors, version)

    async def sleep(self):
        self.asleep = True
        self.ask("sleep")


def test_an_engine_sleeps_from_the_batch_to_its_update_and_only_in_sync_mode(tiny_model, tmp_path):
    engine = Sleepy(max_context=256, max_sequences=16)
    stop = Sampling(max_tokens=12, stop=("e", "1"))
    run(tiny_model, tmp_path, steps=3, validate=True, mode="sync", engine=engine, sampling=stop)
    turns = "|".join(engine.asked).split("sleep|")
    assert len(turns) == 1 + 3  # before the first batch's update, and after each
    assert all(turn.startswith("update|generate|") for turn in turns[:-1])
    assert turns[-1].startswith("update")
    with pytest.raises(ValueError, match=r"sleep_while_learning needs data\.mode sync"):
        run(tiny_model, tmp_path, steps=1, mode="async", engine=Sleepy(max_context=256))


def test_a_sync_run_resumed_equals_the_unbroken_one(tiny_model, tmp_path):
    unbroken, weights, *_ = run(tiny_model, tmp_path / "a", steps=4, mode="sync")
    part, *_ = run(tiny_model, tmp_path / "b", steps=2, mode="sync")
    (checkpoint,) = (tmp_path / "b").glob("*step=2.ckpt")
    rest, resumed, module, data, _ = run(tiny_model, tmp_path / "c", steps=4, mode="sync", ckpt_path=checkpoint)
    assert part.tokens + rest.tokens == unbroken.tokens
    assert torch.equal(resumed, weights)
    assert module.policy_version == 4
    assert data.ledger.counts == {"trained": 32, "open": 0}


def test_async_respects_the_lag_and_accounts_for_every_task(tiny_model, tmp_path):
    seen, _, module, data, _ = run(
        tiny_model, tmp_path, steps=6, callbacks=diagnostics(), lag=LagLimit(1, "wait"), max_queued=16
    )
    assert max(seen.lags) <= 1
    assert len(set(seen.rollouts)) == 48
    assert data.ledger.counts["trained"] == 48
    assert data.ledger.drawn == sum(data.ledger.counts.values())
    assert module.policy_version == 6
    last = seen.metrics[-1]
    for name in (
        "entropy/mean",
        "length/mean",
        "truncation/turns",
        "tool_calls/mean",
        "drift/mean",
        "lag/mean",
        "time/wait",
    ):
        assert name in last
    assert last["drift/mean"] < 0.1


def test_resumed_async_draws_what_was_open_again_and_nothing_twice(tiny_model, tmp_path):
    first, *_ = run(tiny_model, tmp_path / "a", steps=2)
    (checkpoint,) = (tmp_path / "a").glob("*step=2.ckpt")
    rest, _, _, data, _ = run(tiny_model, tmp_path / "b", steps=5, ckpt_path=checkpoint)
    trained = first.rollouts + rest.rollouts
    assert len(set(trained)) == len(trained) == 40
    counts = data.ledger.counts
    assert counts["trained"] == 40
    numbers = {int(name.removeprefix("rollout-")) for name in trained}
    open_ones = set(range(data.ledger.drawn)) - numbers
    assert len(open_ones) == counts["open"]


def test_a_resumed_run_trains_on_what_was_complete_at_the_checkpoint(tiny_model, tmp_path):
    slow = LagLimit(4)
    run(tiny_model, tmp_path / "a", steps=2, lag=slow, max_queued=32, callbacks=[SlowLearner()])
    (checkpoint,) = (tmp_path / "a").glob("*step=2.ckpt")
    (saved,) = torch.load(checkpoint, weights_only=True)["RolloutDataModule"]["ranks"]
    waiting = {one["rollout_id"]: one["token_ids"].tolist() for one in saved["waiting"]}
    assert len(waiting) >= 8
    rest, _, _, data, _ = run(tiny_model, tmp_path / "b", steps=6, lag=slow, max_queued=32, ckpt_path=checkpoint)
    trained = dict(zip(rest.rollouts, rest.tokens, strict=True))
    assert waiting.items() <= trained.items()
    assert max(rest.lags) <= 4
    assert data.ledger.counts["trained"] == 48


def test_a_run_in_lockstep_plays_again_what_waited(tiny_model, tmp_path):
    run(tiny_model, tmp_path / "a", steps=2, max_queued=32, callbacks=[SlowLearner()])
    (checkpoint,) = (tmp_path / "a").glob("*step=2.ckpt")
    _, _, _, data, _ = run(tiny_model, tmp_path / "b", steps=8, mode="sync", ckpt_path=checkpoint)
    assert data.ledger.counts == {"trained": 64, "open": 0}


class SlowLearner(pl.Callback):
    """Lets completed trajectories pile up before the checkpoint of each step is made."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        deadline = time.monotonic() + 20
        while len(trainer.datamodule.pool.queue.waiting()) < 8:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_checkpoint_of_other_tasks_is_refused(tiny_model, tmp_path):
    run(tiny_model, tmp_path, steps=1, mode="sync")
    with pytest.raises(ResumeRefused, match=r"data\.seed 0, this run has 1"):
        run(tiny_model, tmp_path / "b", steps=2, mode="sync", seed=1, ckpt_path=next(tmp_path.glob("*.ckpt")))


def test_a_checkpoint_of_another_model_is_refused(tiny_model, tmp_path):
    run(tiny_model, tmp_path, steps=1, mode="sync")
    with pytest.raises(ResumeRefused, match=r"parameters \d+, this run's has 1\d{6}: set model.policy.name to .*tiny_"):
        run("embedded", tmp_path / "b", steps=2, mode="sync", ckpt_path=next(tmp_path.glob("*.ckpt")))


def test_validation_scores_held_out_tasks_before_and_during_training(tiny_model, tmp_path):
    curves = Curves()
    _, _, module, _, trainer = run(
        tiny_model, tmp_path, steps=4, callbacks=[*diagnostics(), Transcripts(every=2), curves], validate=True
    )
    assert [row["update"] for row in curves.evaluations] == [0, 2, 4]
    assert module.last_evaluation is not None
    assert (module.last_evaluation.tasks, module.last_evaluation.unplayed) == (12, 0)
    picture = Path(tmp_path) / "curves.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "<|im_start|>assistant" in (Path(tmp_path) / "transcripts.txt").read_text()
    assert len(curves.updates) == 4
    assert trainer.callback_metrics["val/unplayed"] == 0


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_validation_plays_each_set_of_a_dataset_as_its_plan_says(tiny_model, tmp_path, mode):
    for name in ("a", "b"):
        rows = [{"question": f"{name}{n}?", "answer": "1"} for n in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [ProblemSet(str(tmp_path / f"{name}.jsonl")) for name in ("a", "b")]
    plan = EvaluationPlan(
        tasks=4, samples=1, sets={"b": SetPlan(tasks=2, samples=3, sampling=Sampling(0.5, max_tokens=2))}
    )
    _, _, module, _, trainer = run(
        tiny_model, tmp_path, steps=2, validate=True, mode=mode, evaluation=plan,
        env=lambda: MathEnv(ProblemMix((ProblemSet(rows=100),), tuple(sets)), prompt="plain"),
    )  # fmt: skip
    result = module.last_evaluation
    assert {name: (one.tasks, one.samples) for name, one in result.sets.items()} == {"a": (4, 4), "b": (2, 6)}
    assert set(result.sets["b"].pass_at) == {1, 2, 3}
    assert trainer.callback_metrics["val/success_mean_of_sets"] == result.mean_of_sets.mean
    assert trainer.callback_metrics["val/success/b"] == result.sets["b"].success.mean


def test_a_set_planned_for_but_not_there_is_refused(tiny_model, tmp_path):
    with pytest.raises(ValueError, match=r"data.evaluation.sets names aime24"):
        run(
            tiny_model, tmp_path, steps=1, validate=True, evaluation=EvaluationPlan(sets={"aime24": SetPlan()}),
            env=lambda: MathEnv(ProblemMix((ProblemSet(rows=100),))),
        )  # fmt: skip


def test_training_without_weight_sync_is_refused(tiny_model, tmp_path):
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=tmp_path, num_sanity_val_steps=0, limit_val_batches=0,
    )  # fmt: skip
    data = RolloutDataModule(
        env=ArithmeticEnv, engine=EmbeddedEngine(max_context=256), batch_size=4, limits=EpisodeLimits(max_context=128)
    )
    with pytest.raises(RuntimeError, match="WeightSync"):
        trainer.fit(FlashReinforce(PolicyConfig(name=tiny_model)), datamodule=data)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling": Sampling(top_p=0.9)}, "top_p 1"),
        ({"sampling": Sampling(temperature=0.0)}, "temperature > 0"),
        ({"batch_size": 0}, "batch_size"),
        ({"rollouts_per_task": 3}, "multiple"),
        ({"env": "fr_lightning/NoSuch-v0"}, "NoSuch"),
    ],
)
def test_wrong_settings_name_themselves(settings, message):
    arguments = {"env": ArithmeticEnv, "engine": EmbeddedEngine(), **settings}
    with pytest.raises(Exception, match=message):
        RolloutDataModule(**arguments)


@pytest.mark.parametrize(
    ("learner", "rollouts", "message"),
    [
        ({"updates_per_batch": 2}, {}, "updates_per_batch"),
        ({"baseline": "group"}, {"mode": "sync"}, "rollouts_per_task"),
        ({"baseline": "group"}, {"rollouts_per_task": 2}, "sync"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tiny_model, tmp_path, learner, rollouts, message):
    with pytest.raises(ValueError, match=message):
        run(tiny_model, tmp_path, steps=1, module_settings=learner, **rollouts)


def test_a_group_baseline_and_a_second_fit_go_on_drawing(tiny_model, tmp_path):
    seen, _, module, data, _ = run(
        tiny_model, tmp_path, steps=2, module_settings={"baseline": "group"}, mode="sync", rollouts_per_task=4
    )
    assert module.policy_version == 2
    assert data.state_dict()["ranks"][0]["ledger"]["closed"] == {"trained": 16}
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=1, max_epochs=-1, logger=False, enable_checkpointing=False,
        default_root_dir=tmp_path, enable_progress_bar=False, num_sanity_val_steps=0, limit_val_batches=0,
        callbacks=[WeightSync(), again := Recorder()],
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    assert not set(again.rollouts) & set(seen.rollouts)


def test_a_run_that_fails_before_publication_has_booked_the_step_it_made(tiny_model, tmp_path, monkeypatch):
    seen = []

    def fail(self, trainer, pl_module, outputs, batch, batch_idx):
        seen.append(trainer.datamodule)
        raise RuntimeError("before the publication")

    monkeypatch.setattr(WeightSync, "on_train_batch_end", fail)
    with pytest.raises(RuntimeError, match="before the publication"):
        run(tiny_model, tmp_path, steps=2, mode="sync")
    assert seen[0].state_dict()["ranks"][0]["ledger"]["closed"] == {"trained": 8}


def test_a_context_larger_than_the_engines_is_refused(tiny_model, tmp_path):
    with pytest.raises(ValueError, match="max_context"):
        run(tiny_model, tmp_path, steps=1, limits=EpisodeLimits(max_context=999))

"""`fr-lightning fit` on several ranks: the run of one process, and what happens when a rank is lost."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.chaos.audit import problems, updates

OVERLAYS = Path(__file__).parents[2] / "configs" / "overlays"
TEAM_OF_TWO = ("--trainer.strategy.init_args.tensor_parallel_size", "2")


def settings(model, folder, **trainer):
    return {
        "seed_everything": 0,
        "model": {
            "policy": {"name": model},
            "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}},
            "max_tokens_per_micro_batch": 512,
        },
        "data": {
            "env": {"class_path": "tests.distributed.uneven_env.UnevenEnv"},
            "engine": {
                "class_path": "fr_lightning.engines.embedded.EmbeddedEngine",
                "init_args": {"max_context": 256, "max_sequences": 12},
            },
            "mode": "sync",
            "batch_size": 12,
            "concurrency": 12,
            "sampling": {"max_tokens": 12},
            "limits": {"max_turns": 3, "max_context": 200},
            "evaluation": {"tasks": 5},
        },
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 4,
            "val_check_interval": 2,
            "num_sanity_val_steps": 0,
            "enable_progress_bar": False,
            "default_root_dir": str(folder),
            "logger": {
                "class_path": "lightning.pytorch.loggers.CSVLogger",
                "init_args": {"save_dir": str(folder), "name": "", "version": "run"},
            },
            "callbacks": [
                {"class_path": "fr_lightning.callbacks.Lag"},
                {"class_path": "fr_lightning.callbacks.Cost"},
                {"class_path": "tests.chaos.audit.Audit", "init_args": {"folder": str(folder.parent / "audit")}},
                {"class_path": "fr_lightning.callbacks.EnvironmentMetrics"},
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {
                        "dirpath": str(folder / "saved"),
                        "every_n_train_steps": 2,
                        "save_top_k": -1,
                        "save_on_exception": True,
                    },
                },
            ],
            **trainer,
        },
    }


def launch(model, folder, *, strategy=None, ranks=2, options=(), **trainer) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(settings(model, folder, **trainer)))
    command = [sys.executable, "-m", "fr_lightning.cli", "fit", "--config", str(config)]
    if strategy:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "-m"]
        command = [sys.executable, *launcher, *command[2:], "--config", str(OVERLAYS / f"{strategy}.yaml")]
        command += ["--trainer.devices", str(ranks)]
    return subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def finished(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output[-4000:]
    return output


def column(folder, name):
    with (folder / "run" / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


@pytest.fixture(scope="module")
def alone(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    finished(launch(tiny_model, folder))
    return folder


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param("ddp", (), marks=pytest.mark.slow),
        ("fsdp2", ()),
        pytest.param("fsdp2", TEAM_OF_TWO, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_make_the_run_of_one_and_go_on_from_its_checkpoint(tiny_model, tmp_path, alone, strategy, options):
    folder = tmp_path / "run"
    finished(launch(tiny_model, folder, strategy=strategy, options=options))
    for name in ("train/reward", "train/loss", "train/gradient_norm", "train/importance_ratio_mean", "lag/max"):
        assert len(column(alone, name)) == 4
        assert column(folder, name) == pytest.approx(column(alone, name), rel=1e-3, abs=1e-6), name
    assert column(folder, "val/success") == column(alone, "val/success")

    again = tmp_path / "again"
    checkpoint = next(path for path in (folder / "saved").iterdir() if "step=2" in path.name)
    finished(launch(tiny_model, again, strategy=strategy, options=[*options, "--ckpt_path", str(checkpoint)]))
    assert column(again, "train/gradient_norm") == pytest.approx(column(folder, "train/gradient_norm")[2:], rel=1e-5)

    exported = tmp_path / "exported"
    last = next(path for path in (folder / "saved").iterdir() if "step=4" in path.name)
    command = ["export", "--checkpoint", str(last), "--model", tiny_model, "--output", str(exported)]
    subprocess.run([sys.executable, "-m", "fr_lightning.cli", *command], check=True, timeout=100)
    saved = torch.load(last, weights_only=True)["state_dict"]
    model = AutoModelForCausalLM.from_pretrained(exported)
    weights = dict(model.named_parameters())
    assert all(torch.equal(saved[f"policy.model.{name}"], weight) for name, weight in weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_adapters_make_the_same_run_on_two_ranks_go_on_and_are_merged(tiny_model, tmp_path, strategy):
    options = ["--config", str(OVERLAYS / "lora.yaml"), "--model.policy.lora.rank", "4"]
    one, two, again = (tmp_path / name for name in ("one", "two", "again"))
    finished(launch(tiny_model, one, options=options))
    finished(launch(tiny_model, two, strategy=strategy, options=options))
    assert max(column(one, "train/gradient_norm")) > 0
    assert column(two, "train/gradient_norm") == pytest.approx(column(one, "train/gradient_norm"), rel=1e-3, abs=1e-6)

    checkpoint = next(path for path in (two / "saved").iterdir() if "step=2" in path.name)
    finished(launch(tiny_model, again, strategy=strategy, options=[*options, "--ckpt_path", str(checkpoint)]))
    assert column(again, "train/gradient_norm") == pytest.approx(column(two, "train/gradient_norm")[2:], rel=1e-5)

    weights = []
    for folder in (one, two):
        last = next(path for path in (folder / "saved").iterdir() if "step=4" in path.name)
        command = ["export", "--checkpoint", str(last), "--model", tiny_model, "--output", str(folder / "exported")]
        subprocess.run([sys.executable, "-m", "fr_lightning.cli", *command], check=True, timeout=100)
        weights.append(dict(AutoModelForCausalLM.from_pretrained(folder / "exported").named_parameters()))
    before = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())
    assert weights[0].keys() == before.keys()
    for name, weight in weights[1].items():
        torch.testing.assert_close(weight, weights[0][name], rtol=1e-3, atol=1e-4)
        assert torch.equal(weight, before[name]) == ("norm" in name or "embed" in name), name


@pytest.mark.parametrize(
    ("strategy", "mode"), [("ddp", "async"), pytest.param("fsdp2", "sync", marks=pytest.mark.slow)]
)
def test_episodes_that_are_twenty_times_longer_on_one_rank_hold_up_nothing(tiny_model, tmp_path, strategy, mode):
    options = [
        *("--data.env", "tests.distributed.uneven_env.LongOnOneRank", "--data.mode", mode),
        *("--data.limits.max_turns", "30", "--data.limits.max_context", "600", "--data.sampling.max_tokens", "4"),
        *("--data.engine.init_args.max_context", "600", "--trainer.val_check_interval", "100"),
    ]
    folder = tmp_path / "run"
    finished(launch(tiny_model, folder, strategy=strategy, options=options))
    norms = column(folder, "train/gradient_norm")
    assert len(norms) == 4
    assert all(0 < norm < 1e3 for norm in norms)
    idle, step = column(folder, "time/wait"), column(folder, "time/step")
    assert all(0 <= waited <= whole for waited, whole in zip(idle, step, strict=True))  # reported, and of all ranks


@pytest.mark.slow
def test_a_checkpoint_of_other_ranks_is_refused(tiny_model, tmp_path, alone):
    checkpoint = next((alone / "saved").iterdir())
    process = launch(tiny_model, tmp_path / "run", strategy="ddp", options=["--ckpt_path", str(checkpoint)])
    output, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert "made by 1 ranks, this run has 2" in output


def test_a_rank_that_fails_ends_the_other_with_its_reason(tiny_model, tmp_path):
    options = ["--data.env", "tests.distributed.uneven_env.FailingEnv"]
    process = launch(tiny_model, tmp_path / "run", strategy="ddp", options=options, max_steps=10_000)
    output, _ = process.communicate(timeout=150)
    assert process.returncode != 0
    assert re.search(r"^fr-lightning: .* in env\.reset; .*FileNotFoundError: the games are gone$", output, re.MULTILINE)
    assert list((tmp_path / "run" / "saved").iterdir())


def test_a_lost_rank_ends_the_other_nothing_is_left_and_the_run_goes_on(tiny_model, tmp_path):
    process = launch(tiny_model, tmp_path / "run", strategy="ddp", max_steps=10_000)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "run" / "saved").glob("*step=2*")) and time.monotonic() < deadline:
        time.sleep(0.2)
    family = psutil.Process(process.pid).children(recursive=True)
    ranks = [child for child in family if "fr_lightning.cli" in " ".join(child.cmdline())]
    assert len(ranks) == 2
    ranks[1].send_signal(signal.SIGKILL)
    began = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 60
    assert process.returncode != 0
    assert "Signal 9" in output or "SIGKILL" in output
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive

    reached = (max(updates(tmp_path / "audit")) // 2 + 2) * 2  # past the lost update, where a checkpoint is written
    again = ["--ckpt_path", str(tmp_path / "run"), "--data.mode", "async"]
    said = finished(launch(tiny_model, tmp_path / "again", strategy="ddp", options=again, max_steps=reached))
    assert "Restored all states" in said
    last = next(path for path in (tmp_path / "again" / "saved").iterdir() if f"step={reached}" in path.name)
    assert problems(tmp_path / "audit", last) == []

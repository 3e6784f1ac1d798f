"""The command line as a user meets it, in a folder of his own, in processes of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fr_lightning.cli import main

REPOSITORY = Path(__file__).parents[1]
QUICK = [
    *("--config", "quickstart.yaml", "--config", "overlays/sync.yaml"),
    *("--data.batch_size", "4", "--data.concurrency", "8", "--data.evaluation.tasks", "8"),
    *("--trainer.num_sanity_val_steps", "0", "--trainer.enable_progress_bar", "false"),
]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "fr_lightning", *arguments]


def run(folder, *arguments: str, timeout=240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=folder, capture_output=True, text=True, timeout=timeout, check=False)


def test_help_lists_the_commands(tmp_path):
    for arguments in ((), ("--help",)):
        done = run(tmp_path, *arguments)
        assert done.returncode == 0
        for name in ("fit", "validate", "doctor", "play", "warm-start"):
            assert name in done.stdout


def test_fit_help_explains_settings(tmp_path):
    done = run(tmp_path, "fit", "--help")
    assert done.returncode == 0
    assert "trajectories per update" in done.stdout
    assert "drift threshold" in done.stdout


def test_doctor(tmp_path):
    done = run(tmp_path, "doctor")
    assert done.returncode == 0
    assert "Calculator-v0" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.batchsize", "3"], "data.batchsize"),
        (["--model.objective.gate", "trajectory"], "'sequence', 'token', 'none'"),
        (["--model.objective.delta", "-1"], "delta must be"),
        (["--data.sampling.top_p", "0.9"], "data.sampling"),
        (["--data.env", "nosuch.Env"], "nosuch.Env"),
        (["--data.env", "fr_lightning/Nothing-v0"], "Nothing"),
        (["--config", "nosuch.yaml"], "nosuch.yaml"),
        (["--model.policy.name", "./nosuch"], "nosuch"),
    ],
)
def test_wrong_settings_are_named_without_a_traceback(tmp_path, monkeypatch, capfd, arguments, message):
    """In this process: the command line's own takes seconds to start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["fr-lightning"])
    try:
        code = main(["fit", *QUICK, *arguments])
    except SystemExit as ended:  # by the parser of arguments
        code = ended.code
    assert code in (1, 2)
    said = capfd.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_an_unknown_command(tmp_path):
    done = run(tmp_path, "train")
    assert done.returncode == 2
    assert "no command 'train'" in done.stderr


def test_fit_validate_predict_with_a_users_own_environment(tmp_path):
    guide = (REPOSITORY / "envs" / "README.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n# guess\.py\n(.*?)```", guide, re.DOTALL)
    assert found
    assert len([line for line in found[1].splitlines() if line.strip()]) <= 20
    (tmp_path / "guess.py").write_text(found[1], encoding="utf-8")
    env = ["--data.env", "guess.GuessEnv"]
    done = run(tmp_path, "fit", *QUICK, *env, "--trainer.max_steps", "2")
    assert done.returncode == 0, done.stderr
    (checkpoint,) = tmp_path.glob("runs/quickstart/**/last.ckpt")
    assert list(tmp_path.glob("runs/quickstart/**/curves.png"))

    done = run(tmp_path, "validate", *QUICK, *env, "--ckpt_path", str(checkpoint))
    assert done.returncode == 0, done.stderr
    assert re.search(r"set +tasks +samples +not played +success avg@k +reward", done.stdout)
    assert re.search(r"all tasks +8 +8 +0 +[01]\.\d{3} ± 0\.\d{3} ", done.stdout)

    done = run(tmp_path, "predict", *QUICK, *env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("=== validation/") == 8


def test_a_run_that_cannot_play_says_why(tmp_path):
    (tmp_path / "broken.py").write_text(
        "from fr_lightning.envs import TextEnv\n"
        "class BrokenEnv(TextEnv):\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        raise FileNotFoundError('games/train.json')\n"
    )
    done = run(
        tmp_path, "fit", *QUICK, "--data.mode", "async", "--data.env", "broken.BrokenEnv", "--trainer.max_steps", "2"
    )
    assert done.returncode == 1
    assert "episodes failed" in done.stderr
    assert "env.reset: FileNotFoundError: games/train.json" in done.stderr


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in found.splitlines()]
    return [child for child, parent in pairs if parent == pid]


@pytest.mark.parametrize("kill", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_leaves_no_process(tmp_path, kill):
    trainer = subprocess.Popen(
        command("fit", *QUICK, "--trainer.max_steps", "100000"),
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("runs/**/transcripts.txt")):  # the first update is made
        assert time.monotonic() < deadline
        assert trainer.poll() is None
        time.sleep(0.2)
    engine = children(trainer.pid)
    assert engine
    trainer.send_signal(kill)
    code = trainer.wait(60)
    assert code == (143 if kill == signal.SIGTERM else -signal.SIGKILL)
    if kill == signal.SIGTERM:
        assert list(tmp_path.glob("runs/**/*.ckpt")), "SIGTERM ends in a saved checkpoint"
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in engine):
        assert time.monotonic() < deadline, "the engine outlived the trainer"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_play_in_the_terminal(tmp_path):
    done = subprocess.run(
        command("play", "--env", "fr_lightning/Arithmetic-v0", "--seed", "3"),
        cwd=tmp_path, input="10\n", capture_output=True, text=True, timeout=120, check=False, env={**os.environ},
    )  # fmt: skip
    assert done.returncode == 0
    assert "What is 8 + 2?" in done.stdout
    assert "reward 1 · solved" in done.stdout

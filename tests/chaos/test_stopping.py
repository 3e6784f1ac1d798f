"""Every way a run can be stopped, as its user does it: what is saved, what is left behind, and how it goes on."""

import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_cli import QUICK, alive, children, command

FIT = [*QUICK, "--data.batch_size", "32", "--data.concurrency", "32"]


def start(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen:
    return subprocess.Popen(
        command("fit", *FIT, *arguments),
        cwd=folder, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def wait_for_update(run: subprocess.Popen, folder: Path, updates: int = 1) -> None:
    deadline = time.monotonic() + 120
    while rows(folder) < updates:
        assert time.monotonic() < deadline
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.1)


def rows(folder: Path) -> int:
    """Updates that were logged."""
    return sum(len(path.read_text().splitlines()) - 1 for path in folder.glob("runs/quickstart/*/metrics.csv"))


def finished(run: subprocess.Popen, seconds: float = 90) -> tuple[int, str]:
    said, _ = run.communicate(timeout=seconds)
    return run.returncode, said


def checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("runs/**/*.ckpt"), key=lambda path: path.stat().st_mtime_ns)


def newest_step(folder: Path) -> int:
    return max(int(step) for path in checkpoints(folder) for step in re.findall(r"step=(\d+)", path.name))


def test_ctrl_c_finishes_the_step_and_saves_and_the_folder_goes_on_from_there(tmp_path):
    run = start(tmp_path, "--trainer.max_steps", "1000")
    wait_for_update(run, tmp_path)
    engine = children(run.pid)
    run.send_signal(signal.SIGINT)
    code, said = finished(run)
    assert code == 130, said
    assert "finishing this step and saving" in said
    assert re.search(r"[\d,]+ tasks drawn: [\d,]+ trained", said)
    assert not any(alive(pid) for pid in engine)
    step = newest_step(tmp_path)
    code, said = finished(start(tmp_path, "--trainer.max_steps", str(step + 1), "--ckpt_path", "runs/quickstart"))
    assert code == 0, said
    assert f"{32 * (step + 1):,} trained" in said
    # a power cut damages the newest: the one before is taken, and it says so
    newest = checkpoints(tmp_path)[-1]
    for path in checkpoints(tmp_path)[1:]:
        path.write_bytes(path.read_bytes()[:1000])
    code, said = finished(start(tmp_path, "--trainer.max_steps", str(step + 2), "--ckpt_path", str(newest)))
    assert code == 0, said
    assert "is damaged (BadZipFile" in said
    assert "Going on from" in said
    assert f"{32 * (step + 2):,} trained" in said


def test_ctrl_c_twice_stops_at_once(tmp_path):
    run = start(tmp_path, "--trainer.max_steps", "1000")
    wait_for_update(run, tmp_path)
    engine = children(run.pid)
    run.send_signal(signal.SIGSTOP)  # both arrive before it can finish the step
    run.send_signal(signal.SIGINT)
    run.send_signal(signal.SIGCONT)
    time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    code, said = finished(run, 20)
    assert code == 130, said
    assert not any(alive(pid) for pid in engine)
    assert "Traceback" not in said


@pytest.mark.slow
def test_slurm_requeues_the_job_which_goes_on_by_itself(tmp_path):
    told = tmp_path / "told"
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {told}\n')
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    slurm = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711", "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost",
        "SLURM_JOB_NAME": "train", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29871",
    }  # fmt: skip
    run = start(tmp_path, "--trainer.max_steps", "1000", env=slurm)
    wait_for_update(run, tmp_path)
    run.send_signal(signal.SIGUSR1)
    code, said = finished(run)
    assert code == 143, said
    assert told.read_text() == "requeue 4711\n"
    assert list(tmp_path.glob("runs/**/hpc_ckpt_1.ckpt"))
    steps = rows(tmp_path) + 1
    code, said = finished(start(tmp_path, "--trainer.max_steps", str(steps + 1), env=slurm))
    assert code == 0, said
    assert f"{32 * (steps + 1):,} trained" in said or f"{32 * steps:,} trained" in said


def test_a_disk_that_is_full_at_checkpoint_time(tmp_path):
    (tmp_path / "runs").mkdir()
    disk = [
        "bwrap",
        "--dev-bind",
        "/",
        "/",
        "--size",
        "30000000",
        "--tmpfs",
        str(tmp_path / "runs"),
        "--chdir",
        str(tmp_path),
    ]
    keep = "every_n_train_steps: 1, save_top_k: -1"  # of 20 MB each
    checkpointing = f"{{class_path: lightning.pytorch.callbacks.ModelCheckpoint, init_args: {{{keep}}}}}"
    done = subprocess.run(
        [*disk, *command("fit", *FIT, "--trainer.max_steps", "3", "--trainer.callbacks", f"[{checkpointing}]")],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "Training goes on; earlier checkpoints are kept" in said
    assert "max_steps=3` reached" in said
    last = said.strip().splitlines()[-1]
    assert last.startswith("fr-lightning: The checkpoint")
    assert "Free some space, then go on from an earlier one with --ckpt_path FOLDER" in last
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_behind(tmp_path, number):
    """Processes, shared memory, temporary files and sockets, of the run with the most children: a sandbox's."""
    before = footprint()
    run = start(tmp_path, "--config", "python_tool.yaml", "--trainer.max_steps", "1000")
    wait_for(lambda: (tmp_path / "runs").exists() and list(tmp_path.glob("runs/**/transcripts.txt")), run)
    assert len(descendants(run.pid)) >= 2  # engine, sandbox, verifier
    there = descendants(run.pid)
    run.send_signal(number)
    run.wait(60)
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in there):
        assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_text() for pid in there if alive(pid)]
        time.sleep(0.1)
    assert footprint() <= before


def wait_for(condition, run, seconds=150):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        assert run.poll() is None, run.communicate()[0]
        time.sleep(0.2)


def descendants(pid: int) -> set[int]:
    found = {pid}
    for child in children(pid):
        found |= descendants(child)
    return found


def footprint() -> set[str]:
    """Names in the places where programs leave things. Other programs may, too: pytest's own are left out."""
    places = [Path("/dev/shm"), Path(os.environ.get("TMPDIR", "/tmp"))]
    names = {str(path) for place in places if place.is_dir() for path in place.iterdir()}
    return {name for name in names if "pytest" not in name and sys.executable not in name}

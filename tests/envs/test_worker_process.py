"""A child that answers lines: deadlines, deaths, and nothing left behind."""

import os
import signal
import time
from pathlib import Path

import pytest

from fr_lightning.envs import worker_process
from fr_lightning.envs.worker_process import WorkerDied, WorkerHung, WorkerProcess

CHILD = """
import os, sys, time
from fr_lightning.envs.worker_process import serve

def answer(request):
    print("a library talks")
    match request["do"]:
        case "sleep": time.sleep(request["seconds"])
        case "exit": os._exit(request["code"])
        case "raise": raise RuntimeError("no such thing")
    return {"heard": request}

def main(*arguments):
    if arguments == ("broken",):
        raise ImportError("a part is missing")
    serve(answer)
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    """A worker module of the tests' own, in a folder that stands for the package's."""
    (tmp_path / "echo_worker.py").write_text(CHILD)
    (tmp_path / "worker_process.py").write_text(Path(worker_process.__file__).read_text())
    monkeypatch.setattr(worker_process, "__file__", str(tmp_path / "worker_process.py"))
    processes = []

    def start(*arguments):
        processes.append(WorkerProcess("echo_worker", arguments))
        return processes[-1]

    yield start
    for process in processes:
        process.end()
        process.release()


def test_replies_match_requests_and_prints_stay_out_of_them(child):
    process = child()
    for number in range(3):
        assert process.ask({"do": "echo", "number": number}, 5)["heard"]["number"] == number
    big = "x" * 50_000
    assert process.ask({"do": "echo", "text": big}, 5)["heard"]["text"] == big


def test_a_child_that_hangs_is_killed_and_reaped(child):
    process = child()
    began = time.monotonic()
    with pytest.raises(WorkerHung, match=r"did not answer within 0\.5 s"):
        process.ask({"do": "sleep", "seconds": 60}, 0.5)
    assert time.monotonic() - began < 5
    assert not process.usable
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


@pytest.mark.parametrize(
    ("request_", "message"),
    [({"do": "exit", "code": 7}, "exit code 7"), ({"do": "raise"}, "RuntimeError: no such thing")],
)
def test_a_child_that_dies_says_how(child, request_, message):
    process = child()
    with pytest.raises(WorkerDied, match=message):
        process.ask(request_, 5)
    with pytest.raises(WorkerDied):
        process.ask({"do": "echo"}, 5)


def test_a_child_killed_while_idle_is_noticed_at_the_next_request(child):
    process = child()
    os.kill(process.pid, signal.SIGKILL)
    time.sleep(0.2)
    with pytest.raises(WorkerDied):
        process.ask({"do": "echo"}, 5)


def test_a_child_that_does_not_come_up_says_why(child):
    with pytest.raises(WorkerDied, match="ImportError: a part is missing"):
        child("broken")


def test_ended_children_leave_no_descriptors(child):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        process = child()
        process.end()
        process.release()
    assert len(os.listdir("/proc/self/fd")) == before

"""Checkpoints on a disk that is full, damaged ones, and what `--ckpt_path` finds."""

import os
import pickle
import shutil
import subprocess
import sys
import time

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from fr_lightning.checkpoints import NoCheckpoint, SurvivingCheckpointIO, damage, resumable


def write(path, value=0.0):
    SurvivingCheckpointIO().save_checkpoint({"state_dict": {"w": torch.full((1000,), value)}, "step": 3}, path)
    time.sleep(0.01)  # of different ages
    return path


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
    path.write_bytes(b"")


def test_what_is_written_can_be_read(tmp_path):
    path = write(tmp_path / "new" / "a.ckpt", 2.0)
    assert damage(path) is None
    assert SurvivingCheckpointIO().load_checkpoint(path)["state_dict"]["w"].sum() == 2000
    assert os.listdir(path.parent) == ["a.ckpt"]


def test_a_folder_stands_for_its_newest_checkpoint(tmp_path):
    assert resumable(tmp_path / "nothing there") is None
    assert resumable(tmp_path) is None
    write(tmp_path / "version_0" / "checkpoints" / "a.ckpt")
    newest = write(tmp_path / "version_1" / "checkpoints" / "a.ckpt")
    assert resumable(tmp_path) == newest
    named = tmp_path / "version_0" / "checkpoints" / "a.ckpt"
    assert resumable(named) == named


@pytest.mark.parametrize("harm", [flip_a_byte, cut_in_half, empty])
def test_a_damaged_one_gives_way_to_the_newest_whole_one(tmp_path, harm):
    good, newer, newest = (write(tmp_path / f"{name}.ckpt") for name in "abc")
    harm(newest)
    harm(newer)
    with pytest.warns(UserWarning, match=r"c\.ckpt is damaged .*b\.ckpt is damaged .*Going on from .*a\.ckpt instead"):
        assert resumable(newest) == good
    with pytest.warns(UserWarning, match="Going on from"):
        assert resumable(tmp_path) == good
    harm(good)
    with pytest.raises(NoCheckpoint, match="No whole one is left: begin anew without --ckpt_path"):
        resumable(tmp_path)


def test_a_resumed_runs_damaged_checkpoint_gives_way_to_one_of_the_run_it_went_on_from(tmp_path):
    good = write(tmp_path / "version_0" / "checkpoints" / "a.ckpt")
    bad = write(tmp_path / "version_1" / "checkpoints" / "a.ckpt")
    cut_in_half(bad)
    with pytest.warns(UserWarning, match="Going on from"):
        assert resumable(bad) == good


def test_a_file_that_is_not_there_is_named_with_what_is(tmp_path):
    with pytest.raises(NoCheckpoint, match=r"step=7\.ckpt is not there, and its folder has no other"):
        resumable(tmp_path / "step=7.ckpt")
    write(tmp_path / "step=6.ckpt")
    with pytest.raises(NoCheckpoint, match=r"the newest in its folder is step=6\.ckpt"):
        resumable(tmp_path / "step=7.ckpt")


def test_a_sharded_one_is_whole_once_its_list_of_parts_is_there(tmp_path):
    folder = tmp_path / "step=1.ckpt"
    folder.mkdir()
    (folder / "meta.pt").write_bytes(b"x")
    assert damage(folder) == "it lacks .metadata"
    (folder / ".metadata").write_bytes(b"x")
    assert resumable(tmp_path) == folder


def test_what_a_killed_run_left_half_written_goes_with_the_next_checkpoint(tmp_path):
    (tmp_path / "a.ckpt.part").write_bytes(b"half")
    write(tmp_path / "b.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["b.ckpt"]


class RunsCode:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_no_code_is_run_by_loading(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": RunsCode()}, "evil.ckpt")
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        SurvivingCheckpointIO().load_checkpoint(tmp_path / "evil.ckpt")
    with pytest.raises(ValueError, match="weights_only=False would run whatever code"):
        SurvivingCheckpointIO().load_checkpoint(tmp_path / "evil.ckpt", weights_only=False)
    assert not (tmp_path / "ran").exists()


FULL_DISK = """
import sys, torch, warnings
from pathlib import Path
from fr_lightning.checkpoints import SurvivingCheckpointIO, damage

storage, folder = SurvivingCheckpointIO(), Path(sys.argv[1])
small, large = {"w": torch.zeros(1000)}, {"w": torch.zeros(10_000_000)}
storage.save_checkpoint(small, folder / "good.ckpt")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    storage.save_checkpoint(large, folder / "large.ckpt")
storage.remove_checkpoint(folder / "good.ckpt")
print(*sorted(path.name for path in folder.iterdir()), damage(folder / "good.ckpt"), caught[0].message)
storage.save_checkpoint(small, folder / "next.ckpt")
storage.remove_checkpoint(folder / "good.ckpt")
print(*(path.name for path in folder.iterdir()), storage.unsaved)
"""


@pytest.mark.skipif(not shutil.which("bwrap"), reason="a small disk is made with bubblewrap")
def test_a_full_disk_costs_the_checkpoint_and_no_other(tmp_path):
    disk = ["bwrap", "--dev-bind", "/", "/", "--size", "4000000", "--tmpfs", str(tmp_path)]
    done = subprocess.run(
        [*disk, sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    first, second = done.stdout.splitlines()
    assert first.startswith("good.ckpt None The checkpoint")
    assert "large.ckpt could not be written: [Errno 28] No space left on device, 4 MiB of it were written" in first
    assert "Training goes on; earlier checkpoints are kept" in first
    assert second == "next.ckpt None"


def test_a_users_own_storage_is_left_alone():
    from types import SimpleNamespace

    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from fr_lightning.checkpoints import make_checkpoints_survive

    chosen = AsyncCheckpointIO()
    theirs = SimpleNamespace(strategy=SingleDeviceStrategy("cpu", checkpoint_io=chosen))
    assert make_checkpoints_survive(theirs) is None
    assert theirs.strategy.checkpoint_io is chosen
    ours = SimpleNamespace(strategy=SingleDeviceStrategy("cpu"))
    assert make_checkpoints_survive(ours) is make_checkpoints_survive(ours) is ours.strategy.checkpoint_io

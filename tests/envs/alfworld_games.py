"""Where the tests find ALFWorld: the engine, the sample of real games, and simple ways through both."""

import importlib.util
import random
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = [root / "shared" / "data" / "alfworld_sample.tar.gz" for root in (ROOT, ROOT.parent)]

needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("alfworld") is None or importlib.util.find_spec("textworld") is None,
    reason="the alfworld extra is not installed: pip install 'fr-lightning[alfworld]'",
)


def unpack_sample(folder: Path) -> str:
    """The real games, unpacked; skips where the archive is not."""
    archive = next((place for place in PLACES if place.is_file()), None)
    if archive is None:
        pytest.skip("the sample of real games (shared/data/alfworld_sample.tar.gz) is not here")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    return str(folder)


def wander(session, seed: int, steps: int):
    """A seeded walk: what the game said and admitted at every step, invalid commands included."""
    chance = random.Random(seed)
    states = [session.start()]
    for step in range(steps):
        command = "fly to the moon" if step % 7 == 3 else chance.choice(states[-1].commands)
        states.append(session.step(command))
    return states

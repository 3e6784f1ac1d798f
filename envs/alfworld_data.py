"""Which ALFWorld games there are: the embedded ones, or a folder of real ones, by split.

Invariant: a game is in a split if the official code would put it there (no movable receptacles, no sliced objects, one
of the six task types, marked solvable), and one that is left out is left out under a named reason. A folder's index is
kept in the user's cache and checked by size and time of every file, so a changed game is read again and no other is.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.util
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fr_lightning.envs.alfworld_engine import OLD_PUT
from fr_lightning.envs.alfworld_layouts import EMBEDDED, SIZES, TASK_TYPES
from fr_lightning.envs.base import NotReady

__all__ = ["OFFICIAL", "SPLITS", "TASK_TYPES", "Game", "GameDataError", "Games", "cache_folder", "require_alfworld"]

SPLITS = ("train", "valid_seen", "valid_unseen")
OFFICIAL = {"train": 3553, "valid_seen": 140, "valid_unseen": 134}
"""Games of the full data set, by the official filters."""

OldGrammar = Literal["patch", "refuse"]
INSTALL = "pip install 'fr-lightning[alfworld]'"

_INDEX_FORMAT = 1
_PLAYABLE = ""


class GameDataError(NotReady):
    """The games asked for are not there; the message names the setting to change."""


@dataclass(frozen=True)
class Game:
    """One game. `source` is what the engine loads; `size` is of embedded games."""

    id: str
    split: str
    task_type: str
    source: Mapping[str, Any] = field(repr=False)
    size: str | None = None


class Games:
    """The games of one origin.

    Args:
        origin: where they are from, for messages.
        games: in order.
        left_out: split → reason → how many.
        old_grammar: how many games are of the old grammar.
    """

    def __init__(
        self, origin: str, games: Sequence[Game], left_out: Mapping[str, Mapping[str, int]], old_grammar: int = 0
    ):
        self.origin = origin
        self.left_out = left_out
        self.old_grammar = old_grammar
        self._by_id = {game.id: game for game in games}

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, game_id: str) -> Game:
        try:
            return self._by_id[game_id]
        except KeyError:
            raise GameDataError(f"there is no game {game_id!r} in {self.origin}") from None

    def split(
        self, name: str, *, task_types: Sequence[str] | None = None, sizes: Sequence[str] | None = None
    ) -> list[Game]:
        """The games of a split, some task types or sizes only.

        Raises:
            GameDataError: there are none.
        """
        for setting, chosen, known in (("task_types", task_types, TASK_TYPES), ("sizes", sizes, tuple(SIZES))):
            if unknown := set(chosen or ()) - set(known):
                raise GameDataError(f"{setting}: no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        found = [
            game
            for game in self._by_id.values()
            if game.split == name
            and (task_types is None or game.task_type in task_types)
            and (sizes is None or game.size is None or game.size in sizes)
        ]
        if not found:
            why = ", ".join(f"{count} {reason}" for reason, count in self.left_out.get(name, {}).items())
            raise GameDataError(
                f"{self.origin} holds no playable game of split {name!r}" + (f" (left out: {why})" if why else "")
                + ": set `data` to a folder that does, or `task_types` and `sizes` to what is there"
            )  # fmt: skip
        return found

    def counts(self) -> dict[str, int]:
        """Playable games of each split."""
        found = Counter(game.split for game in self._by_id.values())
        return {split: found[split] for split in SPLITS}

    @staticmethod
    def find(data: str | None = None, old_grammar: OldGrammar = "patch") -> Games:
        """The games a setting names: `embedded`, a folder, or None: $ALFWORLD_DATA, and the embedded ones without it.

        Raises:
            GameDataError: there is no such folder, or no game in it.
        """
        chosen = data or os.environ.get("ALFWORLD_DATA") or "embedded"
        if chosen == "embedded":
            return _embedded()
        root = Path(os.path.expandvars(chosen)).expanduser().resolve()
        named = f"data is {chosen!r}" if data else f"ALFWORLD_DATA is {chosen!r}"
        if not root.is_dir():
            raise GameDataError(
                f"{named}, and there is no such folder: set it to the folder that `alfworld-download` filled (the one "
                "that holds json_2.1.1), or set `data` to embedded"
            )
        base = root / "json_2.1.1" if (root / "json_2.1.1").is_dir() else root
        if not any((base / split).is_dir() for split in SPLITS):
            raise GameDataError(
                f"{named}, and that folder holds neither json_2.1.1 nor any of {', '.join(SPLITS)}: set it to the "
                "folder that `alfworld-download` filled, or set `data` to embedded"
            )
        return _folder(base, old_grammar)


def require_alfworld() -> None:
    """Raises `NotReady`, with the command that helps, if the engine is not installed."""
    for package in ("alfworld", "textworld", "fast_downward"):
        if importlib.util.find_spec(package) is None:
            raise NotReady(f"ALFWorld needs the package {package!r}: {INSTALL}")


def cache_folder() -> Path:
    """Where indices and translations are kept: $FR_LIGHTNING_CACHE, else fr_lightning in the user's cache folder."""
    chosen = os.environ.get("FR_LIGHTNING_CACHE")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fr_lightning"
    return base.expanduser() / "alfworld"


@functools.cache
def _embedded() -> Games:
    rows = json.loads(gzip.decompress(EMBEDDED.read_bytes()))
    games = [
        Game(row["id"], row["split"], row["layout"]["task_type"], {"layout": row["layout"]}, row["size"])
        for row in rows
    ]
    return Games("the embedded set", games, {})


@functools.lru_cache(maxsize=8)
def _folder(base: Path, old_grammar: OldGrammar) -> Games:
    """Index a folder. Only files that are new or changed are read."""
    index = cache_folder() / f"index-{hashlib.blake2b(str(base).encode(), digest_size=10).hexdigest()}.json"
    known: dict[str, list[Any]] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(index.read_text(encoding="utf-8"))
        known = stored["games"] if stored["format"] == _INDEX_FORMAT else {}
    seen: dict[str, list[Any]] = {}
    for split in SPLITS:
        for trajectory in sorted((base / split).glob("*/*/traj_data.json")):
            folder = trajectory.parent
            name = folder.relative_to(base).as_posix()
            stamp = _stamp(trajectory) + _stamp(folder / "game.tw-pddl")
            entry = known.get(name)
            seen[name] = entry if entry and entry[0] == stamp else [stamp, *_judge(folder, name)]
    if seen != known:
        with suppress(OSError):  # a read-only cache costs time only
            index.parent.mkdir(parents=True, exist_ok=True)
            unfinished = index.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps({"format": _INDEX_FORMAT, "games": seen}), encoding="utf-8")
            unfinished.replace(index)

    games: list[Game] = []
    left_out: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    old = 0
    for name, (_, reason, task_type, is_old) in seen.items():
        split = name.split("/", 1)[0]
        if not reason and is_old and old_grammar == "refuse":
            reason = "of the old grammar (`put X in/on Y`), and old_grammar is refuse"
        if reason:
            left_out[split][reason] += 1
            continue
        old += bool(is_old)
        source = {"file": str(base / name / "game.tw-pddl"), "old_grammar": old_grammar}
        games.append(Game(name, split, task_type, source))
    return Games(str(base), games, left_out, old)


def _stamp(file: Path) -> list[int]:
    try:
        status = file.stat()
    except OSError:
        return [-1, -1]
    return [status.st_size, status.st_mtime_ns]


def _judge(folder: Path, name: str) -> tuple[str, str, bool]:
    """Why a game is left out (empty: it is not), its task type, and whether its grammar is the old one."""
    if "movable" in name or "Sliced" in name:
        return "with movable receptacles or sliced objects", "", False
    try:
        task_type = json.loads((folder / "traj_data.json").read_text(encoding="utf-8"))["task_type"]
    except (OSError, ValueError, KeyError, TypeError):
        return "with a traj_data.json that cannot be read", "", False
    if task_type not in TASK_TYPES:
        return "of another task type", "", False
    try:
        game = json.loads((folder / "game.tw-pddl").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "without a game.tw-pddl", task_type, False
    except (OSError, ValueError):
        return "with a game.tw-pddl that cannot be read", task_type, False
    if not isinstance(game, dict) or not {"grammar", "pddl_domain", "pddl_problem"} <= game.keys():
        return "with a game.tw-pddl that is no game", task_type, False
    if "solvable" not in game:
        return "not marked solvable or unsolvable", task_type, False
    if not game["solvable"]:
        return "marked unsolvable", task_type, False
    return _PLAYABLE, task_type, OLD_PUT.search(str(game["grammar"])) is not None

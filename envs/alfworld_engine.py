"""ALFWorld's own engine (TextWorld's `PddlEnv`), playing many games in one process.

Invariant: each game goes on as if it were alone. Fast Downward keeps its game in three global variables; `Downward`
puts a game's own values there before any call on its behalf, so all games share one copy of the library (a new copy
for each would cost tens of megabytes that never come back). Games not touched for longest are let go of when there are
too many: a game is a function of its file and the commands so far, so whoever asks for it can have it played again.

Runs in worker processes only (TextWorld is not thread-safe); imports neither torch nor Gymnasium.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

OLD_PUT = re.compile(r'template\s*::\s*"put \{o\} in/on \{r\}"')
OLD_COMMAND = re.compile(r"put (.+) in/on (.+)")
TASK = re.compile(r'"rhs":\s*"Your task is to: (.*?)\.?"')
GRAMMARS_TASK = "UNKNOWN GOAL"

UNREACHABLE = "val1"
"""A fact of the stand-in problem that the translator makes of one whose goal is false for ever."""

LIVE_GAMES = 64
LIVE_GAMES_WITH_OWN_LIBRARY = 8


class GameError(ValueError):
    """The game, not the engine, is at fault; the message says what to do about it."""


class Downward:
    """One copy of Fast Downward, seen by each game as a library of its own (`View`).

    Raises:
        ValueError: the library does not export the variables that hold its game.
    """

    def __init__(self, library: Any):
        self.library = library
        self._registry = ctypes.c_void_p.in_dll(library, "state_registry")
        self._state = ctypes.c_int.in_dll(library, "state_id")
        self._task = (ctypes.c_void_p * 2).in_dll(library, "_ZN5tasks11g_root_taskE")  # a shared_ptr: two pointers
        self.blank = self._read()
        self._active: View | None = None

    def view(self) -> View:
        return View(self)

    def activate(self, view: View) -> None:
        """From here on the library plays this view's game."""
        if view is self._active:
            return
        if self._active is not None:
            self._active.game = self._read()
        self._registry.value, self._state.value, (self._task[0], self._task[1]) = view.game
        self._active = view

    def _read(self) -> tuple[int | None, int, tuple[int | None, int | None]]:
        return self._registry.value, self._state.value, (self._task[0], self._task[1])


class View:
    """What a `PddlEnv` takes for its library. Also puts off the planner's translation until it plans."""

    def __init__(self, downward: Downward):
        self._downward = downward
        self.game = downward.blank
        self._planners_sas: Any = None

    def __getattr__(self, name: str) -> Any:
        self._downward.activate(self)
        return getattr(self._downward.library, name)

    def load_sas_replan(self, sas: Any) -> None:
        self._planners_sas = sas

    def replan(self, verbose: bool) -> bool:
        self._downward.activate(self)
        sas = self._planners_sas
        self._downward.library.load_sas_replan(sas if isinstance(sas, bytes) else sas.text)
        return bool(self._downward.library.replan(verbose))


class Engine:
    """Plays games named by the caller's keys.

    Args:
        share: one library for all games (see `Downward`); otherwise each live game has its own, and there are fewer.
        live_games: most games kept; None: as many as is sensible.
    """

    def __init__(self, *, share: bool, live_games: int | None = None):
        import fast_downward  # pyright: ignore[reportMissingImports]
        import textworld  # pyright: ignore[reportMissingImports]
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler  # pyright: ignore[reportMissingImports]
        from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH  # pyright: ignore[reportMissingImports]
        from textworld.envs import PddlEnv  # pyright: ignore[reportMissingImports]

        if share:
            downward = Downward(fast_downward.load_lib())
            fast_downward.load_lib = downward.view
        self._make = lambda: AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))
        self._domain = Path(ALFRED_PDDL_PATH).read_text(encoding="utf-8")
        self._grammar = Path(ALFRED_TWL2_PATH).read_text(encoding="utf-8")
        self._live_games = live_games or (LIVE_GAMES if share else LIVE_GAMES_WITH_OWN_LIBRARY)
        self._games: OrderedDict[str, Any] = OrderedDict()
        self._spare: list[Any] = []

    def open(self, key: str, source: dict[str, Any], commands: list[str]) -> dict[str, Any]:
        """Start a game, or bring it to where these commands lead.

        Raises:
            GameError: it is no game that this engine plays.
        """
        self.close(key)
        data = self._data(source)
        while len(self._games) >= self._live_games:
            self._spare.append(self._games.popitem(last=False)[1])
        env = self._spare.pop() if self._spare else self._make()
        try:
            env.load(data)
            state = env.reset()
        except (
            Exception,
            SystemExit,
        ) as error:  # the translator leaves by whatever exception, or exit, its part raises
            self._spare.append(env)
            if isinstance(error, KeyError) and error.args == (UNREACHABLE,):
                raise GameError("its goal can never be reached: remove it, or mark it unsolvable") from error
            raise GameError(
                f"the engine cannot load it ({type(error).__name__}: {error}): mend or remove it"
            ) from error
        for command in commands:
            state, _, _ = env.step(command)
        self._games[key] = env
        return {**_said(state), "walkthrough": data.get("walkthrough")}

    def step(self, key: str, command: str) -> dict[str, Any]:
        """One command; `{"gone": true}` if the game is no longer here."""
        env = self._games.get(key)
        if env is None:
            return {"gone": True}
        self._games.move_to_end(key)
        state, _, _ = env.step(command)
        return _said(state)

    def plan(self, key: str) -> dict[str, Any]:
        """The planner's commands from here to the goal; null if it finds none. May take a minute."""
        env = self._games.get(key)
        if env is None:
            return {"gone": True}
        inner = env.unwrapped
        return {"plan": inner._pddl_state.replan(inner._entity_infos) or None}

    def close(self, key: str) -> None:
        env = self._games.pop(key, None)
        if env is not None:
            self._spare.append(env)

    def _data(self, source: dict[str, Any]) -> dict[str, Any]:
        if "layout" in source:
            from fr_lightning.envs.alfworld_layouts import Layout

            layout = Layout.of(source["layout"])
            return {**self._current(layout.goal, layout.problem()), "walkthrough": layout.walkthrough()}
        try:
            data = json.loads(Path(source["file"]).read_text(encoding="utf-8"))
            grammar, problem = data["grammar"], data["pddl_problem"]
            task = TASK.search(grammar)
        except OSError as error:
            raise GameError(f"it cannot be read ({error.strerror}): set `data` to the folder it is in") from error
        except (ValueError, KeyError, TypeError) as error:
            raise GameError(
                f"it is no ALFWorld game ({type(error).__name__}: {error}): a game is JSON with pddl_domain, grammar "
                "and pddl_problem; fetch it again, or remove it"
            ) from error
        if OLD_PUT.search(grammar) is None:
            return data
        if source.get("old_grammar", "patch") == "refuse" or task is None:
            raise GameError(
                "it is of ALFWorld's old grammar (`put X in/on Y`), which differs from the installed one (`move X to "
                "Y`): set `old_grammar` to patch, or fetch the games of ALFWorld 0.4"
            )
        walkthrough = data.get("walkthrough")
        return {
            **self._current(task[1], problem),
            "walkthrough": walkthrough and [OLD_COMMAND.sub(r"move \1 to \2", command) for command in walkthrough],
        }

    def _current(self, goal: str, problem: str) -> dict[str, Any]:
        """A problem in the installed domain and grammar."""
        grammar = self._grammar.replace(GRAMMARS_TASK, goal)
        return {"pddl_domain": self._domain, "grammar": grammar, "pddl_problem": problem}


def _said(state: Any) -> dict[str, Any]:
    return {
        "observation": state["feedback"],
        "commands": list(state["admissible_commands"]),
        "won": bool(state["won"]),
    }

"""ALFWorld: household tasks in text, played by the real engine.

Invariant: success is that the game is won, as the engine says, and nothing else; what the engine cannot answer raises
and is never a reward. The policy sees what the game says, letter for letter, with the admissible commands below if
asked for, and its reply reaches the game as it is (case and outer white space apart): an unknown command is answered by
the game's own words and counted.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fr_lightning.envs import alfworld_speedups
from fr_lightning.envs.alfworld_data import Game, Games, OldGrammar, require_alfworld
from fr_lightning.envs.alfworld_workers import EngineFailed, Session, State, WorkerSettings, shared
from fr_lightning.envs.base import TextEnv

logger = logging.getLogger(__name__)

ActionFormat = Literal["plain", "think"]

BANNER = "-= Welcome to TextWorld, ALFRED! =-\n\n"
UNLISTED = frozenset({"help"})  # admissible always, and only ever costs a step
VERBS = (
    "go to (place), open (place), close (place), take (object) from (place), move (object) to (place), "
    "examine (place or object), use (object), clean (object) with (place), heat (object) with (place), "
    "cool (object) with (place), slice (object) with (object), look, inventory"
)
SYSTEM_PROMPTS: dict[ActionFormat, str] = {
    "plain": "You carry out a household task by text commands. Reply to every observation with one command and nothing "
    f"else. The commands are: {VERBS}.",
    "think": "You carry out a household task by text commands. After every observation, first reason step by step "
    "inside <think> </think>, then give one command inside <action> </action>. The commands are: "
    f"{VERBS}.",
}
THOUGHTFUL = re.compile(
    r"(?:\s*<think>)?(?:(?!</?think>|</?action>).)*</think>\s*<action>([^<>]*)</action>\s*", re.DOTALL
)
CLOSED = re.compile(r"The (.+) is closed\.$")
PLACE = re.compile(r"\ban? (\w+ \d+)")  # in the description of a room
TAKE = re.compile(r"take (.+) from (.+)")
FOUND = re.compile(r"(?:take|use) (\w+ \d+)")
HASTE = 0.5
"""Of an unskilled expert's mistakes, the share that are hasty."""


class ALFWorldEnv(TextEnv):
    """One ALFWorld game an episode, as one growing conversation. Reward 1 for winning, else 0.

    `info` holds `won`, `task_type`, `game`, `steps` and `invalid_actions`; its `metrics` are the numbers among them
    and `success/SPLIT` and `success/SPLIT/TASK_TYPE` of the game's own split and type, so that their means are success
    rates.

    Args:
        data: a folder of games, `embedded`, or null: $ALFWORLD_DATA, and the embedded games where that is not set.
        task_types: only these; null: all six.
        sizes: only these embedded games (easy, medium, hard); null: all.
        evaluation_splits: played at validation.
        action_format: `plain`: the reply is the command. `think`: it is
            `<think>…</think><action>COMMAND</action>`, and any other reply is an invalid action.
        list_commands: put the commands that the game admits below each observation.
        max_steps: commands after which an episode is cut off.
        history: null: an episode is one growing conversation. A number: every turn is a prompt of its own that tells
            the first observation, the last so many commands with their answers, and the latest one.
        win_reward: for winning.
        invalid_penalty: taken off for every command the game does not admit.
        step_penalty: taken off for every command.
        old_grammar: games of ALFWorld's old grammar are patched to the installed one, or left out (`refuse`).
        system_prompt: null: one that explains the format; empty: none.
        workers: the processes that play; environments of equal settings share them.

    Raises:
        NotReady: the `alfworld` extra is not installed, or (`GameDataError`) the games asked for are not there.
    """

    def __init__(
        self,
        data: str | None = None,
        task_types: Sequence[str] | None = None,
        sizes: Sequence[str] | None = None,
        evaluation_splits: Sequence[str] = ("valid_seen", "valid_unseen"),
        action_format: ActionFormat = "plain",
        list_commands: bool = True,
        max_steps: int = 50,
        history: int | None = None,
        win_reward: float = 1.0,
        invalid_penalty: float = 0.0,
        step_penalty: float = 0.0,
        old_grammar: OldGrammar = "patch",
        system_prompt: str | None = None,
        workers: WorkerSettings = WorkerSettings(),  # noqa: B008 (frozen)
    ):
        require_alfworld()
        if max_steps < 1 or min(invalid_penalty, step_penalty) < 0:
            raise ValueError(
                f"ALFWorld needs max_steps ≥ 1 and penalties ≥ 0, got {max_steps=}, {invalid_penalty=}, {step_penalty=}"
            )
        if history is not None and history < 0:
            raise ValueError(f"history is null or a number ≥ 0 of steps, got {history}")
        if action_format not in SYSTEM_PROMPTS:
            raise ValueError(f"action_format is plain or think, not {action_format!r}")
        self._games = Games.find(data, old_grammar)
        self._task_types = task_types
        self._sizes = sizes
        self._evaluation_splits = tuple(evaluation_splits)
        self._training_games = self._games.split("train", task_types=task_types, sizes=sizes)
        self._format: ActionFormat = action_format
        self._list_commands = list_commands
        self._max_steps = max_steps
        self._history = history
        self.fresh_context = history is not None
        self._win_reward = win_reward
        self._invalid_penalty = invalid_penalty
        self._step_penalty = step_penalty
        self.system_prompt = SYSTEM_PROMPTS[action_format] if system_prompt is None else system_prompt or None
        self._workers, self._release = shared(_checked(workers))
        self._session: Session | None = None
        self._game: Game | None = None
        self._state = State("", (), False)
        self._past: list[str] = []  # the first observation, then every command with its answer
        self._steps = 0
        self._invalid = 0
        self._expert = _Expert([])

    def prepare(self) -> dict[str, str]:
        counts = ", ".join(f"{count} {split}" for split, count in self._games.counts().items())
        return {
            "games": f"{counts} of {self._games.origin}",
            "speed-ups": "on" if self._workers.settings.speedups else "off",
        }

    def tasks(self, split: str) -> list[Mapping[str, Any]]:
        """The games of a split, mixed so that its first so many are a fair sample of its parts and task types."""
        return [{"id": game.id, "set": game.split} for game in self._of(split)]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        chosen = options or {}
        row = chosen.get("task")
        if row is not None:
            game = self._games[row["id"]]
        else:
            games = self._of(chosen.get("split", "train"))
            game = games[int(self.np_random.integers(len(games)))]
        self._end_session()
        self._game = game
        self._session = self._workers.session(game.id, game.source)
        self._state = self._session.start()
        self._steps = self._invalid = 0
        self._expert = _Expert(self._session.walkthrough, self._state.observation)
        self._past = [self._state.observation.removeprefix(BANNER)]
        return self._shown(self._past[0]), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        assert self._session is not None, "reset the environment first"
        command = self._command(action)
        admitted = command in self._state.commands
        self._state = self._session.step(command)
        self._steps += 1
        self._invalid += not admitted
        self._expert.saw(command, admitted, self._state.observation)
        won = self._state.won
        reward = won * self._win_reward - self._step_penalty - (not admitted) * self._invalid_penalty
        truncated = not won and self._steps >= self._max_steps
        if won or truncated:
            self._end_session()
        if self._history is not None:
            self._past.append(f"> {command}\n{self._state.observation}")
        return self._shown(self._state.observation), reward, won, truncated, self._info()

    def expert_action(self, skill: float = 1.0) -> str:
        """The next command of one who searches the room in order and then does what the game's walkthrough does.

        An expert of less skill strays, ever so often: to a place drawn by chance (and opens what is closed there), or
        it grasps at what it looks for where that is not, and is told that nothing happens.
        """
        assert self._session is not None
        if self._expert.unknown:
            plan = self._session.plan()
            if plan is None:
                assert self._game is not None
                raise EngineFailed(f"game {self._game.id} has no walkthrough, and the planner finds none")
            self._expert.plan(plan)
        stray = None
        if self.np_random.random() >= skill:
            wrong = [command for command in self._state.commands if command.startswith("go to ")]
            if self.np_random.random() < HASTE and (grasp := self._expert.hasty_grasp(self._state)) is not None:
                wrong = [grasp]
            stray = wrong[int(self.np_random.integers(len(wrong)))] if wrong else None
        command = self._expert.next(self._state, stray)
        return command if self._format == "plain" else f"<think>\n{command}\n</think>\n<action>{command}</action>"

    def close(self) -> None:
        self._end_session()
        self._release()

    def _of(self, split: str) -> list[Game]:
        if split == "train":
            return self._training_games
        games = [
            game
            for part in self._evaluation_splits
            for game in self._games.split(part, task_types=self._task_types, sizes=self._sizes)
        ]
        return sorted(games, key=lambda game: hashlib.blake2b(game.id.encode(), digest_size=8).digest())

    def _command(self, action: str) -> str:
        """The command in a reply; empty, and so invalid, if the reply has not the format."""
        if self._format == "think":
            match = THOUGHTFUL.fullmatch(action)
            action = match[1] if match else ""
        return action.strip().lower()

    def _shown(self, text: str) -> str:
        if self._history is not None:
            text = "\n\n".join([self._past[0], *self._past[1:][-(self._history + 1) :]])
        if not self._list_commands:
            return text
        listed = " | ".join(command for command in self._state.commands if command not in UNLISTED)
        return f"{text}\n\nAdmissible commands: {listed}"

    def _info(self) -> dict[str, Any]:
        assert self._game is not None
        won, split, task_type = self._state.won, self._game.split, self._game.task_type
        return {
            "success": won,
            "won": won,
            "task_type": task_type,
            "game": self._game.id,
            "steps": self._steps,
            "invalid_actions": self._invalid,
            "metrics": {
                "steps": float(self._steps),
                "invalid_actions": float(self._invalid),
                f"success/{split}": float(won),
                f"success/{split}/{task_type}": float(won),
            },
        }

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()


class _Expert:
    """Follows a walkthrough as one who does not know where things are: it looks through the room, place by place in the
    order in which the room was described, until it sees what the walkthrough takes; and finds back from anywhere.
    """

    def __init__(self, walkthrough: Sequence[str] | None, room: str = ""):
        self.unknown = walkthrough is None
        self.here: str | None = None
        self.searched: set[str] = set()
        self._places = PLACE.findall(room)
        self._wanted: str | None = None  # where the walkthrough takes it to be
        self._left = list(walkthrough or ())

    def plan(self, walkthrough: Sequence[str]) -> None:
        """Follow this one from here on."""
        self.unknown = False
        self._left, self._wanted = list(walkthrough), self.here

    def next(self, state: State, stray: str | None) -> str:
        closed = CLOSED.search(state.observation)
        if self.here != self._wanted and closed and closed[1] == self.here:
            return f"open {self.here}"  # where something may be inside
        if stray is not None:
            return stray
        self._take_what_is_here(state)
        while self._left and self._is_done(self._left[0], state):
            del self._left[0]
        if not self._left:
            return "look"
        wanted = self._left[0].removeprefix("go to ") if self._left[0].startswith("go to ") else None
        if wanted is None:
            return self._left[0] if self.here == self._wanted else f"go to {self._wanted}"
        if wanted not in self.searched and self._to_be_found() is not None:
            unsearched = (place for place in self._places if place not in self.searched and place != self.here)
            wanted = next(unsearched, wanted)
        return f"go to {wanted}"

    def hasty_grasp(self, state: State) -> str | None:
        """To take what is looked for from where it is not."""
        wanted = self._to_be_found()
        command = f"take {wanted} from {self.here}"
        return command if wanted and self.here and command not in state.commands else None

    def saw(self, command: str, admitted: bool, observation: str) -> None:
        """What was done, by whomever, and what came of it."""
        if not admitted:
            return
        if command.startswith("go to "):
            self.here = command.removeprefix("go to ")
        if self.here is not None and command.startswith(("go to ", "open ")) and not CLOSED.search(observation):
            self.searched.add(self.here)
        if self._left and command == self._left[0]:
            del self._left[0]
            self._wanted = self.here

    def _to_be_found(self) -> str | None:
        """What the walkthrough takes or uses at the place it goes to next; None: it has other business there."""
        after = (command for command in self._left if not command.startswith(("go to ", "open ")))
        found = FOUND.match(next(after, ""))
        return found and found[1]

    def _take_what_is_here(self, state: State) -> None:
        """One thing of a kind is as good as another: the walkthrough takes the one that is seen first."""
        there = TAKE.match(next((command for command in self._left if command.startswith("take ")), ""))
        brought_here = any(re.match(rf"move .+ to {self.here}$", command) for command in self._left)
        if there is None or self._to_be_found() != there[1] or self.here == there[2] or brought_here:
            return
        kind = there[1].rpartition(" ")[0]
        seen = (TAKE.match(command) for command in state.commands)
        here = next((take for take in seen if take and take[1].rpartition(" ")[0] == kind), None)
        if here is not None:
            names = {there[1]: here[1], here[1]: there[1], there[2]: here[2], here[2]: there[2]}
            either = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
            self._left = [either.sub(lambda name: names[name[1]], step) for step in self._left]

    def _is_done(self, command: str, state: State) -> bool:
        """Whether searching has done already what the walkthrough does next."""
        if command == f"go to {self.here}":
            self._wanted = self.here
            return True
        return command.startswith("open ") and self.here == self._wanted and command not in state.commands


def _checked(workers: WorkerSettings) -> WorkerSettings:
    """The settings, without the speed-ups where they were not checked."""
    if not workers.speedups:
        return workers
    obstacle = alfworld_speedups.obstacle()
    if obstacle is None:
        return workers
    _warn_once(obstacle)
    return dataclasses.replace(workers, speedups=False)


@functools.cache
def _warn_once(obstacle: str) -> None:
    logger.warning("ALFWorld runs without its speed-ups, some ten times slower: %s.", obstacle)

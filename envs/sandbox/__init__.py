"""A Python tool that the model cannot break out of: see `PythonSandbox`."""

from fr_lightning.envs.sandbox.host import PythonSandbox, SandboxSession, ToolResult
from fr_lightning.envs.sandbox.isolation import SandboxUnavailable

__all__ = ["PythonSandbox", "SandboxSession", "SandboxUnavailable", "ToolResult"]

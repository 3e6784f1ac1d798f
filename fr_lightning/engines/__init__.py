"""Generation engines behind one contract (`base.py`)."""

from fr_lightning.engines.base import Completion, Engine, EngineError, PromptTooLong, Sampling

__all__ = ["Completion", "Engine", "EngineError", "PromptTooLong", "Sampling"]

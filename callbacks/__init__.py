"""Lightning callbacks: weight publication, diagnostics and pictures. Each module documents its formulas."""

from fr_lightning.callbacks.cost import Cost
from fr_lightning.callbacks.curves import Curves
from fr_lightning.callbacks.drift import Drift
from fr_lightning.callbacks.entropy import Entropy
from fr_lightning.callbacks.environment import EnvironmentMetrics
from fr_lightning.callbacks.lag import Lag
from fr_lightning.callbacks.length import Length
from fr_lightning.callbacks.progress import Progress
from fr_lightning.callbacks.tool_calls import ToolCalls
from fr_lightning.callbacks.transcripts import Transcripts
from fr_lightning.callbacks.truncation import Truncation
from fr_lightning.callbacks.weight_sync import AgreementCheck, Disagreement, WeightSync

__all__ = [
    "AgreementCheck",
    "Cost",
    "Curves",
    "Disagreement",
    "Drift",
    "Entropy",
    "EnvironmentMetrics",
    "Lag",
    "Length",
    "Progress",
    "ToolCalls",
    "Transcripts",
    "Truncation",
    "WeightSync",
]

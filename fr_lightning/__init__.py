"""fr_lightning: FlashREINFORCE for language-model agents, inside PyTorch Lightning."""

__version__ = "0.1.0"

"""From a checkpoint to a plain Hugging Face folder, for transformers, vLLM and everybody else.

Invariant: the weights written are those of the checkpoint, in their own precision; nothing of a checkpoint is executed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fr_lightning.models import load_causal_lm, load_tokenizer

PREFIX = "policy.model."


def export(checkpoint: str, model: str, output: str) -> int:
    """Write the folder; returns an exit code, and says what is wrong with the arguments."""
    source, folder = Path(checkpoint), Path(output)
    if folder.exists():
        return _refuse(f"{folder} exists already: choose another --output")
    if not source.is_file():
        what = "a folder: load it with torch.distributed.checkpoint" if source.is_dir() else "not there"
        return _refuse(f"{source} is {what}")
    saved = torch.load(source, map_location="cpu", weights_only=True, mmap=True)["state_dict"]
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in saved.items() if name.startswith(PREFIX)}
    if not weights:
        return _refuse(f"{source} holds no policy of fr_lightning")
    policy = load_causal_lm(model, next(iter(weights.values())).dtype)
    missing, unexpected = policy.load_state_dict(weights, strict=False)
    tied = set(getattr(policy, "all_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        return _refuse(f"{source} is not a checkpoint of {model}: {[*unexpected, *missing][0]} is not in both")
    policy.save_pretrained(folder)
    load_tokenizer(model).save_pretrained(folder)
    print(f"{folder}: {sum(tensor.numel() for tensor in policy.parameters()):,} parameters")
    return 0


def _refuse(reason: str) -> int:
    print(f"fr-lightning export: {reason}", file=sys.stderr)
    return 2

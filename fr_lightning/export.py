"""From a checkpoint to a plain Hugging Face folder, for transformers, vLLM and everybody else.

Invariant: the weights written are those of the checkpoint, in their own precision, adapters merged in; nothing of a
checkpoint is executed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fr_lightning.lora import Lora, merged, save_adapter
from fr_lightning.models import load_causal_lm, load_tokenizer

PREFIX = "policy.model."


def export(checkpoint: str, model: str, output: str, *, adapter: bool = False) -> int:
    """Write the folder; returns an exit code, and says what is wrong with the arguments.

    Args:
        checkpoint: a file that `fit` saved.
        model: the one that the run began with.
        output: a folder that is not there yet.
        adapter: write the run's LoRA adapter alone, in peft's format, instead of the whole model.
    """
    source, folder = Path(checkpoint), Path(output)
    if folder.exists():
        return _refuse(f"{folder} exists already: choose another --output")
    if not source.is_file():
        what = "a folder: load it with torch.distributed.checkpoint" if source.is_dir() else "not there"
        return _refuse(f"{source} is {what}")
    saved = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    state = saved["state_dict"]
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}
    if not weights:
        return _refuse(f"{source} holds no policy of fr_lightning")
    settings = saved.get("policy", {}).get("lora")
    lora = None if settings is None else Lora(**settings)
    if adapter:
        if lora is None:
            return _refuse(f"{source} is of a run without adapters (model.policy.lora): leave --adapter out")
        save_adapter(weights.items(), lora, folder, model)
        print(f"{folder}: a LoRA adapter of rank {lora.rank} for {model}")
        return 0
    if lora is not None:
        weights = dict(merged(weights.items(), lora.scale))
    policy = load_causal_lm(model, next(iter(weights.values())).dtype)  # of the embeddings, which have no adapter
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

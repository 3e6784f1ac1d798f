"""Adapters learn, the model beneath them does not, and everybody else sees a plain model with adapters merged in."""

import re
import sys

import lightning.pytorch as pl
import pytest
import torch
from transformers import AutoModelForCausalLM

from fr_lightning.callbacks import Drift, WeightSync
from fr_lightning.cli import main
from fr_lightning.datamodule import RolloutDataModule
from fr_lightning.engines.base import Sampling
from fr_lightning.engines.embedded import EmbeddedEngine
from fr_lightning.envs.base import TextEnv
from fr_lightning.lora import Lora, NoSuchLayer, merged
from fr_lightning.module import FlashReinforce
from fr_lightning.policy import Policy, PolicyConfig
from fr_lightning.rollout.ledger import ResumeRefused
from fr_lightning.rollout.runner import EpisodeLimits
from tests.test_module import random_batch

pytest.importorskip("peft")


def adapted(model: str, **options) -> Policy:
    """With adapters that change something."""
    torch.manual_seed(1)
    policy = Policy(PolicyConfig(name=model, lora=Lora(rank=4, alpha=6.0), **options))
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return policy


def trainable(policy: Policy) -> set[str]:
    return {name for name, parameter in policy.named_parameters() if parameter.requires_grad}


def test_only_adapters_train_and_a_fresh_one_changes_nothing(tiny_model):
    plain, policy = Policy(PolicyConfig(name=tiny_model)), Policy(PolicyConfig(name=tiny_model, lora=Lora(rank=4)))
    names = trainable(policy)
    assert len(names) == 2 * 2 * 7  # A and B of seven linear layers in each of two decoder layers
    assert all("lora_" in name for name in names)
    rows = random_batch().pad(range(7))
    assert torch.equal(policy(rows).logprobs, plain(rows).logprobs)


def test_merged_weights_are_the_adapted_policy_under_the_models_own_names(tiny_model):
    policy = adapted(tiny_model, dtype="float64")
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    weights = dict(merged(policy.named_published_parameters(), 6.0 / 4))
    plain = Policy(PolicyConfig(name=tiny_model, dtype="float64"))
    original = {name: weight.clone() for name, weight in plain.model.named_parameters()}
    assert weights.keys() == original.keys()
    plain.model.load_state_dict(weights, strict=False)
    rows = random_batch().pad(range(7))
    torch.testing.assert_close(policy(rows).logprobs, plain(rows).logprobs, rtol=0, atol=1e-10)

    name = "model.layers.1.mlp.down_proj.weight"  # by hand, number by number
    a = before["model.model.layers.1.mlp.down_proj.lora_A.default.weight"]
    b = before["model.model.layers.1.mlp.down_proj.lora_B.default.weight"]
    product = sum(b[3, k] * a[k, 5] for k in range(4))
    assert weights[name][3, 5] == pytest.approx(float(original[name][3, 5] + 1.5 * product), abs=1e-12)
    assert torch.equal(weights["model.norm.weight"], original["model.norm.weight"])
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.named_parameters())


def test_adapters_of_a_model_in_half_precision_learn_in_float32_and_are_rounded_once(tiny_model):
    policy = adapted(tiny_model, dtype="bfloat16")
    assert {p.dtype for n, p in policy.named_parameters() if n in trainable(policy)} == {torch.float32}
    weights = dict(merged(policy.named_published_parameters(), 1.5))
    assert weights["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float32
    assert weights["model.embed_tokens.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("target", [["q_proj", "nothing"], "nothing", ["nothing"], ["lm_head"], ["embed_tokens"]])
def test_names_that_match_no_layer_are_refused(tiny_model, target):
    with pytest.raises(NoSuchLayer, match=r"model\.policy\.lora\.target_modules"):
        Policy(PolicyConfig(name=tiny_model, lora=Lora(target_modules=target)))


def test_other_bad_settings_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"lora\.dropout must be 0"):
        Lora(dropout=0.1)
    with pytest.raises(ValueError, match="rank"):
        Lora(rank=0)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=re.escape("model.policy.lora needs peft: pip install 'fr-lightning[lora]'")):
        FlashReinforce(PolicyConfig(lora=Lora()))


class Coin(TextEnv):
    """One turn, worth its parity: even a random policy sees rewards that differ."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "Say something.", {}

    def step(self, action):
        return "", float(len(action) % 2), True, False, {}


def fit(tiny_model, folder, steps, ckpt_path=None):
    module = FlashReinforce(
        PolicyConfig(name=tiny_model, lora=Lora(rank=4, alpha=8.0)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    )
    data = RolloutDataModule(
        env=Coin,
        engine=EmbeddedEngine(max_context=256, max_sequences=16),
        mode="sync",
        batch_size=8,
        concurrency=8,
        sampling=Sampling(max_tokens=12),
        limits=EpisodeLimits(max_context=200),
    )
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=steps, max_epochs=-1, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, num_sanity_val_steps=0,
        callbacks=[
            WeightSync(), Drift(), pl.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
        ],
    )  # fmt: skip
    pl.seed_everything(0, verbose=False)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module, trainer


def test_a_run_learns_publishes_goes_on_and_is_exported(tiny_model, tmp_path, capsys):
    module, trainer = fit(tiny_model, tmp_path, 2)
    # the engine sampled the last batch under merged weights of an adapter that had learnt, at lag 0
    assert trainer.callback_metrics["agreement/difference"] < 1e-5
    assert trainer.callback_metrics["drift/max"] < 1e-5
    assert module.policy is not None
    original = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())
    for name, parameter in module.policy.model.named_parameters():
        if "lora_B" in name:
            assert parameter.abs().max() > 0
        elif "lora_A" not in name:
            assert torch.equal(parameter, original[name.replace(".base_layer", "")])

    again, _ = fit(tiny_model, tmp_path / "again", 2, ckpt_path=str(tmp_path / "epoch=0-step=1.ckpt"))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), module.parameters(), strict=True))
    other = FlashReinforce(PolicyConfig(name=tiny_model, lora=Lora(rank=4, alpha=9.0)))
    other.configure_model()
    with pytest.raises(ResumeRefused, match=r"lora .*set model\.policy\.lora to what it began with"):
        other.on_load_checkpoint(torch.load(tmp_path / "epoch=0-step=1.ckpt", weights_only=True))

    last = str(tmp_path / "epoch=0-step=2.ckpt")
    whole, adapter = tmp_path / "whole", tmp_path / "adapter"
    assert main(["export", "--checkpoint", last, "--model", tiny_model, "--output", str(whole)]) == 0
    assert main(["export", "--checkpoint", last, "--model", tiny_model, "--output", str(adapter), "--adapter"]) == 0
    from peft import PeftModel

    ids = torch.randint(9, 400, (2, 20))
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    wrapped = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), str(adapter))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(whole)(ids).logits
        assert (logits - plain(ids).logits).abs().max() > 1e-2
        torch.testing.assert_close(wrapped(ids).logits, logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(module.policy.model(ids).logits, logits, rtol=0, atol=1e-5)
    assert "rank 4" in capsys.readouterr().out

"""A synchronisation that does not bring the learner's weights to the engine is refused, by what is wrong with it."""

import importlib.util

import lightning.pytorch as pl
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fr_lightning.callbacks import AgreementCheck, Disagreement, WeightSync
from fr_lightning.datamodule import RolloutDataModule
from fr_lightning.engines.base import Sampling
from fr_lightning.engines.embedded import EmbeddedEngine
from fr_lightning.engines.vllm import VLLMEngine
from fr_lightning.envs.base import TextEnv
from fr_lightning.evaluation_plan import EvaluationPlan
from fr_lightning.module import FlashReinforce
from fr_lightning.policy import PolicyConfig
from fr_lightning.rollout.runner import EpisodeLimits

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup-vllm"
)


class Parity(TextEnv):
    """Rewards every other length, so that a policy which knows nothing has something to learn from."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"Tell me about {int(self.np_random.integers(1000))}.", {}

    def step(self, action):
        return "", float(len(action) % 2), True, False, {}


def run(model: str, engine, folder, *, check=AgreementCheck(), stage="fit", steps=2, precision="32-true"):  # noqa: B008
    """One run; returns the learner, its weights before training, and the callback."""
    module = FlashReinforce(
        PolicyConfig(name=model), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)
    )
    data = RolloutDataModule(
        env=Parity,
        engine=engine,
        batch_size=4,
        concurrency=8,
        sampling=Sampling(temperature=0.8, max_tokens=12),
        limits=EpisodeLimits(max_context=128),
        evaluation=EvaluationPlan(tasks=4),
    )
    sync = WeightSync(check)
    trainer = pl.Trainer(
        accelerator="cpu",
        precision=precision,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0 if stage == "fit" else None,
        default_root_dir=folder,
        callbacks=[sync],
    )
    getattr(trainer, stage)(module, datamodule=data)
    return module, sync, trainer


def engine(cls=EmbeddedEngine, **settings):
    return cls(max_context=256, max_sequences=8, **settings)


class NothingArrives(EmbeddedEngine):
    """Counts versions and loads what it had."""

    after = -1

    async def update_weights(self, named_tensors, version):
        if version > self.after:
            named_tensors = AutoModelForCausalLM.from_pretrained(self._settings.model).named_parameters()
        await super().update_weights(named_tensors, version)


class StopsAfterTheFirst(NothingArrives):
    """Publications arrive until the first update."""

    after = 0


class Rounds(EmbeddedEngine):
    """Weights lose half their bits on the way."""

    async def update_weights(self, named_tensors, version):
        rounded = ((name, tensor.bfloat16().float()) for name, tensor in named_tensors)
        await super().update_weights(rounded, version)


class ForgetsTheHead(EmbeddedEngine):
    """Serves a model whose head is a copy of the embeddings, and never updates the copy."""

    async def start(self, model=None):
        await super().start(self.model)

    async def update_weights(self, named_tensors, version):
        head = AutoModelForCausalLM.from_pretrained(self._settings.model).lm_head.weight
        await super().update_weights([*named_tensors, ("lm_head.weight", head)], version)


@pytest.fixture(scope="module")
def untied(tiny_model, tmp_path_factory) -> str:
    """The tiny model with a head of its own, equal to the embeddings."""
    folder = tmp_path_factory.mktemp("untied")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return str(folder)


def test_an_engine_that_agrees_is_trained_with_from_the_very_same_weights(tiny_model, tmp_path):
    """The proof moves the learner's weights and puts them back: not a bit may be different afterwards."""
    with_proof, sync, trainer = run(tiny_model, engine(), tmp_path, steps=1)
    assert with_proof.policy_version == 1
    assert 0 < sync.difference < 1e-3
    assert float(trainer.callback_metrics["agreement/difference"]) == pytest.approx(sync.difference)
    assert trainer.callback_metrics["time/pause"] > 0
    module, *_ = run(tiny_model, engine(), tmp_path, steps=0)
    original = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    for name, tensor in module.policy.model.state_dict().items():
        assert torch.equal(tensor, original[name])


def test_sixteen_bits_agree_within_their_rounding(tiny_model, tmp_path):
    _, sync, _ = run(tiny_model, engine(dtype="bfloat16"), tmp_path, precision="bf16-mixed", steps=1)
    assert 1e-4 < sync.difference < 5e-2


def test_weights_that_are_not_applied(tiny_model, tmp_path):
    with pytest.raises(Disagreement, match="the publication did nothing"):
        run(tiny_model, engine(NothingArrives), tmp_path)


def test_weights_that_are_not_applied_after_the_first_update(tiny_model, tmp_path):
    with pytest.raises(Disagreement, match="agreed before the first update"):
        run(tiny_model, engine(StopsAfterTheFirst), tmp_path)


def test_a_tied_head_that_is_not_refreshed(tiny_model, untied, tmp_path):
    with pytest.raises(Disagreement, match="output head that is tied"):
        run(tiny_model, engine(ForgetsTheHead, model=untied), tmp_path)


def test_weights_rounded_to_a_wrong_dtype(tiny_model, tmp_path):
    with pytest.raises(Disagreement, match="another dtype"):
        run(tiny_model, engine(Rounds), tmp_path)


def test_an_engine_of_another_model_is_refused_in_evaluation_too(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(RolloutDataModule, "load", lambda self, named_tensors, version: None)
    other = AutoModelForCausalLM.from_pretrained(tiny_model)
    for parameter in other.parameters():
        parameter.data *= 1.1
    other.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "other")

    class Other(EmbeddedEngine):
        async def start(self, model=None):
            await super().start(str(tmp_path / "other"))

    with pytest.raises(Disagreement, match="another model"):
        run(tiny_model, engine(Other), tmp_path, stage="validate")


def test_without_the_check_nothing_is_refused(tiny_model, tmp_path):
    module, *_ = run(tiny_model, engine(NothingArrives), tmp_path, check=None, steps=1)
    assert module.policy_version == 1


def test_a_check_without_probes_is_refused():
    with pytest.raises(ValueError, match="prompts"):
        AgreementCheck(prompts=0)


@needs_vllm
@pytest.mark.parametrize(
    ("backend", "message"),
    [("forgets_tied_head", "output head that is tied"), ("applies_nothing", "the publication did nothing")],
)
def test_a_broken_transfer_is_refused_at_the_start(backend, message, tmp_path):
    vllm = VLLMEngine(
        dtype="float32",
        max_context=256,
        kv_cache_gib=0.25,
        engine_args={
            "worker_extension_cls": "broken_transfer.Extension",
            "weight_transfer_config": {"backend": backend},
        },
    )
    with pytest.raises(Disagreement, match=message):
        run("embedded", vllm, tmp_path)


@needs_vllm
def test_a_sound_transfer_passes_and_trains(tmp_path):
    module, sync, _ = run("embedded", VLLMEngine(dtype="float32", max_context=256, kv_cache_gib=0.25), tmp_path)
    assert module.policy_version == 2
    assert sync.difference < 1e-3

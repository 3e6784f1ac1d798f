"""Demonstrations are ordinary trajectories, and imitation works."""

import itertools

import torch
from transformers import AutoModelForCausalLM

from fr_lightning.envs.arithmetic import CalculatorEnv
from fr_lightning.models import EMBEDDED, load_tokenizer
from fr_lightning.policy import Policy, PolicyConfig
from fr_lightning.rollout.conversation import ChatFormat
from fr_lightning.trajectory import TrajectoryBatch
from fr_lightning.warm_start import Lesson, demonstrations, save, train


def chat(tiny_model):
    return ChatFormat(load_tokenizer(tiny_model))


def test_demonstrations_repeat_solve_and_use_the_tool(tiny_model):
    lessons = [Lesson(CalculatorEnv, skill=1.0)]
    first = list(itertools.islice(demonstrations(lessons, chat(tiny_model), seed=0, max_context=512), 10))
    again = list(itertools.islice(demonstrations(lessons, chat(tiny_model), seed=0, max_context=512), 10))
    assert all(torch.equal(a.token_ids, b.token_ids) for a, b in zip(first, again, strict=True))
    assert all(t.success and t.tool_calls == 1 and len(t.turns) == 2 for t in first)


def test_lessons_are_mixed_by_weight(tiny_model):
    lessons = [Lesson(CalculatorEnv, skill=1.0, weight=1.0), Lesson(CalculatorEnv, skill=0.0, weight=3.0)]
    stream = demonstrations(lessons, chat(tiny_model), seed=0, max_context=512)
    calls = [t.tool_calls for t in itertools.islice(stream, 100)]
    assert 10 < sum(calls) < 45


def test_imitation_lowers_the_loss_and_is_saved_as_a_plain_model(tiny_model, tmp_path):
    torch.manual_seed(0)
    policy = Policy(PolicyConfig(name=tiny_model))
    stream = demonstrations([Lesson(CalculatorEnv)], chat(tiny_model), seed=0, max_context=512)
    losses = list(train(policy, stream, steps=30, batch_size=8, learning_rate=5e-3))
    assert losses[-1] < 0.7 * losses[0]
    save(policy, load_tokenizer(tiny_model), tmp_path / "saved", torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.dtype == torch.bfloat16
    ours = dict(policy.model.named_parameters())
    assert all(torch.equal(parameter, ours[name]) for name, parameter in loaded.named_parameters())


def test_a_model_learns_to_foresee_what_the_environment_says_only_if_it_shall(tiny_model):
    played = list(itertools.islice(demonstrations([Lesson(CalculatorEnv)], chat(tiny_model), 0, max_context=512), 8))
    batch = TrajectoryBatch(played)
    rows = batch.pad(range(8))
    foreseen = {}
    for weight in (0.0, 1.0):
        torch.manual_seed(0)
        policy = Policy(PolicyConfig(name=tiny_model))
        list(
            train(
                policy, itertools.cycle(played), steps=30, batch_size=8, learning_rate=5e-3, observation_weight=weight
            )
        )
        with torch.no_grad():
            logits = policy.model(rows.token_ids, attention_mask=rows.attention_mask.long()).logits[:, :-1]
        surprise = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows.token_ids[:, 1:], reduction="none")
        said = rows.attention_mask[:, 1:] & ~rows.policy_mask[:, 1:]
        foreseen[weight] = float(surprise[said].mean())
    assert foreseen[1.0] < 0.8 * foreseen[0.0]


def test_the_shipped_policy_is_small_and_says_what_it_is():
    files = [file for folder in EMBEDDED.values() for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) <= 20 * 2**20
    config = (EMBEDDED["embedded"] / "config.json").read_text()
    assert "Qwen3ForCausalLM" in config
    assert ChatFormat(load_tokenizer("embedded")).stop_token_ids

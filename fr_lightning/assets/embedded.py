"""Builds the embedded policy: a tiny chat model with its own tokenizer, taught the shipped environments' formats badly.

`python -m fr_lightning.assets.embedded` makes the folder `embedded_policy` beside this file anew. The architecture is a
stock one (Qwen3), so that every engine serves it. It is deliberately weak: most of its demonstrators guess instead of
calling the tool, and it is stopped early; what is left to learn is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gymnasium
import torch
from rich.progress import track
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import fr_lightning.envs  # noqa: F401 (registers the environments)
from fr_lightning.policy import Policy, PolicyConfig
from fr_lightning.rollout.conversation import ChatFormat
from fr_lightning.warm_start import Lesson, demonstrations, save, train

FOLDER = Path(__file__).with_name("embedded_policy")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<action>",
    "</action>",
)
VOCABULARY = 512

TEMPLATE = """\
{%- if tools or messages[0].role == 'system' -%}
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}{% for tool in tools or [] %}tool {{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role != 'system' or not loop.first -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

SKILL = 0.35
"""Share of demonstrators that call the tool, or know the answer."""


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits: any text has tokens, and numbers can be copied digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(WORDS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
        model_max_length=4096,
    )


def corpus() -> list[str]:
    """What the environments and their experts say, once each, with generic prose for the other merges."""
    texts = [Path(__file__).read_text(encoding="utf-8"), TEMPLATE]
    for lesson in lessons():
        env = lesson.make_env()
        for seed in range(200):
            observation, _ = env.reset(seed=seed)
            texts += [observation, env.expert_action()]
    return texts


def lessons() -> list[Lesson]:
    """What the embedded policy is taught, and how badly."""
    return [
        Lesson(lambda: gymnasium.make("fr_lightning/Calculator-v0").unwrapped, SKILL, weight=3.0),  # pyright: ignore[reportArgumentType]
        Lesson(lambda: gymnasium.make("fr_lightning/Arithmetic-v0").unwrapped, SKILL, weight=1.0),  # pyright: ignore[reportArgumentType]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps of the warm start")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()

    torch.manual_seed(chosen.seed)
    tokenizer = build_tokenizer(corpus())
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        num_hidden_layers=4,
        intermediate_size=512,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(chosen.output)
    tokenizer.save_pretrained(chosen.output)
    policy = Policy(PolicyConfig(name=str(chosen.output)))
    stream = demonstrations(lessons(), ChatFormat(tokenizer), chosen.seed, max_context=512)
    losses = train(policy, stream, steps=chosen.steps, batch_size=chosen.batch_size, learning_rate=chosen.learning_rate)
    for step, loss in enumerate(track(losses, total=chosen.steps, description="warm start")):
        if step % 50 == 0 or step == chosen.steps - 1:
            print(f"step {step}: {loss:.4f} nats per token", flush=True)
    save(policy, tokenizer, chosen.output, torch.bfloat16)


if __name__ == "__main__":
    main()

"""Builds the embedded policies: tiny chat models with their own tokenizers, taught an environment's formats badly.

`python -m fr_lightning.assets.embedded NAME` makes the folder of that policy beside this file anew. The architecture is
a stock one (Qwen3), so that every engine serves it. They are deliberately weak: a policy is shown how to call the tool
and to copy its answer, and then, mostly, how to guess. To prefer what it can do well is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from fr_lightning.envs.arithmetic import ArithmeticEnv, CalculatorEnv
from fr_lightning.envs.base import TextEnv
from fr_lightning.envs.math_data import ProblemMix, ProblemSet
from fr_lightning.envs.python_tool import PythonToolEnv
from fr_lightning.models import load_tokenizer
from fr_lightning.policy import Policy, PolicyConfig
from fr_lightning.rollout.conversation import ChatFormat
from fr_lightning.warm_start import Lesson, demonstrations, save, train

FOLDER = Path(__file__).parent
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
{% endif %}{% for tool in tools or [] -%}
tool {{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})
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

COMMON = (
    "the of and to in is you that it he was for on are as with his they I at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part take look at "
    "put the turn on off open close go to door box cup bowl table desk room left right true false none error answer"
)

PHASES = ((1.0, 0.85, 2e-3), (0.25, 0.15, 5e-4))
"""(skill of the demonstrators, share of the steps, peak learning rate): first taught well, then led astray."""


@dataclass(frozen=True)
class Curriculum:
    """What one policy is shown: `envs` are pairs of an environment's maker and its weight. `base` is the policy it
    begins as; None: random weights, and a tokenizer of its own.
    """

    folder: str
    envs: tuple[tuple[Callable[[], TextEnv], float], ...]
    steps: int
    batch_size: int
    max_context: int
    base: str | None = None

    def lessons(self, skill: float = 1.0) -> list[Lesson]:
        return [Lesson(make, skill, weight) for make, weight in self.envs]


def _python_tool() -> TextEnv:
    problems = ProblemSet(kinds=("arithmetic", "modular"), difficulties=(1, 2), rows=20_000)
    return PythonToolEnv(ProblemMix((problems,), seed=1), prompt="plain", max_calls=2)


POLICIES = {
    "embedded": Curriculum(
        "embedded_policy", ((CalculatorEnv, 3.0), (ArithmeticEnv, 1.0)), steps=400, batch_size=64, max_context=512
    ),
    "embedded:python_tool": Curriculum(
        "python_tool_policy", ((_python_tool, 1.0),), steps=300, batch_size=32, max_context=384, base="embedded"
    ),
}


def build_tokenizer(texts: list[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Byte-level BPE with single digits: any text has tokens, and numbers can be copied digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(WORDS),
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


def corpus(lessons: list[Lesson]) -> list[str]:
    """What the environments and their experts say, and common words for everybody else's environments."""
    texts = [TEMPLATE, *[COMMON] * 20]
    for lesson in lessons:
        env = lesson.make_env()
        for seed in range(200):
            observation, _ = env.reset(seed=seed)
            texts += [observation, env.expert_action()]
    return texts


def newborn(tokenizer: PreTrainedTokenizerFast, folder: Path, vocabulary: int = VOCABULARY) -> None:
    """A model of random weights and its tokenizer."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=192,
        num_hidden_layers=4,
        intermediate_size=512,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="embedded", choices=POLICIES)
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps of the warm start; default: its own")
    parser.add_argument("--batch-size", type=int, default=None, help="demonstrations per step; default: its own")
    parser.add_argument("--output", type=Path, default=None, help="default: its place in the package")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    curriculum = POLICIES[chosen.name]
    output = chosen.output or FOLDER / curriculum.folder

    torch.manual_seed(chosen.seed)
    if curriculum.base is None:
        newborn(build_tokenizer(corpus(curriculum.lessons())), output)
    policy = Policy(PolicyConfig(name=curriculum.base or str(output)))
    tokenizer = load_tokenizer(curriculum.base or str(output))
    chat = ChatFormat(tokenizer)
    for phase, (skill, share, learning_rate) in enumerate(PHASES):
        stream = demonstrations(curriculum.lessons(skill), chat, chosen.seed + phase, curriculum.max_context)
        steps = max(1, round(share * (chosen.steps or curriculum.steps)))
        losses = train(
            policy,
            stream,
            steps=steps,
            batch_size=chosen.batch_size or curriculum.batch_size,
            learning_rate=learning_rate,
        )
        for step, loss in enumerate(track(losses, total=steps, description=f"demonstrators of skill {skill:g}")):
            if step % 50 == 0 or step == steps - 1:
                print(f"step {step}: {loss:.4f} nats per token", flush=True)
    save(policy, tokenizer, output, torch.bfloat16)


if __name__ == "__main__":
    main()

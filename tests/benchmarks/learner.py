"""One optimizer step of the learner: ours, the plain way, and TRL's GRPOTrainer. Speed, peak memory, head memory.

    python -m tests.benchmarks.learner --model HuggingFaceTB/SmolLM2-135M-Instruct --rows 32 --tokens 128 --rounds 3

Every way makes the same step: forward, per-token log-probabilities and entropies, loss, backward, fused AdamW, on the
same random token ids: `--rows` rows, the first 16 tokens of each a prompt; all of `--tokens` tokens or, with `--lengths
mixed`, of log-normal lengths up to that, as episodes have. Tokens a second are of real tokens, padding not counted.
float32 weights, and bfloat16 autocast unless `--precision float32`, which is faster on a CPU without bfloat16 units.
Nothing is generated.

- `ours`: `Policy` and `policy_loss`, in micro-batches of `--max-tokens`.
- `plain`: the same loop and micro-batches, with the model's logits → float32 → log_softmax → gather, and entropies.
- `trl`: `GRPOTrainer.train()` with TRL's own defaults, 8 rows per device and gradient checkpointing, accumulated to
  `--rows`. Only its generation and scoring are replaced, by the fixed tokens; a step is timed between its
  `on_step_begin` and `on_step_end`. TRL 1.16 has a chunked head of its own.
- `trl-matched`: the same without gradient checkpointing, with our micro-batch's rows per device.
- `trl-whole`: TRL's defaults but all rows on the device at once, with no accumulation.

Each measurement is a fresh process, the ways taken in turn in every round: one warm-up step, then one that is timed, by
the clock and by the processor time of all its threads (which other work on the machine disturbs less).
Peak memory is `ru_maxrss` of the whole process, libraries included. Head memory is measured apart: hidden states of all
rows go through forward and backward of the head alone, and the growth of the peak less the gradients of hidden states
and weight is what the computation took.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import psutil
import torch
from torch import Tensor

from fr_lightning.logprobs import token_logprobs
from fr_lightning.models import load_causal_lm, load_tokenizer, resolve_model
from fr_lightning.objective import Objective, policy_loss
from fr_lightning.packing import micro_batches
from fr_lightning.policy import Policy, PolicyConfig
from fr_lightning.trajectory import PaddedRows, Trajectory, TrajectoryBatch

PROMPT = 16
LEARNING_RATE = 1e-6
WAYS = ("ours", "plain", "trl", "trl-matched", "trl-whole")
GIB = 2**30


def peak_rss() -> int:
    """Bytes. Linux reports kibibytes, macOS bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def autocast(precision: str) -> AbstractContextManager:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16")


def now() -> tuple[float, float]:
    """Seconds by the clock and of this process's processor time."""
    return time.perf_counter(), time.process_time()


def random_tokens(rows: int, tokens: int, vocabulary: int) -> Tensor:
    return torch.randint(20, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(0))


def row_lengths(args: argparse.Namespace) -> list[int]:
    """Tokens of each row, prompt included."""
    if args.lengths == "equal":
        return [args.tokens] * args.rows
    median, chance = args.tokens / 4, random.Random(0)
    drawn = [chance.lognormvariate(math.log(median), 0.8) for _ in range(args.rows - 1)]
    return [args.tokens, *(min(args.tokens, max(2 * PROMPT, round(length))) for length in drawn)]


def plain_logprobs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """As most trainers do: everything in float32, at once."""
    distribution = logits.float().log_softmax(dim=-1)
    with torch.no_grad():
        entropies = -(distribution.exp() * distribution).sum(dim=-1)
    return distribution.gather(-1, targets[..., None])[..., 0], entropies


def trajectory(ids: Tensor) -> Trajectory:
    mask = torch.arange(len(ids)) >= PROMPT
    return Trajectory(ids, mask, torch.where(mask, -11.0, 0.0), torch.where(mask, 0, -1), reward=0.0)


def measure_loop(
    args: argparse.Namespace, forward: Callable[[PaddedRows], tuple[Tensor, Tensor]], model
) -> list[tuple[float, float]]:
    """Begin and end of the second of two steps of our own loop."""
    ids = random_tokens(args.rows, args.tokens, model.config.vocab_size)
    batch = TrajectoryBatch(trajectory(row[:length]) for row, length in zip(ids, row_lengths(args), strict=True))
    advantages = torch.linspace(-1.0, 1.0, args.rows)
    objective = Objective(gate="none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    marks = []
    for _ in range(2):
        marks.append(now())
        for group in micro_batches(batch.lengths, args.max_tokens):
            rows = batch.pad(group)
            with autocast(args.precision):
                logprobs, entropies = forward(rows)
            loss = policy_loss(
                logprobs, rows.behavior_logprobs, advantages[group], rows.policy_mask, objective,
                num_trajectories=len(batch), entropies=entropies,
            ).loss  # fmt: skip
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.append(now())
    return marks[2:]


def measure_ours(args: argparse.Namespace) -> list[tuple[float, float]]:
    policy = Policy(PolicyConfig(name=args.model, chunk_tokens=args.chunk_tokens))
    return measure_loop(args, policy, policy.model)


def measure_plain(args: argparse.Namespace) -> list[tuple[float, float]]:
    model = load_causal_lm(args.model).train()

    def forward(rows: PaddedRows) -> tuple[Tensor, Tensor]:
        logits = model(input_ids=rows.token_ids, use_cache=False).logits[:, :-1]
        logprobs, entropies = plain_logprobs(logits, rows.token_ids[:, 1:])
        pad = torch.nn.functional.pad
        return pad(logprobs, (1, 0)) * rows.policy_mask, pad(entropies, (1, 0)) * rows.policy_mask

    return measure_loop(args, forward, model)


def measure_trl(args: argparse.Namespace, per_device: int, checkpointing: bool) -> list[tuple[float, float]]:
    """Begin and end of the second optimizer step inside `GRPOTrainer.train()`."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    marks: list[tuple[float, float]] = []

    class Stopwatch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            marks.append(now())

        def on_step_end(self, args, state, control, **kwargs):
            marks.append(now())

    class GivenTokens(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            ids = random_tokens(args.rows, args.tokens, len(tokenizer))
            mask = (torch.arange(args.tokens)[None] < torch.tensor(row_lengths(args))[:, None]).long()
            return {
                "prompt_ids": ids[:, :PROMPT], "prompt_mask": mask[:, :PROMPT],
                "completion_ids": ids[:, PROMPT:], "completion_mask": mask[:, PROMPT:],
                "advantages": torch.linspace(-1.0, 1.0, args.rows),
                "num_items_in_batch": mask[:, PROMPT:].sum(),
            }  # fmt: skip

    tokenizer = load_tokenizer(args.model)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=args.precision == "bfloat16",
            gradient_checkpointing=checkpointing,
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=args.rows // per_device,
            num_generations=min(8, args.rows),
            max_completion_length=args.tokens - PROMPT,
            learning_rate=LEARNING_RATE,
            max_steps=2,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = GivenTokens(
            model=load_causal_lm(args.model),
            processing_class=tokenizer,
            reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "x"}] * args.rows * 2),
            callbacks=[Stopwatch()],
        )
        trainer.train()
    assert len(marks) == 4, marks
    return marks[2:]


def measure_head(args: argparse.Namespace, way: str) -> int:
    """Bytes that log-probabilities and entropies of all tokens take, forward and backward, beyond what any way needs:
    the hidden states, the head's weight, and the gradients of both.
    """
    model = load_causal_lm(args.model)
    head = model.get_output_embeddings()
    assert head is not None
    weight = torch.nn.Parameter(head.weight.detach().clone())
    del model, head
    hidden = torch.randn(args.rows * args.tokens, weight.shape[1], requires_grad=True)
    targets = random_tokens(args.rows, args.tokens, len(weight)).flatten()
    temperature = torch.ones(len(hidden))

    def run(size: int) -> None:
        with autocast(args.precision):
            if way == "ours":
                logprobs, _ = token_logprobs(
                    hidden[:size], weight, targets[:size], temperature[:size], chunk_tokens=args.chunk_tokens
                )
            else:
                logprobs, _ = plain_logprobs(torch.nn.functional.linear(hidden[:size], weight), targets[:size])
        logprobs.sum().backward()

    torch.set_flush_denormal(True)
    with autocast(args.precision):  # load the kernels on a toy problem, lest their code count as working memory
        toy = torch.nn.Parameter(weight[:64].detach().clone())
        token_logprobs(hidden[:8], toy, targets[:8] % 64, temperature[:8])[0].sum().backward()
        plain_logprobs(torch.nn.functional.linear(hidden[:8], toy), targets[:8] % 64)[0].sum().backward()
    hidden.grad = None
    before = psutil.Process().memory_info().rss
    settled = peak_rss()  # loading the model peaked above what is held now: lift the floor to it, so as to see growth
    ballast = torch.ones(max(0, settled - before) // 4)
    before = psutil.Process().memory_info().rss
    run(len(hidden))
    grown = peak_rss() - max(before, settled)
    del ballast
    return grown - weight.nbytes - hidden.nbytes


def child(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    if args.child.startswith("head-"):
        result = {"head": measure_head(args, args.child.removeprefix("head-"))}
    else:
        ways: dict[str, Callable[[], list[tuple[float, float]]]] = {
            "ours": lambda: measure_ours(args),
            "plain": lambda: measure_plain(args),
            "trl": lambda: measure_trl(args, min(args.rows, 8), checkpointing=True),
            "trl-matched": lambda: measure_trl(args, max(1, args.max_tokens // args.tokens), checkpointing=False),
            "trl-whole": lambda: measure_trl(args, args.rows, checkpointing=True),
        }
        begin, end = ways[args.child]()
        tokens = sum(row_lengths(args))
        result = {"speed": tokens / (end[0] - begin[0]), "economy": tokens / (end[1] - begin[1]), "peak": peak_rss()}
    print(json.dumps(result))


def measured(args: argparse.Namespace, way: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.learner", "--child", way]
    for name in ("model", "rows", "tokens", "lengths", "max_tokens", "chunk_tokens", "precision", "threads"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    )
    if done.returncode:
        raise RuntimeError(f"{way} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help=f"of a row, {PROMPT} of them a prompt")
    parser.add_argument("--lengths", choices=("equal", "mixed"), default="equal")
    parser.add_argument("--max-tokens", type=int, default=512, help="of a micro-batch, ours and plain")
    parser.add_argument("--chunk-tokens", type=int, default=PolicyConfig.chunk_tokens)
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each way; fewer on a busy machine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.model = resolve_model(args.model)
    if args.child:
        child(args)
        return
    torch.set_num_threads(1)  # the parent only waits
    found: dict[str, list[dict[str, float]]] = {way: [] for way in args.ways}
    for _ in range(args.rounds):
        for way in args.ways:
            found[way].append(measured(args, way))
            print(way, found[way][-1], file=sys.stderr, flush=True)
    micro = f"micro-batches of {args.max_tokens} tokens, {args.threads} threads"
    lengths = row_lengths(args)
    print(
        f"{args.rows} rows of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all, {args.precision}, {micro}"
    )
    print(f"{'way':<12} {'tokens/s':>9} {'tokens/CPU-s':>13} {'peak GiB':>9}   tokens/s of each round")
    for way, rounds in found.items():
        speed, economy, peak = (statistics.median(one[key] for one in rounds) for key in ("speed", "economy", "peak"))
        each = " ".join(f"{one['speed']:.0f}" for one in rounds)
        print(f"{way:<12} {speed:>9.0f} {economy:>13.0f} {peak / GIB:>9.2f}   {each}")
    heads = {way: measured(args, f"head-{way}")["head"] / GIB for way in ("ours", "plain")}
    vocabulary = load_causal_lm(args.model).config.vocab_size
    full = 4 * args.rows * args.tokens * vocabulary / GIB
    print(f"head alone, all tokens: ours {heads['ours']:.3f} GiB, plain {heads['plain']:.3f} GiB; ", end="")
    print(f"float32 [tokens, vocabulary] is {full:.3f} GiB")


if __name__ == "__main__":
    main()

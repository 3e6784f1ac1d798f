"""One suite for every engine: what `engines/base.py` promises, from outside, against a plain forward pass.

Log-probabilities are compared in float32 with |Δ| ≤ 2e-4 (other kernels, another order of sums).
"""

import asyncio
import functools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from conformance import (
    CONTEXT,
    EVERY_KIND,
    EVERY_KIND_ON_EVERY_MODEL,
    SLOTS,
    TOLERANCE,
    Kind,
    alive,
    assert_from_versions,
    make,
    make_model,
    make_one,
    processes,
    prompts,
    reference,
)

from fr_lightning.engines.base import EngineError, PromptTooLong, Sampling
from fr_lightning.models import load_tokenizer


@pytest.fixture(scope="module", params=EVERY_KIND_ON_EVERY_MODEL)
def kind(request):
    """Most tests share one engine of each kind; each leaves it idle, and its weights as they were."""
    name, model = request.param
    loop = asyncio.new_event_loop()
    engine = make(name, model)
    loop.run_until_complete(engine.start())
    yield Kind(name, model, engine, loop)
    loop.run_until_complete(engine.close())
    loop.close()


@pytest.fixture
def other_weights(kind):
    """A publisher of other weights, with the models that hold them by version; the first come back at the end."""
    first = kind.engine.version
    models = {first: kind.weights()}
    for seed in (1, 2, 3):
        kind.weights(seed)  # made beforehand: requests in flight do not wait

    async def publish(seed: int, version: int):
        models[version] = kind.weights(seed)
        await kind.engine.update_weights(models[version].named_parameters(), version)

    yield publish, models, first
    kind.run(kind.engine.update_weights(kind.weights().named_parameters(), max(models) + 1))


# ------------------------------------------------------------------------------------------------- log-probabilities


def test_256_concurrent_requests_have_the_log_probs_of_a_plain_forward(kind):
    asked, model, first = kind.prompts(256), kind.weights(), kind.engine.version

    async def play():
        return await asyncio.gather(
            *(
                kind.engine.generate(prompt, Sampling(max_tokens=1 + index % 30, temperature=0.7 + 0.1 * (index % 5)))
                for index, prompt in enumerate(asked)
            )
        )

    for index, (prompt, completion) in enumerate(zip(asked, kind.run(play()), strict=True)):
        assert len(completion.token_ids) == 1 + index % 30
        assert completion.finish_reason == "length"
        assert completion.policy_versions == [first] * len(completion.token_ids)
        expected = reference(model, prompt, completion.token_ids, 0.7 + 0.1 * (index % 5))
        assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_seeded_prompts_of_more_tokens_than_a_step_takes(kind):
    """A prefill cut in two killed vLLM's process on a CPU where the request had a seed."""
    model, long = kind.weights(), CONTEXT - 8
    asked = [[(7 * place + number) % 64 for place in range(long)] for number in range(3 * SLOTS)]

    async def play():
        return await asyncio.gather(
            *(kind.engine.generate(prompt, Sampling(max_tokens=4, seed=number)) for number, prompt in enumerate(asked))
        )

    for prompt, completion in zip(asked, kind.run(play()), strict=True):
        assert completion.logprobs == pytest.approx(reference(model, prompt, completion.token_ids), abs=TOLERANCE)


def test_turns_of_sessions_have_the_log_probs_of_a_plain_forward(kind):
    model, rng = kind.weights(), random.Random(1)

    async def converse(number: int, tokens: list[int]):
        for _ in range(4):
            sampling = Sampling(max_tokens=rng.randint(1, 12))
            completion = await kind.engine.generate(tokens, sampling, session=f"s{number}")
            assert completion.logprobs == pytest.approx(reference(model, tokens, completion.token_ids), abs=TOLERANCE)
            tokens = tokens + completion.token_ids
            if number == 5:  # this one rewrites part of its past every turn
                tokens[len(tokens) // 2] = (tokens[len(tokens) // 2] + 1) % 64
            tokens += [rng.randrange(64) for _ in range(rng.randint(0, 9))]
        await kind.engine.forget(f"s{number}")

    async def play():
        await asyncio.gather(*(converse(number, tokens) for number, tokens in enumerate(kind.prompts(6, seed=2))))

    kind.run(play())


def test_unicode_goes_in_and_comes_back_as_the_same_tokens(kind):
    tokenizer = load_tokenizer(kind.model)
    prompt = tokenizer("Größe 猫 🦊 naïve\u0301 \u202eabc")["input_ids"]
    completion = kind.run(kind.engine.generate(prompt, Sampling(max_tokens=20)))
    assert completion.logprobs == pytest.approx(reference(kind.weights(), prompt, completion.token_ids), abs=TOLERANCE)


def test_greedy_takes_the_likeliest_and_reports_its_untempered_log_prob(kind):
    prompt, model = [7, 8, 9], kind.weights()

    async def play():
        greedy = kind.engine.generate(prompt, Sampling(temperature=0, max_tokens=8))
        beside = kind.engine.generate(prompt, Sampling(temperature=0.5, max_tokens=8))
        return (await asyncio.gather(greedy, beside))[0]

    completion = kind.run(play())
    tokens = list(prompt)
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        assert token == int(logprobs.argmax())
        assert logprob == pytest.approx(float(logprobs.max()), abs=TOLERANCE)
        tokens.append(token)


def test_filters_leave_the_renormalised_distribution(kind):
    prompt, model = [3, 1, 4], kind.weights()
    completion = kind.run(kind.engine.generate(prompt, Sampling(top_k=3, temperature=0.8, max_tokens=12)))
    tokens = list(prompt)
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        with torch.no_grad():
            values, ids = (model(torch.tensor([tokens])).logits[0, -1] / 0.8).topk(3)
        assert logprob == pytest.approx(float(values.log_softmax(0)[ids.tolist().index(token)]), abs=TOLERANCE)
        tokens.append(token)


def test_a_seed_draws_the_same_tokens_whatever_else_is_in_flight(kind):
    seeded = Sampling(max_tokens=20, seed=2**62 + 5)

    async def play():
        alone = await kind.engine.generate([1, 2, 3], seeded)
        others = [kind.engine.generate(prompt, Sampling(max_tokens=15)) for prompt in kind.prompts(20)]
        together, *_ = await asyncio.gather(kind.engine.generate([1, 2, 3], seeded), *others)
        unseeded = await asyncio.gather(*(kind.engine.generate([1, 2, 3], Sampling(max_tokens=20)) for _ in range(2)))
        return alone, together, unseeded

    alone, together, unseeded = kind.run(play())
    assert alone.token_ids == together.token_ids
    assert unseeded[0].token_ids != unseeded[1].token_ids


# ------------------------------------------------------------------------------------------------------ how it ends


def test_stop_tokens_length_and_context_end_a_completion(kind):
    async def play():
        on = await kind.engine.generate([1, 2], Sampling(max_tokens=300, seed=1))
        stop = on.token_ids[7]
        stopped = await kind.engine.generate([1, 2], Sampling(max_tokens=300, stop_token_ids=(stop,), seed=1))
        full = await kind.engine.generate([1] * (CONTEXT - 3), Sampling(max_tokens=50))
        return stop, stopped, on, full

    stop, stopped, on, full = kind.run(play())
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == on.token_ids[: on.token_ids.index(stop) + 1]
    assert len(stopped.token_ids) == len(stopped.logprobs) == len(stopped.policy_versions)
    assert (on.finish_reason, len(on.token_ids)) == ("length", 300)  # the model's own end of text does not end a turn
    assert (full.finish_reason, len(full.token_ids)) == ("length", 3)


tokenizer_of = functools.cache(load_tokenizer)


def text_of(kind, tokens: list[int]) -> str:
    return str(tokenizer_of(kind.model).decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def tokens_until(kind, tokens: list[int], string: str) -> int:
    """How many tokens it takes until their text holds the string, by decoding every beginning anew."""
    return next(count for count in range(1, len(tokens) + 1) if string in text_of(kind, tokens[:count]))


def across_two_tokens(kind, tokens: list[int]) -> str:
    """The end of one token's text and the beginning of the next one's; not the last of it, so that it ends inside."""
    for index in range(5, len(tokens)):
        first, second = (text_of(kind, [token]) for token in tokens[index - 1 : index + 1])
        string = first[-2:] + second[:-1]
        before = text_of(kind, tokens[:index])
        if first and len(second) > 1 and (first + second).isascii() and string not in before:
            return string
    raise AssertionError("no such place")


@pytest.fixture
def flattened(kind):
    """Twenty times smaller logits: nearly any token may come, so that bytes meet in characters of several tokens. Gives
    the temperature at which the model itself draws like that."""

    def publish(scale: float):
        weights = [
            (name, scale * p if name == "model.norm.weight" else p) for name, p in kind.weights().named_parameters()
        ]
        kind.run(kind.engine.update_weights(weights, kind.engine.version + 1))

    publish(1 / 20)
    yield 20.0
    publish(1.0)


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(kind, flattened):
    prompt = tokenizer_of(kind.model)("never in the answer")["input_ids"]

    def played(seed: int, *strings: str):
        return kind.run(kind.engine.generate(prompt, Sampling(max_tokens=300, seed=seed, stop=strings)))

    seed, whole = 0, played(0)
    while not (foreign := [sign for sign in text_of(kind, whole.token_ids) if not sign.isascii() and sign != "\ufffd"]):
        seed, whole = seed + 1, played(seed + 1)
    for string in (across_two_tokens(kind, whole.token_ids), foreign[0]):
        stopped = played(seed, "never in the answer", string)
        assert stopped.finish_reason == "stop"
        assert stopped.token_ids == whole.token_ids[: tokens_until(kind, whole.token_ids, string)]
        assert stopped.policy_versions == [kind.engine.version] * len(stopped.token_ids)
        expected = reference(kind.weights(), prompt, stopped.token_ids, flattened)
        assert stopped.logprobs == pytest.approx(expected, abs=TOLERANCE)
    unmet = played(seed, "never in the answer")
    assert (unmet.finish_reason, unmet.token_ids) == ("length", whole.token_ids)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [([], ValueError), ([0, 10**6], ValueError), ([-1], ValueError), ([1] * CONTEXT, PromptTooLong)],
)
def test_prompts_that_cannot_be_continued_are_refused(kind, prompt, error):
    with pytest.raises(error):
        kind.run(kind.engine.generate(prompt))


def test_cancelling_requests_frees_their_places(kind):
    async def play():
        places = SLOTS * getattr(kind.engine, "replicas", 1)
        long = Sampling(max_tokens=CONTEXT)
        running = [asyncio.ensure_future(kind.engine.generate([1], long)) for _ in range(places)]
        waiting = asyncio.ensure_future(kind.engine.generate([1], long))
        await asyncio.sleep(0.1)
        for task in (*running[1:], waiting):
            task.cancel()
        short = await kind.engine.generate([1], Sampling(max_tokens=2))
        still_running = not running[0].done()
        return short, still_running, await running[0]

    short, still_running, long = kind.run(play())
    assert len(short.token_ids) == 2
    assert still_running, "the short request had to wait for a long one"
    assert len(long.token_ids) == CONTEXT - 1


# ---------------------------------------------------------------------------------------------------------- updates


def test_an_update_in_mid_generation_splits_every_request_in_flight(kind, other_weights):
    publish, models, first = other_weights

    async def play():
        asked = kind.prompts(SLOTS - 1, seed=9)
        tasks = [asyncio.ensure_future(kind.engine.generate(p, Sampling(max_tokens=400))) for p in asked]
        await asyncio.gather(*(kind.engine.generate([1], Sampling(max_tokens=5)) for _ in range(2)))
        await publish(1, first + 1)  # the others have some tokens by now
        assert kind.engine.version == first + 1
        late = await kind.engine.generate([1], Sampling(max_tokens=5))
        await publish(2, first + 7)
        assert 0 < kind.engine.pause_seconds < 60
        return list(zip(asked, await asyncio.gather(*tasks), strict=True)), late

    completions, late = kind.run(play())
    assert late.policy_versions == [first + 1] * 5
    assert_from_versions(late, [1], models)
    for prompt, completion in completions:
        assert sorted(completion.policy_versions) == completion.policy_versions
        assert set(completion.policy_versions) == {first, first + 1, first + 7}
        assert_from_versions(completion, prompt, models)


def test_an_update_reaches_what_sessions_kept(kind, other_weights):
    publish, models, first = other_weights

    async def play():
        prompt = [1, 2, 3] * 60  # several blocks of a prefix cache
        before = await kind.engine.generate(prompt, Sampling(max_tokens=9), session="s")
        await publish(3, first + 1)
        prompt = prompt + before.token_ids
        after = await kind.engine.generate(prompt, Sampling(max_tokens=9), session="s")
        await kind.engine.forget("s")
        return prompt, after

    prompt, after = kind.run(play())
    assert after.policy_versions == [first + 1] * 9
    assert_from_versions(after, prompt, models)


def test_bad_weights_are_refused_by_name_and_change_nothing(kind):
    version = kind.engine.version + 1
    good = dict(kind.weights(5).named_parameters())
    name = "model.layers.1.mlp.up_proj.weight"
    bad = {
        "no parameter 'nonsense'": {**good, "nonsense": torch.zeros(1)},
        f"{name}' has shape": {**good, name: torch.zeros(3, 3)},
        f"{name}' holds a value that is not finite": {**good, name: torch.full_like(good[name], torch.nan)},
        f"lacks 1 parameters of the engine's model, e.g. '{name}'": {k: v for k, v in good.items() if k != name},
    }
    for message, weights in bad.items():
        with pytest.raises(ValueError, match=message):
            kind.run(kind.engine.update_weights(weights.items(), version))
    if version > 1:
        with pytest.raises(ValueError, match="step back"):
            kind.run(kind.engine.update_weights(good.items(), version - 2))
    completion = kind.run(kind.engine.generate([1, 2], Sampling(max_tokens=9)))
    assert_from_versions(completion, [1, 2], {version - 1: kind.weights()})


# ------------------------------------------------------------------------------------- death, and what is left behind


@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_killed_process_is_replaced_with_the_published_weights_until_the_budget_is_spent(name):
    async def play():
        engine = make(name, max_restarts=2, **({} if name == "embedded" else {"stall_timeout": 20.0}))
        before = {process.pid for process in processes(name)}

        async def kill_in_mid_generation():
            asked = prompts(2 * SLOTS, seed=3)
            tasks = [asyncio.ensure_future(engine.generate(p, Sampling(max_tokens=300))) for p in asked]
            await asyncio.sleep(0.3)
            victim = next(process for process in processes(name) if process.pid not in before)
            victim.kill()
            return list(zip(asked, await asyncio.gather(*tasks), strict=True))

        await engine.start()
        await engine.update_weights(make_model(1).named_parameters(), 3)
        first = await kill_in_mid_generation()
        await engine.update_weights(make_model(2).named_parameters(), 4)
        second = await kill_in_mid_generation()
        if name != "servers":  # of two servers the other one goes on
            with pytest.raises(EngineError, match="replaced 2 times"):
                await kill_in_mid_generation()
            with pytest.raises(EngineError, match="replaced 2 times"):
                await engine.generate([1])
            with pytest.raises(EngineError, match="replaced 2 times"):
                await engine.update_weights([], 9)
        await engine.close()
        assert {process.pid for process in processes(name)} == before
        return first, second

    first, second = asyncio.run(play())
    for prompt, completion in first:
        assert_from_versions(completion, prompt, {3: make_model(1)})
    for prompt, completion in second:
        assert_from_versions(completion, prompt, {4: make_model(2)})


@pytest.mark.parametrize("name", EVERY_KIND)
def test_an_engine_starts_again_after_it_was_closed_with_requests_in_flight(name):
    async def play():
        engine = make_one(name)
        await engine.close()
        await engine.start()
        with pytest.raises(EngineError, match="already"):
            await engine.start()
        flying = [asyncio.ensure_future(engine.generate([1], Sampling(max_tokens=CONTEXT))) for _ in range(3)]
        await asyncio.sleep(0.05)
        await engine.close()
        await engine.close()
        outcomes = await asyncio.gather(*flying, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineError] * 3
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([1])
        await engine.start()
        completion = await engine.generate([1], Sampling(max_tokens=5))
        await engine.close()
        return completion

    shared = Path("/dev/shm")
    before = set(shared.glob("*"))
    assert_from_versions(asyncio.run(play()), [1], {0: make_model()})
    assert not {path for path in shared.glob("*") if "weights" in path.name} - before


@pytest.mark.parametrize("name", EVERY_KIND)
def test_a_killed_parent_leaves_no_process(name):
    program = (
        "import asyncio, sys, psutil\n"
        "from conformance import make_one\n"
        "async def main():\n"
        "    engine = make_one(sys.argv[1])\n"
        "    await engine.start()\n"
        "    await engine.generate([1], session='s')\n"
        "    print('pids', *[c.pid for c in psutil.Process().children(recursive=True)], flush=True)\n"
        "    await asyncio.sleep(120)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    here = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", program, name],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": here},
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        line = next(line for line in parent.stdout if line.startswith("pids"))
        pids = [int(pid) for pid in line.split()[1:]]
        parent.send_signal(signal.SIGKILL)
    assert pids
    deadline = time.monotonic() + 10
    while remaining := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, [psutil.Process(pid).cmdline() for pid in remaining]
        time.sleep(0.05)


def test_a_model_that_cannot_be_loaded_fails_the_start_with_the_reason(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        asyncio.run(make("embedded", model=str(tmp_path)).start())

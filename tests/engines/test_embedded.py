"""The embedded engine from outside, and its batching loop in this process where a step must be counted."""

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from fr_lightning.engines.base import Completion, EngineError, PromptTooLong, Sampling
from fr_lightning.engines.embedded import EmbeddedEngine
from fr_lightning.engines.embedded_worker import (
    Batcher,
    Request,
    UnsupportedAttention,
    WorkerSettings,
    common_prefix,
    load_batcher,
)
from fr_lightning.engines.sampling import sample
from fr_lightning.routing import NotRouted

VOCAB = 48
CONTEXT = 512
SLOTS = 8
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.25,  # far from uniform, so that a wrong distribution shows
    "bos_token_id": None,
    "eos_token_id": None,
}


def make_model(architecture: str, seed: int = 0):
    torch.manual_seed(seed)
    if architecture == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)).eval()
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in ("qwen3", "llama")}
    for name, folder in folders.items():
        make_model(name).save_pretrained(folder)
    return folders


def make_batcher(folder, *, keep=False, slots=SLOTS, context=CONTEXT) -> Batcher:
    return load_batcher(WorkerSettings(str(folder), "float32", "cpu", context, slots, 1, keep, ()))[0]


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def engine(folders, loop):
    """An engine that most tests share; each leaves it idle. Only versions go up."""
    engine = EmbeddedEngine(model=str(folders["qwen3"]), max_sequences=SLOTS, max_context=CONTEXT)
    loop.run_until_complete(engine.start())
    yield engine
    loop.run_until_complete(engine.close())


@torch.no_grad()
def reference(model, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probabilities of a completion by one plain forward pass over everything."""
    logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def finish(batcher: Batcher) -> dict[int, Completion]:
    done = {}
    while batcher.busy:
        done.update(batcher.step())
    return done


def request(number: int, prompt: list[int], session: str | None = None, **sampling) -> Request:
    return Request(number, prompt, Sampling(**sampling), seed=number, session=session)


def child_of(engine_process: psutil.Process) -> psutil.Process:
    children = [c for c in engine_process.children() if "embedded_worker" in " ".join(c.cmdline())]
    return max(children, key=lambda c: c.create_time())


def alive(pid: int) -> bool:
    """A process that nobody has reaped yet is dead."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ------------------------------------------------------------------------------------------------- log-probabilities


def test_many_concurrent_requests_have_the_log_probs_of_a_plain_forward(engine, loop):
    async def play():
        return await asyncio.gather(
            *(
                engine.generate(prompt, Sampling(max_tokens=1 + index % 30, temperature=0.7 + 0.1 * (index % 5)))
                for index, prompt in enumerate(asked)
            )
        )

    asked = prompts(128)
    model = make_model("qwen3")
    for index, (prompt, completion) in enumerate(zip(asked, loop.run_until_complete(play()), strict=True)):
        assert len(completion.token_ids) == 1 + index % 30
        assert completion.finish_reason == "length"
        assert completion.policy_versions == [0] * len(completion.token_ids)
        expected = reference(model, prompt, completion.token_ids, 0.7 + 0.1 * (index % 5))
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_turns_of_a_session_have_the_log_probs_of_a_plain_forward(folders, architecture):
    batcher, model = make_batcher(folders[architecture]), make_model(architecture)
    rng = random.Random(1)
    conversations = prompts(6, seed=2)
    for turn in range(4):
        for number, tokens in enumerate(conversations):
            batcher.add(request(10 * turn + number, tokens, session=f"s{number}", max_tokens=rng.randint(1, 12)))
        for identifier, completion in finish(batcher).items():
            tokens = conversations[identifier % 10]
            assert completion.logprobs == pytest.approx(reference(model, tokens, completion.token_ids), abs=1e-4)
            tokens.extend(completion.token_ids)
            if identifier % 10 == 5:  # this one rewrites part of its past every turn
                tokens[len(tokens) // 2] = (tokens[len(tokens) // 2] + 1) % VOCAB
            tokens.extend(rng.randrange(VOCAB) for _ in range(rng.randint(0, 9)))


def test_a_long_prompt_in_pieces_and_a_conversation_that_outgrows_its_slot(folders):
    batcher, model = make_batcher(folders["llama"]), make_model("llama")
    long = prompts(1, seed=3, longest=1)[0] * 3 + prompts(60, seed=4, longest=10)[7] * 40
    long = long[: CONTEXT - 60]
    for number in range(4):  # together more than one step's budget
        batcher.add(request(number, long[number:], max_tokens=50))
    batcher.add(request(9, [1, 2, 3], max_tokens=3))
    for number, completion in finish(batcher).items():
        prompt = [1, 2, 3] if number == 9 else long[number:]
        assert completion.logprobs == pytest.approx(reference(model, prompt, completion.token_ids), abs=1e-4)


def test_a_prompt_of_more_than_a_steps_budget_with_nothing_else_to_do(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": 4096})
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    batcher = make_batcher(tmp_path, context=4096)
    prompt = prompts(1, seed=5, longest=1)[0] + [number % VOCAB for number in range(2500)]
    batcher.add(request(0, prompt, max_tokens=3))
    (completion,) = finish(batcher).values()
    assert completion.logprobs == pytest.approx(reference(model, prompt, completion.token_ids), abs=1e-4)


def test_a_session_prefills_only_what_is_new(folders):
    batcher = make_batcher(folders["qwen3"])
    fed: list[int] = []
    batcher.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    prompt = list(range(30))
    batcher.add(request(0, prompt, session="a", max_tokens=4))
    completion = finish(batcher)[0]
    assert fed == [30, 1, 1, 1]
    longer = prompt + completion.token_ids + [5, 6]
    fed.clear()
    batcher.add(request(1, longer, session="a", max_tokens=1))
    finish(batcher)
    assert fed == [3]  # the last sampled token, which was never fed, and the two new ones
    fed.clear()
    batcher.add(request(2, longer, session="a", max_tokens=1))
    batcher.add(request(3, longer, session="b", max_tokens=1))
    finish(batcher)
    assert fed == [1 + len(longer)]  # even a fully known prompt needs its last token; another session knows nothing
    batcher.forget("a")
    fed.clear()
    batcher.add(request(4, longer, session="a", max_tokens=1))
    finish(batcher)
    assert fed == [len(longer)]


def test_kept_conversations_give_way_least_recently_used_first(folders):
    batcher = make_batcher(folders["qwen3"], slots=2)
    for number, session in enumerate(["a", "b", "a", "c"]):
        batcher.add(request(number, [1, 2, 3, 4], session=session, max_tokens=2))
        finish(batcher)
    assert list(batcher.kept) == ["a", "c"]
    for number in (10, 11):
        batcher.add(request(number, [1, 2], max_tokens=2))
    assert len(finish(batcher)) == 2
    assert not batcher.kept


# --------------------------------------------------------------------------------------------------------- sampling


def test_sampled_frequencies_are_the_probabilities(engine, loop):
    count, prompt = 4000, [3, 1, 4, 1, 5]

    async def play():
        return await asyncio.gather(*(engine.generate(prompt, Sampling(max_tokens=1)) for _ in range(count)))

    frequencies = Counter(completion.token_ids[0] for completion in loop.run_until_complete(play()))
    with torch.no_grad():
        probabilities = make_model("qwen3")(torch.tensor([prompt])).logits[0, -1].softmax(-1).tolist()
    for token, probability in enumerate(probabilities):
        deviation = (count * probability * (1 - probability)) ** 0.5
        assert abs(frequencies[token] - count * probability) < 5 * deviation + 1


def filtered(logits: list[float], s: Sampling) -> list[float]:
    """The processed distribution, in plain Python."""
    weights = torch.tensor(logits, dtype=torch.float64).div(s.temperature).softmax(0).tolist()
    ranking = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    kept = ranking[: s.top_k or None]
    total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if s.top_p < 1 and nucleus and mass >= s.top_p:
            break
        nucleus.append(token)
        mass += weights[token] / total
    kept = [token for token in nucleus if weights[token] >= s.min_p * weights[ranking[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(weights))]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    vocabulary=st.sampled_from([3, 17, 256, 300, 700]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([0.35, 0.8, 1.0]),
    min_p=st.sampled_from([0.0, 0.07]),
)
def test_every_uniform_number_falls_to_the_token_that_owns_it(seed, vocabulary, temperature, top_k, top_p, min_p):
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    s = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    uniforms = torch.cat(
        [torch.linspace(0, 1, 200, dtype=torch.float64)[:-1], torch.tensor([1 - 2**-53], dtype=torch.float64)]
    )
    ids, logprobs, finite = sample(logits.expand(len(uniforms), -1), [s] * len(uniforms), uniforms)
    expected = torch.tensor(filtered(logits.tolist(), s), dtype=torch.float64)
    upper = expected.cumsum(0)
    assert finite.all()
    assert (expected[ids] > 0).all()
    assert (uniforms <= upper[ids] + 1e-6).all()
    assert (uniforms >= (upper - expected)[ids] - 1e-6).all()
    assert torch.allclose(logprobs.double(), expected[ids].log(), atol=1e-5)


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.full((4, 600), -torch.inf)
    logits[:, [0, 255, 256, 511]] = torch.tensor([0.0, -90.0, -200.0, -3.0])
    edges = torch.tensor([0.0, 1 - 2**-53, 0.5, 0.96], dtype=torch.float64)
    ids, logprobs, finite = sample(logits, [Sampling()] * 4, edges)
    assert set(ids.tolist()) <= {0, 511}
    assert finite.all()
    assert (logprobs > -4).all()


def test_greedy_takes_the_likeliest_and_reports_its_untempered_log_prob(engine, loop):
    prompt = [7, 8, 9]
    completion = loop.run_until_complete(engine.generate(prompt, Sampling(temperature=0, top_k=1, max_tokens=8)))
    model = make_model("qwen3")
    tokens = list(prompt)
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        assert token == int(logprobs.argmax())
        assert logprob == pytest.approx(float(logprobs.max()), abs=1e-4)
        tokens.append(token)


def test_a_seed_draws_the_same_tokens_whatever_else_is_in_flight(engine, loop):
    seeded = Sampling(max_tokens=20, seed=5)

    async def play():
        alone = await engine.generate([1, 2, 3], seeded)
        others = [engine.generate(prompt, Sampling(max_tokens=15)) for prompt in prompts(20)]
        together, *_ = await asyncio.gather(engine.generate([1, 2, 3], seeded), *others)
        unseeded = await asyncio.gather(*(engine.generate([1, 2, 3], Sampling(max_tokens=20)) for _ in range(2)))
        return alone, together, unseeded

    alone, together, unseeded = loop.run_until_complete(play())
    assert alone.token_ids == together.token_ids
    assert unseeded[0].token_ids != unseeded[1].token_ids


def test_logits_that_are_not_finite_fail_the_request_and_leave_nothing_behind(folders):
    batcher = make_batcher(folders["qwen3"], slots=2)
    weight = batcher.model.model.embed_tokens.weight
    good = weight[7].clone()
    weight.data[7] = torch.nan  # the tied head then spoils every row that is sampled
    batcher.add(request(0, [7, 1], session="a", max_tokens=3))
    batcher.add(request(1, [2, 1], session="b", max_tokens=3))
    assert all(isinstance(result, str) for result in finish(batcher).values())
    weight.data[7] = good
    batcher.add(request(2, [1], max_tokens=5))
    batcher.add(request(3, [2, 1], session="a", max_tokens=5))
    model = make_model("qwen3")
    for number, completion in finish(batcher).items():
        prompt = {2: [1], 3: [2, 1]}[number]
        assert completion.logprobs == pytest.approx(reference(model, prompt, completion.token_ids), abs=1e-4)


# ------------------------------------------------------------------------------------------------------ how it ends


def test_stop_tokens_length_and_context_end_a_completion(engine, loop):
    async def play():
        stopped = await engine.generate([1, 2], Sampling(max_tokens=400, stop_token_ids=(5, 6, 7, 8, 9), seed=1))
        full = await engine.generate([1] * (CONTEXT - 3), Sampling(max_tokens=50))
        return stopped, full

    stopped, full = loop.run_until_complete(play())
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids[-1] in (5, 6, 7, 8, 9)
    assert not {5, 6, 7, 8, 9} & set(stopped.token_ids[:-1])
    assert (full.finish_reason, len(full.token_ids)) == ("length", 3)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [([], ValueError), ([0, VOCAB], ValueError), ([-1], ValueError), ([1] * CONTEXT, PromptTooLong)],
)
def test_prompts_that_cannot_be_continued_are_refused(engine, loop, prompt, error):
    with pytest.raises(error):
        loop.run_until_complete(engine.generate(prompt))


def test_cancelling_a_conversation_leaves_the_others_as_they_are(engine, loop):
    """Whichever it is: its keys and values give way to those of another one."""

    async def play():
        prompts = [[7 + number] for number in range(SLOTS)]
        tasks = [
            asyncio.ensure_future(engine.generate(prompt, Sampling(max_tokens=400 + 10 * number, seed=number)))
            for number, prompt in enumerate(prompts)
        ]
        for number in (0, 2, 1):
            await asyncio.sleep(0.15)
            assert not tasks[number].done(), "too fast for this test"
            tasks[number].cancel()
        return [(prompt, await task) for prompt, task in list(zip(prompts, tasks, strict=True))[3:]]

    for prompt, completion in loop.run_until_complete(play()):
        assert_from_versions(completion, prompt, {engine.version: make_model("qwen3")})
    assert engine._restarts == 0


def test_cancelling_a_request_frees_its_place(engine, loop):
    async def play():
        running = [asyncio.ensure_future(engine.generate([1], Sampling(max_tokens=CONTEXT))) for _ in range(SLOTS)]
        waiting = asyncio.ensure_future(engine.generate([1], Sampling(max_tokens=CONTEXT)))
        await asyncio.sleep(0.05)
        for task in (*running[1:], waiting):
            task.cancel()
        short = await engine.generate([1], Sampling(max_tokens=2))
        still_running = not running[0].done()
        return short, still_running, await running[0]

    short, still_running, long = loop.run_until_complete(play())
    assert len(short.token_ids) == 2
    assert still_running, "the short request had to wait for a long one"
    assert len(long.token_ids) == CONTEXT - 1


# ---------------------------------------------------------------------------------------------------------- updates


def assert_from_versions(completion: Completion, prompt: list[int], models: dict) -> None:
    """Each token's log-probability is what the model of its version says about everything before it."""
    by_version = {version: reference(model, prompt, completion.token_ids) for version, model in models.items()}
    expected = [by_version[version][index] for index, version in enumerate(completion.policy_versions)]
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.fixture
def other_weights(engine, loop):
    """A publisher of other weights, with the model that holds them; the first ones come back at the end."""
    models = {}

    async def publish(seed: int, version: int):
        models[version] = make_model("qwen3", seed)
        await engine.update_weights(models[version].state_dict().items(), version)

    first = engine.version
    models[first] = make_model("qwen3")
    yield publish, models, first
    loop.run_until_complete(engine.update_weights(make_model("qwen3").named_parameters(), max(models) + 1))


def test_an_update_in_mid_generation_splits_every_request_in_flight(engine, loop, other_weights):
    publish, models, first = other_weights

    async def play():
        asked = prompts(SLOTS - 1, seed=9)
        tasks = [asyncio.ensure_future(engine.generate(p, Sampling(max_tokens=300))) for p in asked]
        await engine.generate([1], Sampling(max_tokens=5))  # the others have five tokens by now
        await publish(1, first + 1)
        assert engine.version == first + 1
        late = await engine.generate([1], Sampling(max_tokens=5))
        await publish(2, first + 7)
        return zip(asked, await asyncio.gather(*tasks), strict=True), late

    completions, late = loop.run_until_complete(play())
    assert late.policy_versions == [first + 1] * 5
    assert_from_versions(late, [1], models)
    for prompt, completion in completions:
        assert sorted(completion.policy_versions) == completion.policy_versions
        assert set(completion.policy_versions) == {first, first + 1, first + 7}
        assert_from_versions(completion, prompt, models)


def test_an_update_drops_what_sessions_kept(engine, loop, other_weights):
    publish, models, first = other_weights

    async def play():
        before = await engine.generate([1, 2, 3], Sampling(max_tokens=9), session="s")
        await publish(3, first + 1)
        prompt = [1, 2, 3, *before.token_ids]
        return prompt, await engine.generate(prompt, Sampling(max_tokens=9), session="s")

    prompt, after = loop.run_until_complete(play())
    assert_from_versions(after, prompt, models)


def test_keep_goes_on_from_the_old_keys_and_values(folders):
    batcher, old, new = make_batcher(folders["qwen3"], keep=True), make_model("qwen3"), make_model("qwen3", 1)
    prompt = [4, 5, 6]
    batcher.add(request(0, prompt, session="s", max_tokens=12))
    for _ in range(5):
        batcher.step()
    batcher.model.load_state_dict(new.state_dict())
    batcher.weights_changed(1)
    completion = finish(batcher)[0]
    assert completion.policy_versions == [0] * 5 + [1] * 7
    tokens = prompt + completion.token_ids
    with torch.no_grad():  # seven tokens had been fed under the old weights: the prompt and four of the five drawn
        cache = DynamicCache(config=old.config)
        head = old(torch.tensor([tokens[:7]]), past_key_values=cache).logits[0, 2:]
        tail = new(torch.tensor([tokens[7:-1]]), past_key_values=cache).logits[0]
    expected = torch.cat([head, tail]).log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    assert "s" in batcher.kept


def test_bad_weights_are_refused_by_name_and_change_nothing(engine, loop):
    version = engine.version + 1
    good = make_model("qwen3", 5).state_dict()
    name = "model.layers.1.mlp.up_proj.weight"
    bad = {
        "no parameter 'model.nothing'": {**good, "model.nothing": torch.zeros(2)},
        f"{name}' has shape": {**good, name: torch.zeros(3, 3)},
        f"{name}' holds a value that is not finite": {**good, name: torch.full_like(good[name], torch.nan)},
        f"lacks 1 parameters of the engine's model, e.g. '{name}'": {k: v for k, v in good.items() if k != name},
    }
    for message, weights in bad.items():
        with pytest.raises(ValueError, match=message):
            loop.run_until_complete(engine.update_weights(weights.items(), version))
    with pytest.raises(ValueError, match="step back"):
        loop.run_until_complete(engine.update_weights(good.items(), engine.version - 1))
    completion = loop.run_until_complete(engine.generate([1, 2], Sampling(max_tokens=9)))
    assert_from_versions(completion, [1, 2], {version - 1: make_model("qwen3")})


# ------------------------------------------------------------------------------------- death, and what is left behind


def test_a_child_that_dies_or_hangs_is_replaced_until_the_budget_is_spent(folders):
    async def play():
        engine = EmbeddedEngine(max_sequences=4, max_context=CONTEXT, max_restarts=2, stall_timeout=2.0)
        me = psutil.Process()
        before = set(me.children())
        await engine.start(str(folders["qwen3"]))
        asked = prompts(9, seed=3)

        async def interrupted(signal_number: int):
            tasks = [asyncio.ensure_future(engine.generate(p, Sampling(max_tokens=300, seed=1))) for p in asked]
            await asyncio.sleep(0.1)
            child_of(me).send_signal(signal_number)
            return await asyncio.gather(*tasks)

        await engine.update_weights(make_model("qwen3", 1).named_parameters(), 3)
        killed = await interrupted(signal.SIGKILL)
        await engine.update_weights(make_model("qwen3", 2).named_parameters(), 4)
        hung = await interrupted(signal.SIGSTOP)
        with pytest.raises(EngineError, match=r"replaced 2 times.*exit code -9"):
            await interrupted(signal.SIGKILL)
        with pytest.raises(EngineError, match="replaced 2 times"):
            await engine.generate([1])
        with pytest.raises(EngineError, match="replaced 2 times"):
            await engine.update_weights([], 9)
        await engine.close()
        assert set(me.children()) == before
        return asked, killed, hung

    shared = Path("/dev/shm")
    before = set(shared.glob("*"))
    asked, killed, hung = asyncio.run(play())
    for prompt, first, second in zip(asked, killed, hung, strict=True):
        assert_from_versions(first, prompt, {3: make_model("qwen3", 1)})
        assert_from_versions(second, prompt, {4: make_model("qwen3", 2)})
    assert set(shared.glob("*")) <= before


def test_fresh_engines_give_equal_bits_and_close_with_requests_in_flight(folders):
    async def play():
        engine = EmbeddedEngine(model=str(folders["qwen3"]), max_sequences=SLOTS, max_context=CONTEXT)
        await engine.start()
        child = child_of(psutil.Process())
        requests = [
            engine.generate(prompt, Sampling(max_tokens=10 + 7 * index % 50, seed=index))
            for index, prompt in enumerate(prompts(5 * SLOTS))
        ]
        completions = await asyncio.gather(*requests)
        flying = [asyncio.ensure_future(engine.generate([1], Sampling(max_tokens=CONTEXT))) for _ in range(3)]
        await asyncio.sleep(0.02)
        await engine.close()
        await engine.close()
        outcomes = await asyncio.gather(*flying, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineError] * 3
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([1])
        assert not child.is_running()
        return completions

    assert asyncio.run(play()) == asyncio.run(play())


def test_a_killed_parent_leaves_no_process(folders):
    program = (
        "import asyncio, sys, psutil\n"
        "from fr_lightning.engines.embedded import EmbeddedEngine\n"
        "async def main():\n"
        "    engine = EmbeddedEngine(model=sys.argv[1])\n"
        "    await engine.start()\n"
        "    print(*[c.pid for c in psutil.Process().children()], flush=True)\n"
        "    await engine.generate([1], session='s')\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folders["qwen3"])], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert pids
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------ what it cannot serve


def test_models_without_a_plain_cache_are_refused(tmp_path):
    MistralForCausalLM(MistralConfig(**SIZES, sliding_window=64)).save_pretrained(tmp_path / "window")
    with pytest.raises(UnsupportedAttention, match="max_context ≤ 64"):
        make_batcher(tmp_path / "window")
    make_batcher(tmp_path / "window", context=64)
    hybrid = Qwen3NextConfig(**SIZES, head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)
    Qwen3NextForCausalLM(hybrid).save_pretrained(tmp_path / "hybrid")
    with pytest.raises(UnsupportedAttention, match="linear_attention"):
        make_batcher(tmp_path / "hybrid")


def test_stop_strings_without_a_tokenizer_fail_the_request_and_nothing_else(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")

    async def play():
        engine = EmbeddedEngine(model=str(tmp_path), max_restarts=0)
        await engine.start()
        with pytest.raises(EngineError, match="stop strings need the tokenizer"):
            await engine.generate([1, 2], Sampling(max_tokens=3, stop=("x",)))
        assert len((await engine.generate([1, 2], Sampling(max_tokens=3))).token_ids) == 3
        await engine.close()

    asyncio.run(play())


@pytest.mark.parametrize("stop", ["</answer>", ("",), (1,)])
def test_stop_strings_that_are_none_are_refused(stop):
    with pytest.raises(ValueError, match="stop must be"):
        Sampling(stop=stop)


def test_a_model_that_cannot_be_loaded_fails_the_start_with_the_reason(tmp_path):
    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)

    async def play():
        engine = EmbeddedEngine(model=str(tmp_path))
        with pytest.raises(EngineError, match="T5"):
            await engine.start()

    asyncio.run(play())


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(a, b):
    length = common_prefix(a, b)
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]


# ----------------------------------------------------------------------------------------------------- routed experts


def make_moe(seed: int = 0):
    """Three layers, the middle one without experts."""
    torch.manual_seed(seed)
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
    sizes = {**SIZES, "num_hidden_layers": 3}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, head_dim=16, norm_topk_prob=True)).eval()


@torch.no_grad()
def plain_routes(model, tokens: list[int]) -> torch.Tensor:
    """[N, L, k] of one plain forward pass, by a look at what each layer's experts are given."""
    routes = torch.full((len(tokens), 3, 2), -1)
    handles = []
    for number in (0, 2):

        def look(module, args, number=number):
            routes[:, number] = args[1]

        handles.append(model.model.layers[number].mlp.experts.register_forward_pre_hook(look))
    model(torch.tensor([tokens]))
    for handle in handles:
        handle.remove()
    return routes


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    make_moe().save_pretrained(folder)
    return folder


def make_recording(folder) -> Batcher:
    return load_batcher(
        WorkerSettings(str(folder), "float32", "cpu", CONTEXT, SLOTS, 1, False, (), record_routes=True)
    )[0]


def test_routes_are_those_of_a_plain_forward_pass(moe_folder):
    batcher = make_recording(moe_folder)
    asked = prompts(SLOTS + 3, seed=4)
    for number, prompt in enumerate(asked):
        batcher.add(request(number, prompt, session=str(number), max_tokens=3 + number % 5))
    for number, completion in finish(batcher).items():
        tokens = asked[number] + completion.token_ids
        assert np.array_equal(completion.routed_experts, plain_routes(make_moe(), tokens[:-1]))


def test_a_sessions_next_turn_tells_what_is_new_and_a_forgotten_one_everything(moe_folder):
    batcher, model = make_recording(moe_folder), make_moe()
    tokens = [1, 2, 3]
    told = 0
    for turn in range(4):
        if turn == 3:
            batcher.forget("s")
            told = 0
        batcher.add(request(turn, tokens, session="s", max_tokens=6))
        completion = finish(batcher)[turn]
        tokens = tokens + completion.token_ids
        expected = plain_routes(model, tokens[:-1])[told:]
        assert np.array_equal(completion.routed_experts, expected)
        told = len(tokens) - 1
        tokens = [*tokens, 7, 8, 9]


def test_tokens_run_again_after_an_update_are_told_as_they_were_run_first(moe_folder):
    batcher, old, new = make_recording(moe_folder), make_moe(), make_moe(1)
    batcher.add(request(0, [4, 5, 6], max_tokens=12))
    for _ in range(5):
        batcher.step()
    batcher.model.load_state_dict(new.state_dict())
    batcher.weights_changed(1)
    completion = finish(batcher)[0]
    tokens = [4, 5, 6, *completion.token_ids][:-1]
    routes = torch.from_numpy(completion.routed_experts).long()
    # The last of the five tokens drawn under the old weights is run first under the new ones.
    assert torch.equal(routes[:7], plain_routes(old, tokens)[:7])
    assert torch.equal(routes[7:], plain_routes(new, tokens)[7:])
    assert not torch.equal(plain_routes(old, tokens)[:7], plain_routes(new, tokens)[:7])


def test_a_model_without_experts_has_no_routes(folders):
    with pytest.raises(NotRouted, match="Qwen3ForCausalLM"):
        make_recording(folders["qwen3"])

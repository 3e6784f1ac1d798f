"""What only vLLM engines have: ways to take an update, a fleet."""

import asyncio
import base64
import importlib.metadata
import importlib.util
import io
import json

import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from conformance import assert_from_versions, make, make_model, needs_vllm, processes, prompts
from safetensors.torch import load_file
from transformers import DynamicCache

from fr_lightning.engines import server
from fr_lightning.engines.base import EngineError, Sampling
from fr_lightning.engines.publications import Publications, layout_of
from fr_lightning.engines.server import VLLMServers
from fr_lightning.engines.vllm import VLLMEngine
from fr_lightning.engines.vllm_replica import Answer, Question, ReplicaDied, request_parameters
from fr_lightning.models import resolve_model

# ------------------------------------------------------------------------------------------------------- without vLLM


def test_a_missing_vllm_names_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for engine in (VLLMEngine, VLLMServers):
        with pytest.raises(ImportError, match=r"pip install 'fr-lightning\[vllm\]'"):
            engine()
    VLLMServers(urls=["http://127.0.0.1:1"])  # speaks HTTP only


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_update": "never"}, "on_update"),
        ({"kv_cache_on_update": "drop"}, "kv_cache_on_update"),
        ({"dtype": "int8"}, "dtype"),
        ({"max_context": 1}, "max_context"),
        ({"stall_timeout": 0}, "timeouts"),
        ({"servers": 0}, "servers"),
        ({"servers": 2, "devices": ["0"]}, "devices"),
    ],
)
def test_wrong_settings_name_themselves(settings, message):
    with pytest.raises(ValueError, match=message):
        VLLMServers(**{"urls": ["http://127.0.0.1:1"], **settings})


@pytest.mark.parametrize(("breaks", "healthy"), [(2, True), (3, True), (1, False)])
def test_a_connection_that_breaks_is_asked_again_where_the_server_is_well(breaks, healthy):
    """A server of a few lines: the real ones are asked in the conformance suite."""
    asked = 0

    async def generate(request):
        nonlocal asked
        asked += 1
        if asked <= breaks:
            request.transport.abort()
            return web.Response()
        choice = {"token_ids": [7], "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": "stop"}
        choice["weight_versions"] = [{"version": "0", "start": 0, "end": 1}]
        return web.Response(text=f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n")

    async def health(request):
        return web.Response(status=200 if healthy else 500)

    async def play():
        application = web.Application()
        application.add_routes([web.post("/inference/v1/generate", generate), web.get("/health", health)])
        async with TestServer(application) as fake:
            replica = server._Server(str(fake.make_url("")).rstrip("/"), VLLMServers(urls=["http://127.0.0.1:1"]))
            question = Question([1, 2], {"max_tokens": 1}, None, None)
            try:
                return (await replica.ask(question)).completion().token_ids
            except ReplicaDied:
                return replica.dead.result()
            finally:
                await replica.close()

    found = asyncio.run(play())
    if healthy and breaks < server.ATTEMPTS:
        assert found == [7]
        assert asked == breaks + 1
    else:
        assert "ServerDisconnectedError" in found if healthy else "answered /health with 500" in found
        assert asked == breaks


def test_an_answer_that_breaks_the_contract_is_an_engine_error():
    good = {"token_ids": [1, 2], "logprobs": [-0.5, 1e-7], "spans": [("3", 0, 1), ("4", 1, 2)], "finish_reason": "stop"}
    completion = Answer(**good).completion()
    assert completion.logprobs == [-0.5, 0.0]
    assert completion.policy_versions == [3, 4]
    for bad in (
        {"logprobs": [-0.5]},
        {"logprobs": [-0.5, float("-inf")]},
        {"logprobs": [-0.5, -9999.0]},  # a server's way to say the same
        {"spans": None},
        {"spans": [("3", 0, 1)]},
        {"finish_reason": "error"},
        {"finish_reason": None},
    ):
        with pytest.raises(EngineError):
            Answer(**{**good, **bad}).completion()


def test_routed_experts_are_those_asked_for_or_an_engine_error():
    good = {"token_ids": [1, 2], "logprobs": [-0.5, -0.5], "spans": [("3", 0, 2)], "finish_reason": "stop"}
    routes = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)  # of three prompt tokens and one of the two sampled
    found = Answer(**good, routed_experts=routes).completion(3).routed_experts
    assert found is not None
    assert found.dtype == np.int16
    assert found.tolist() == routes.tolist()
    assert Answer(**good, routed_experts=routes).completion().routed_experts is None
    with pytest.raises(EngineError, match="--enable-return-routed-experts"):
        Answer(**good).completion(3)
    with pytest.raises(EngineError, match="4 of 6 tokens"):
        Answer(**good, routed_experts=routes).completion(5)


def test_a_server_is_asked_for_the_routes_that_are_new_and_they_arrive():
    """A server of a few lines, in the forms of vLLM 0.32 (`numpy2base64`)."""
    asked = []

    async def generate(request):
        body = await request.json()
        asked.append((body["token_ids"], body["sampling_params"]["routed_experts_prompt_start"]))
        told = range(asked[-1][1], len(asked[-1][0]) + 1)
        buffer = io.BytesIO()
        np.save(buffer, np.array([[[token]] for token in told], dtype=np.uint8), allow_pickle=False)
        first = {"token_ids": [7], "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": None}
        last = {**first, "finish_reason": "length", "routed_experts": base64.b64encode(buffer.getvalue()).decode()}
        events = [
            {**first, "weight_versions": None, "routed_experts": None},
            {**last, "weight_versions": [{"version": "0", "start": 0, "end": 2}]},
        ]
        lines = [f"data: {json.dumps({'choices': [event]})}\n\n" for event in events]
        return web.Response(text="".join(lines) + "data: [DONE]\n\n")

    async def well(request):
        return web.Response()

    async def play():
        application = web.Application()
        application.add_routes(
            [
                web.post("/inference/v1/generate", generate),
                web.get("/health", well),
                web.post("/update_weight_version", well),
            ]
        )
        async with TestServer(application) as fake:
            engine = VLLMServers(model="embedded", urls=[str(fake.make_url(""))])
            engine.record_routes = True
            await engine.start()
            try:
                first = await engine.generate([1, 2, 3], session="s")
                second = await engine.generate([1, 2, 3, 7, 7, 4], session="s")
                other = await engine.generate([1, 2])
            finally:
                await engine.close()
            return [completion.routed_experts.flatten().tolist() for completion in (first, second, other)]

    assert asyncio.run(play()) == [[0, 1, 2, 3], [4, 5, 6], [0, 1, 2]]
    assert asked == [([1, 2, 3], 0), ([1, 2, 3, 7, 7, 4], 4), ([1, 2], 0)]


def test_requests_never_ask_for_more_than_the_context_holds():
    parameters = request_parameters(Sampling(max_tokens=100, stop_token_ids=(7,), seed=3), room=9)
    assert (parameters["max_tokens"], parameters["stop_token_ids"], parameters["seed"]) == (9, [7], 3)
    assert parameters["ignore_eos"]


def copied(path: str) -> dict[str, torch.Tensor]:
    """`load_file` maps the file, and what `settle` gives back is gone from under a mapping (SIGBUS)."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def test_publications_are_safetensors_files_and_the_latest_stays_whole(tmp_path):
    layout = layout_of(resolve_model("embedded"), torch.bfloat16)
    assert layout.aliases == {"lm_head.weight": "model.embed_tokens.weight"}

    async def play(place):
        publications = Publications(layout, place)
        first = await publications.write(make_model(1).named_parameters(), 1)
        broken = [("model.norm.weight", torch.zeros(1))]
        with pytest.raises(ValueError, match="shape"):
            await publications.write(broken, 2)
        assert publications.latest == first
        held = copied(first.path)
        second = await publications.write(make_model(2).state_dict().items(), 2)
        assert torch.equal(load_file(first.path)["model.norm.weight"], held["model.norm.weight"])
        publications.settle()
        third = copied(second.path)
        publications.close()
        return held, third

    for place in (None, tmp_path / "shared"):
        held, third = asyncio.run(play(place))
        for tensors, seed in ((held, 1), (third, 2)):
            expected = dict(make_model(seed).named_parameters())
            assert tensors.keys() == expected.keys()
            for name, tensor in tensors.items():
                assert torch.equal(tensor, expected[name].bfloat16())
    assert not list((tmp_path / "shared").iterdir())


def test_flags_are_vllms_own_spelling():
    flags = server._flags({"max_model_len": 5, "enforce_eager": True, "x_y": False, "z": None, "config": {"a": 1}})
    assert flags == ["--max-model-len", "5", "--enforce-eager", "--no-x-y", "--config", json.dumps({"a": 1})]


def test_the_plugin_is_where_vllm_looks_for_it():
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="fr_lightning")
    assert entry.value == "fr_lightning.engines.vllm_plugin:register"


# ---------------------------------------------------------------------------------------------------- ways of updating


@needs_vllm
@pytest.mark.parametrize("on_update", ["abort", "wait"])
def test_without_keep_every_turn_is_of_one_version(on_update):
    new = make_model(1)  # beforehand: requests in flight do not wait

    async def play():
        engine = make("vllm", on_update=on_update)
        await engine.start()
        asked = prompts(6, seed=4)
        tasks = [asyncio.ensure_future(engine.generate(p, Sampling(max_tokens=150))) for p in asked]
        await engine.generate([1], Sampling(max_tokens=5))
        await engine.update_weights(new.named_parameters(), 1)
        late = await engine.generate([1], Sampling(max_tokens=3))
        early = await asyncio.gather(*tasks)
        await engine.close()
        return list(zip(asked, early, strict=True)), late

    early, late = asyncio.run(play())
    assert late.policy_versions == [1] * 3
    for prompt, completion in early:
        assert completion.policy_versions == [0 if on_update == "wait" else 1] * 150
        assert_from_versions(completion, prompt, {0: make_model(), 1: new})


@needs_vllm
def test_keys_and_values_of_the_old_weights_can_be_kept():
    old, new = make_model(), make_model(1)

    async def play():
        engine = make("vllm", kv_cache_on_update="keep")
        await engine.start()
        task = asyncio.ensure_future(engine.generate([4, 5, 6], Sampling(max_tokens=200)))
        await engine.generate([1], Sampling(max_tokens=5))
        await engine.update_weights(new.named_parameters(), 1)
        completion = await task
        await engine.close()
        return completion

    completion = asyncio.run(play())
    split = completion.policy_versions.index(1)
    tokens = [4, 5, 6, *completion.token_ids]
    fed = 3 + split - 1  # the last token drawn under the old weights was not fed yet
    with torch.no_grad():
        cache = DynamicCache(config=old.config)
        head = old(torch.tensor([tokens[:fed]]), past_key_values=cache).logits[0, 2:]
        tail = new(torch.tensor([tokens[fed:-1]]), past_key_values=cache).logits[0]
    expected = torch.cat([head, tail]).log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=2e-4)


# ------------------------------------------------------------------------------------------------------------- a fleet


@needs_vllm
def test_sessions_stay_on_their_server_and_a_death_costs_one_retry():
    async def play():
        engine = make("servers")
        await engine.start()
        first, second = engine._serving
        for turn in range(3):
            requests = [engine.generate([1, 2, turn], Sampling(max_tokens=20), session=str(n)) for n in range(6)]
            asking = asyncio.gather(*requests)
            await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            assert (first.in_flight, second.in_flight) in ((3, 3), (0, 0))
            places = dict(engine._sessions)
            await asking
            assert engine._sessions == places
        dying = [
            asyncio.ensure_future(engine.generate([1], Sampling(max_tokens=300), session=str(n))) for n in range(6)
        ]
        await asyncio.sleep(0.3)
        processes("servers")[0].kill()
        completions = await asyncio.gather(*dying)
        alone = list(engine._serving)
        while len(engine._serving) < 2:
            await asyncio.sleep(0.2)
        for n in range(6):
            await engine.forget(str(n))
        assert not engine._sessions
        await engine.close()
        return completions, len(alone)

    completions, alone = asyncio.run(play())
    assert alone == 1
    for completion in completions:
        assert len(completion.token_ids) == 300
        assert_from_versions(completion, [1], {0: make_model()})


@needs_vllm
def test_servers_that_run_already_are_used_and_left(tmp_path):
    async def play():
        own = make("servers", servers=1)
        await own.start()
        (replica,) = own._serving
        there = VLLMServers(
            urls=[replica.url],
            model="embedded",
            dtype="float32",
            max_context=512,
            weights_folder=str(tmp_path / "weights"),
        )
        await there.start()
        await there.update_weights(make_model(1).named_parameters(), 5)
        completion = await there.generate([1, 2], Sampling(max_tokens=8))
        await there.close()
        after = await own.generate([1, 2], Sampling(max_tokens=8))
        await own.close()
        return completion, after

    completion, after = asyncio.run(play())
    assert completion.policy_versions == [5] * 8
    assert_from_versions(completion, [1, 2], {5: make_model(1)})
    assert len(after.token_ids) == 8


def test_an_address_without_a_server_fails_the_start_in_time():
    engine = VLLMServers(urls=["http://127.0.0.1:9"], model="embedded", start_timeout=1.5)
    with pytest.raises(EngineError, match="did not start"):
        asyncio.run(engine.start())

"""What a mixture of experts selects is what was recorded, whatever its router says by then."""

import contextlib
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import transformers

from fr_lightning.callbacks import WeightSync
from fr_lightning.datamodule import RolloutDataModule
from fr_lightning.engines.base import Sampling
from fr_lightning.engines.embedded import EmbeddedEngine
from fr_lightning.envs.arithmetic import CalculatorEnv
from fr_lightning.module import FlashReinforce
from fr_lightning.policy import Policy, PolicyConfig
from fr_lightning.rollout.runner import EpisodeLimits
from fr_lightning.routing import ExpertRouting, NotRouted
from fr_lightning.trajectory import NO_EXPERT, Trajectory, TrajectoryBatch

VOCABULARY, LAYERS, EXPERTS, CHOSEN = 40, 3, 8, 2
_sizes = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": CHOSEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **_sizes, head_dim=8, num_experts=EXPERTS, moe_intermediate_size=16, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "mixtral": transformers.MixtralConfig(**_sizes, num_local_experts=EXPERTS),
    # sigmoid scores, a correction bias, groups; indices are selected first and scores looked up after
    "deepseek_v3": transformers.DeepseekV3Config(
        **{**_sizes, "num_key_value_heads": 4},
        n_routed_experts=EXPERTS,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
}
TOKENS = torch.arange(24).view(2, 12) * 7 % VOCABULARY


def build(name: str):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def routers(model) -> list[torch.nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if name.endswith("gate.weight")]


@contextlib.contextmanager
def experts_get(model):
    """What reaches each layer's experts, by a look at their arguments: layer → (indices, weights), [T, k] each."""
    seen, handles = {}, []
    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):

            def look(module, args, number=number):
                seen[number] = args[1].detach().clone(), args[2].detach().clone()

            handles.append(layer.mlp.experts.register_forward_pre_hook(look))
    yield seen
    for handle in handles:
        handle.remove()


def random_routes(tokens: int, seed: int = 1) -> torch.Tensor:
    """Distinct experts per token and layer, in no order: [T, L, k]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :CHOSEN].to(torch.int16)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_recorded_is_what_the_experts_get(name):
    model = build(name)
    routing = ExpertRouting(model)
    with torch.no_grad(), routing.record() as recorded, experts_get(model) as seen:
        expected = model(TOKENS).logits
    routes = routing.stack(recorded)
    assert routes.shape == (TOKENS.numel(), LAYERS, CHOSEN)
    for layer in range(LAYERS):
        if layer in seen:
            assert torch.equal(routes[:, layer].long(), seen[layer][0])
        else:
            assert (routes[:, layer] == NO_EXPERT).all()
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, expected)  # nothing of it is left
        with routing.replay(routes):
            torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_a_replayed_selection_is_exact_though_the_router_says_otherwise(name):
    model = build(name)
    routing = ExpertRouting(model)
    with torch.no_grad():
        with routing.record() as recorded:
            model(TOKENS)
        routes = routing.stack(recorded)
        for router in routers(model):
            router += torch.randn(router.shape, generator=torch.Generator().manual_seed(3))
        with experts_get(model) as own:
            model(TOKENS)
        with routing.replay(routes), experts_get(model) as replayed:
            model(TOKENS)
    for layer, (selected, weights) in replayed.items():
        assert torch.equal(selected, routes[:, layer].long())
        assert not torch.equal(selected, own[layer][0])
        assert (weights > 0).all()


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_weights_are_the_learners_own_scores_of_the_replayed_experts(name):
    model = build(name)
    routes = random_routes(TOKENS.numel())
    hidden = {}
    gate = model.model.layers[0].mlp.gate
    gate.register_forward_pre_hook(lambda module, args: hidden.update(states=args[0].flatten(0, -2)))
    with torch.no_grad(), ExpertRouting(model).replay(routes), experts_get(model) as seen:
        model(TOKENS)
    probabilities = (hidden["states"] @ gate.weight.T).softmax(-1)
    wanted = probabilities.gather(-1, routes[:, 0].long())
    torch.testing.assert_close(seen[0][1], wanted / wanted.sum(-1, keepdim=True))


def test_a_token_without_a_record_goes_where_the_router_says():
    model = build("mixtral")
    routing = ExpertRouting(model)
    routes = random_routes(TOKENS.numel())
    routes[::3] = NO_EXPERT
    with torch.no_grad(), routing.replay(routes), experts_get(model) as seen:
        hidden = {}
        gate = model.model.layers[0].mlp.gate
        gate.register_forward_pre_hook(lambda module, args: hidden.update(states=args[0].flatten(0, -2)))
        model(TOKENS)
    own = (hidden["states"] @ gate.weight.T).topk(CHOSEN).indices
    expected = torch.where((torch.arange(TOKENS.numel()) % 3 == 0)[:, None], own, routes[:, 0].long())
    assert torch.equal(seen[0][0], expected)


def test_what_cannot_be_replayed_is_refused():
    dense = transformers.LlamaConfig(**{k: v for k, v in _sizes.items() if k != "num_experts_per_tok"})
    with pytest.raises(NotRouted, match=r"Llama.*model\.policy\.routing_replay"):
        Policy(PolicyConfig(routing_replay=True), transformers.AutoModelForCausalLM.from_config(dense))
    with pytest.raises(ValueError, match="compile"):
        PolicyConfig(routing_replay=True, compile=True)
    model = build("mixtral")
    routing = ExpertRouting(model)
    with pytest.raises(ValueError, match="3 layers"), routing.replay(torch.zeros(24, LAYERS + 1, CHOSEN)):
        pass
    for wrong in (torch.zeros(24, LAYERS, CHOSEN + 1), torch.zeros(23, LAYERS, CHOSEN)):
        with pytest.raises(ValueError, match="layer 0 of Mixtral"), routing.replay(wrong):
            model(TOKENS)
    model(TOKENS)  # and nothing of it is left
    policy = Policy(PolicyConfig(routing_replay=True), model)
    with pytest.raises(ValueError, match=r"routing_replay.*recorded none"):
        policy(batch(None).pad([0]))


# ------------------------------------------------------------------------------------------------------------ learner

LENGTHS = (9, 5, 12)


def batch(routes: list[torch.Tensor] | None) -> TrajectoryBatch:
    """Random conversations; the policy speaks from slot 2 on."""
    generator = torch.Generator().manual_seed(5)
    return TrajectoryBatch(
        Trajectory(
            token_ids=torch.randint(VOCABULARY, (length,), generator=generator),
            policy_mask=torch.arange(length) > 1,
            behavior_logprobs=torch.zeros(length),
            policy_versions=torch.where(torch.arange(length) > 1, 0, -1),
            reward=0.0,
            routed_experts=None if routes is None else routes[number],
        )
        for number, length in enumerate(LENGTHS)
    )


ROUTED = batch([random_routes(length, seed) for seed, length in enumerate(LENGTHS)])


def gradients(policy: Policy, parts: list[list[int]]) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    for rows in parts:
        policy(ROUTED.pad(rows)).logprobs.square().sum().backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_every_row_gets_its_own_routes_padded_and_packed(name):
    model = build(name)
    for packed in (False, True):
        policy = Policy(PolicyConfig(routing_replay=True, packed=packed), model)
        rows = ROUTED.pad([2, 0, 1])
        with torch.no_grad(), experts_get(model) as seen:
            together = policy(rows).logprobs
        real = torch.cat([ROUTED[row].routed_experts for row in (2, 0, 1)])
        for layer, (selected, _) in seen.items():
            places = selected if packed else selected.view(3, max(LENGTHS), CHOSEN)[rows.attention_mask]
            assert torch.equal(places, real[:, layer].long())
        with torch.no_grad():
            for place, row in enumerate((2, 0, 1)):
                alone = policy(ROUTED.pad([row])).logprobs[0]
                torch.testing.assert_close(together[place, : len(alone)], alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_gradients_reach_the_router_and_do_not_depend_on_how_they_are_computed(name):
    model = build(name)
    plain = Policy(PolicyConfig(routing_replay=True), model)
    expected = gradients(plain, [[0, 1, 2]])
    for router in (name for name in expected if name.endswith("gate.weight")):
        assert expected[router].norm() > 1e-3
    by_parts = gradients(plain, [[2], [0, 1]])
    checkpointed = Policy(PolicyConfig(routing_replay=True, activation_checkpointing=True), model)
    recomputed = gradients(checkpointed, [[0, 1, 2]])
    # Two passes are under way at once: each is recomputed under its own routes, not under the latest.
    checkpointed.zero_grad()
    first, second = (checkpointed(ROUTED.pad(rows)).logprobs.square().sum() for rows in ([0], [1, 2]))
    first.backward()
    second.backward()
    interleaved = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for found in (by_parts, recomputed, interleaved):
        assert found.keys() == expected.keys()
        for parameter, gradient in expected.items():
            torch.testing.assert_close(found[parameter], gradient, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------------ the whole way


class Keeps(pl.Callback):
    def __init__(self):
        self.batches: list[TrajectoryBatch] = []
        self.drifts: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(batch)
        self.drifts += dict(outputs)["update"].drift.tolist()


def test_a_fit_learns_on_the_routes_of_its_rollouts(tiny_moe: str, tmp_path: Path):
    module = FlashReinforce(
        PolicyConfig(name=tiny_moe, routing_replay=True, activation_checkpointing=True),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    )
    data = RolloutDataModule(
        env=CalculatorEnv,
        engine=EmbeddedEngine(max_context=256, max_sequences=8),
        batch_size=4,
        concurrency=4,
        mode="sync",
        sampling=Sampling(max_tokens=8),
        limits=EpisodeLimits(max_context=200, max_turns=3),
    )
    keeps, folder = Keeps(), tmp_path
    pl.Trainer(
        accelerator="cpu",
        max_steps=2,
        max_epochs=-1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[WeightSync(), keeps],
        enable_checkpointing=False,
    ).fit(module, datamodule=data)
    assert module.policy_version == 2
    assert max(keeps.drifts) < 1e-6  # engine and learner agree, also under the weights of the first update
    for trajectory in (trajectory for batch in keeps.batches for trajectory in batch):
        routes = trajectory.routed_experts
        assert routes is not None
        assert routes.dtype == torch.int8
        assert (routes[:-1] != NO_EXPERT).all()  # prompts and observations included
        assert (routes[-1] == NO_EXPERT).all()
    # The first batch was routed by the model as it lies in the folder: a plain forward pass selects the same.
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_moe)
    for trajectory in keeps.batches[0]:
        with torch.no_grad(), experts_get(model) as seen:
            model(trajectory.token_ids[None])
        for layer, (selected, _) in seen.items():
            assert torch.equal(selected[:-1], torch.as_tensor(trajectory.routed_experts)[:-1, layer].long())

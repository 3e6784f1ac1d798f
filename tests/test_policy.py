"""The policy's log-probabilities, entropies and gradients against the model's own logits, whatever the path taken."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fr_lightning.policy
from fr_lightning.policy import Policy, PolicyConfig
from fr_lightning.trajectory import PaddedRows, Trajectory, TrajectoryBatch

VOCABULARY = 50
_common: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_tokens: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_gated: dict[str, Any] = {**_common, **_tokens, "intermediate_size": 24}
_gpt2: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, **_tokens}

MODELS = {
    "llama, untied": transformers.LlamaConfig(**_gated, num_key_value_heads=2),
    "llama, tied": transformers.LlamaConfig(**_gated, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**_gated, num_key_value_heads=2, head_dim=8),
    "gpt2, dropout": transformers.GPT2Config(**_gpt2, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5),
    "phi, head bias": transformers.PhiConfig(**_gated),
    "cohere, scaled": transformers.CohereConfig(**_gated),
    "granite, divided": transformers.GraniteConfig(**_gated, logits_scaling=8.0),
    "mistral, window": transformers.MistralConfig(**_gated, num_key_value_heads=2, sliding_window=3),
}


def build(name="llama, tied", seed=0):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name])).double()
    for parameter in model.parameters():  # far from the uniform distribution of a new model
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def make_policy(model, **options):
    return Policy(PolicyConfig(dtype="float64", **options), model)


def trajectory(length, prompt, temperature=1.0, seed=0, observation=(), contexts=(0,)):
    """Random ids; policy tokens after the prompt, but for the slots of an observation."""
    random = torch.Generator().manual_seed(seed)
    mask = torch.arange(length) >= prompt
    mask[list(observation)] = False
    return Trajectory(
        token_ids=torch.randint(VOCABULARY, (length,), generator=random),
        policy_mask=mask,
        behavior_logprobs=torch.zeros(length),
        policy_versions=torch.where(mask, 0, -1),
        reward=0.0,
        temperature=temperature,
        contexts=contexts,
    )


BATCH = TrajectoryBatch(
    [trajectory(11, 2, 1.0, 1, (5, 6)), trajectory(4, 3, 0.7, 2), trajectory(8, 1, 1.5, 3), trajectory(11, 10, 1.0, 4)]
)
ROWS = BATCH.pad(range(4), pad_token_id=7)


def reference(model, rows):
    """Row by row, from the model's own logits, without padding."""
    logprobs = torch.zeros(rows.token_ids.shape, dtype=torch.float64)
    entropies = torch.zeros_like(logprobs)
    for row in range(len(rows.token_ids)):
        length = int(rows.attention_mask[row].sum())
        logits = model(input_ids=rows.token_ids[row : row + 1, :length]).logits[0, :-1]
        distribution = (logits / rows.temperature[row].double()).log_softmax(dim=-1)
        mask = rows.policy_mask[row, 1:length].double()
        chosen = distribution.gather(1, rows.token_ids[row, 1:length, None])[:, 0]
        logprobs[row, 1:length] = chosen * mask
        entropies[row, 1:length] = -(distribution.exp() * distribution).sum(dim=-1).detach() * mask
    return logprobs, entropies


def gradients(model, logprobs):
    model.zero_grad(set_to_none=True)
    (logprobs * torch.linspace(-1.0, 2.0, logprobs.numel(), dtype=logprobs.dtype).view_as(logprobs)).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_models_own_logits(name, packed):
    model = build(name)
    policy = make_policy(model, packed=packed, chunk_tokens=5)
    assert policy.packed == packed
    output = policy(ROWS)
    found = gradients(model, output.logprobs)
    expected_logprobs, expected_entropies = reference(model.eval(), ROWS)
    torch.testing.assert_close(output.logprobs, expected_logprobs, rtol=0, atol=1e-10)
    torch.testing.assert_close(output.entropies, expected_entropies, rtol=0, atol=1e-10)
    assert not output.entropies.requires_grad
    tolerance = 1e-6 if name == "cohere, scaled" else 1e-10  # its LayerNorm works in float32 whatever the weights are
    torch.testing.assert_close(found, gradients(model, expected_logprobs), rtol=tolerance, atol=tolerance)


def test_mixture_of_experts_in_float32():
    config = transformers.MixtralConfig(
        **_gated, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.5
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for packed in (False, True):
        output = Policy(PolicyConfig(packed=packed), model)(ROWS)
        expected, entropies = reference(model, ROWS)
        torch.testing.assert_close(output.logprobs.double(), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(output.entropies.double(), entropies, rtol=0, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_padding_is_never_seen(packed):
    policy = make_policy(build(), packed=packed)
    expected = policy(ROWS)
    for pad in (0, 49):
        torch.testing.assert_close(policy(BATCH.pad(range(4), pad_token_id=pad)), expected, rtol=0, atol=1e-12)
    alone = policy(BATCH.pad([1], pad_token_id=0))  # and neither is a row's neighbour
    torch.testing.assert_close(alone.logprobs[0], expected.logprobs[1, :4], rtol=0, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_no_context_sees_another(packed):
    policy = make_policy(build(), packed=packed)
    whole = trajectory(12, 2, seed=5, observation=(5, 6, 9), contexts=(0, 5, 9))
    others = [trajectory(7, 3, seed=6), trajectory(9, 1, seed=7, observation=(4,), contexts=(0, 4))]
    found = policy(TrajectoryBatch([others[0], whole, others[1]]).pad(range(3)))
    for start, stop in ((0, 5), (5, 9), (9, 12)):
        part = PaddedRows(
            token_ids=whole.token_ids[None, start:stop],
            attention_mask=torch.ones(1, stop - start, dtype=torch.bool),
            policy_mask=whole.policy_mask[None, start:stop],
            behavior_logprobs=torch.zeros(1, stop - start),
            context_starts=torch.arange(stop - start)[None] == 0,
            temperature=torch.ones(1),
        )
        expected, entropies = reference(policy.model, part)
        torch.testing.assert_close(found.logprobs[1, start:stop], expected[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(found.entropies[1, start:stop], entropies[0], rtol=0, atol=1e-10)
    assert not found.logprobs[1, [0, 1, 5, 6, 9]].any()


def test_temperature_is_the_rows_own():
    policy = make_policy(build())
    cold = PaddedRows(**{**vars(ROWS), "temperature": torch.full((4,), 0.5)})
    by_temperature = policy(cold).entropies.sum(1) / ROWS.policy_mask.sum(1)
    assert (by_temperature < policy(ROWS).entropies.sum(1) / ROWS.policy_mask.sum(1)).all()


def test_dropout_is_gone_though_training():
    policy = make_policy(build("gpt2, dropout"))
    assert policy.model.training
    assert torch.equal(policy(ROWS).logprobs, policy(ROWS).logprobs)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_autocast_stays_near_float32(packed):
    model = build("qwen3").float()
    policy = Policy(PolicyConfig(packed=packed), model)
    exact = policy(ROWS)
    expected = gradients(model, exact.logprobs)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = policy(ROWS)
    found = gradients(model, rounded.logprobs)
    assert rounded.logprobs.dtype == torch.float32
    assert (rounded.logprobs - exact.logprobs).abs().max() < 0.2
    assert (rounded.entropies - exact.entropies).abs().max() < 0.2
    for name, grad in expected.items():
        assert found[name].dtype == torch.float32
        assert (found[name] - grad).norm() < 0.1 * grad.norm() + 1e-3, name


def test_activation_checkpointing_recomputes_and_changes_no_gradient():
    model = build()
    expected = gradients(model, make_policy(model)(ROWS).logprobs)
    policy = make_policy(model, activation_checkpointing=True)
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *args: calls.append(1))
    logprobs = policy(ROWS).logprobs
    assert len(calls) == 1
    torch.testing.assert_close(gradients(model, logprobs), expected, rtol=1e-12, atol=1e-12)
    assert len(calls) == 2


def test_bfloat16_weights_give_float32_outputs():
    policy = Policy(PolicyConfig(dtype="bfloat16"), build().bfloat16())
    output = policy(ROWS)
    assert output.logprobs.dtype == output.entropies.dtype == torch.float32
    exact = Policy(PolicyConfig(), policy.model.float())(ROWS)
    assert (output.logprobs - exact.logprobs).abs().max() < 0.3


def test_rows_without_policy_tokens_take_part_with_zero_gradient():
    model = build()
    policy = make_policy(model)
    output = policy(PaddedRows(**{**vars(ROWS), "policy_mask": torch.zeros_like(ROWS.policy_mask)}))
    assert torch.equal(output.logprobs, torch.zeros(4, 11, dtype=torch.float64))
    assert all(not grad.any() for grad in gradients(model, output.logprobs).values())


def test_a_policy_token_in_slot_zero_is_refused():
    mask = ROWS.policy_mask.clone()
    mask[2, 0] = True
    with pytest.raises(ValueError, match="first slot of a context"):
        make_policy(build())(PaddedRows(**{**vars(ROWS), "policy_mask": mask}))


class LargestTensor(TorchDispatchMode):
    """The most elements any tensor has that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [value.numel() for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_logits_of_all_tokens_are_never_held():
    config = transformers.LlamaConfig(**{**_gated, "vocab_size": 2000}, num_key_value_heads=2)
    policy = Policy(PolicyConfig(chunk_tokens=8), transformers.LlamaForCausalLM(config))
    rows = TrajectoryBatch([trajectory(40, 1, seed=seed) for seed in range(4)]).pad(range(4))
    with LargestTensor() as largest:
        policy(rows).logprobs.sum().backward()
    assert largest.elements < rows.policy_mask.sum() * 2000 / 4


def test_soft_capped_logits_are_refused():
    config = transformers.Gemma2Config(**_gated, num_key_value_heads=2, head_dim=8)
    with pytest.raises(ValueError, match="soft-capped"):
        Policy(PolicyConfig(), transformers.AutoModelForCausalLM.from_config(config))


def test_logits_that_are_not_the_heads_are_refused():
    model = build()
    own = model.forward

    def shifted(*args, **kwargs):
        output = own(*args, **kwargs)
        output.logits = output.logits.tanh()
        return output

    model.forward = shifted
    with pytest.raises(ValueError, match="not a scaled linear map"):
        make_policy(model)


def test_models_that_mix_packed_rows_are_refused_packing_only():
    config = transformers.OPTConfig(**_common, **_tokens, ffn_dim=24, word_embed_proj_dim=8)
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    output = make_policy(model)(ROWS)
    torch.testing.assert_close(output.logprobs, reference(model, ROWS)[0], rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="packed"):
        make_policy(model, packed=True)(ROWS)


def reference_varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """What the CUDA kernel computes, one row after another: [ΣN, heads, d]."""
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q.dtype == torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    left, right = window_size
    assert right == 0
    rows = []
    for start, stop in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        ago = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
        visible = (ago >= 0) & ((ago <= left) if left >= 0 else True)
        q, k, v = (states[start:stop].transpose(0, 1) for states in (query, key, value))
        rows.append(
            torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=visible, scale=scale, enable_gqa=enable_gqa
            ).transpose(0, 1)
        )
    return torch.cat(rows)


@pytest.mark.parametrize("name", ["llama, tied", "qwen3", "mistral, window"])
def test_varlen_attention_is_told_rows_scale_and_window(name, monkeypatch):
    """Everything around PyTorch's CUDA kernel, with the kernel's definition in its place."""
    monkeypatch.setattr(fr_lightning.policy, "varlen_attn", reference_varlen_attn)
    model = build(name)
    expected = make_policy(model)(ROWS)
    policy = make_policy(model, attention="varlen")
    assert policy.packed
    torch.testing.assert_close(policy(ROWS), expected, rtol=0, atol=1e-10)
    unpacked = make_policy(model, attention="varlen", packed=False)
    whole = BATCH.pad([0, 3])  # of equal length: unpacked rows with padding would pass through the kernel as well
    torch.testing.assert_close(unpacked(whole).logprobs, expected.logprobs[[0, 3]], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["llama, tied", "llama, untied"])
def test_published_parameters_rebuild_the_model(name):
    model = build(name)
    policy = make_policy(model, activation_checkpointing=True)
    published = dict(policy.named_published_parameters())
    assert len(published) == len({tensor.data_ptr() for tensor in published.values()})
    assert ("lm_head.weight" in published) == (name == "llama, untied")
    other = build(name, seed=1)
    missing, unexpected = other.load_state_dict(published, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    torch.testing.assert_close(make_policy(other)(ROWS).logprobs, policy(ROWS).logprobs)


def test_loads_by_name(tmp_path):
    build().float().save_pretrained(tmp_path)
    policy = Policy(PolicyConfig(name=str(tmp_path), dtype="bfloat16"))
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}
    expected, _ = reference(build(), ROWS)
    assert (policy(ROWS).logprobs - expected).abs().max() < 0.3


def test_a_policy_on_meta_waits_for_its_weights():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(MODELS["llama, untied"])
    policy = make_policy(model.double())
    assert all(parameter.is_meta for parameter in policy.parameters())
    policy.to_empty(device="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"dtype": "int8"}, "dtype"), ({"attention": "magic"}, "attention"), ({"chunk_tokens": 0}, "chunk_tokens")],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PolicyConfig(**options)


def sharded_rank(rank, folder):
    """One of two FSDP2 ranks: its half of the rows, activation checkpointing on; leaves its gathered gradients."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    policy = make_policy(build(), activation_checkpointing=True)
    for layer in policy.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    rows = BATCH.pad([2 * rank, 2 * rank + 1])
    policy(rows).logprobs.sum().backward()
    published = {}
    for name, parameter in policy.named_published_parameters():
        assert isinstance(parameter.grad, DTensor)
        published[name] = parameter.grad.full_tensor()
    torch.save(published, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_sharded_gradients_are_the_whole_models(tmp_path):
    spawn(sharded_rank, (str(tmp_path),), nprocs=2)
    model = build()
    make_policy(model)(ROWS).logprobs.sum().backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found.keys() == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():  # FSDP averages over ranks
            torch.testing.assert_close(found[name] * 2, parameter.grad, rtol=1e-10, atol=1e-10)

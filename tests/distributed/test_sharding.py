"""A policy that is sharded before it has weights is the policy that one process loads, adapters included."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

from fr_lightning import sharding
from fr_lightning.lora import Lora, merged
from fr_lightning.parallel import FSDP2
from fr_lightning.policy import Policy, PolicyConfig
from fr_lightning.weights import whole_tensors
from tests.test_policy import BATCH, MODELS, VOCABULARY

MOE = transformers.Qwen3MoeConfig(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
)  # fmt: skip
CASES = {  # with an odd vocabulary, ranks have different shares; experts are fused, so that files and model differ
    "tied": (MODELS["qwen3"], None),
    "untied": (MODELS["llama, untied"], None),
    "experts": (MOE, None),
    "adapters": (MODELS["llama, tied"], Lora(rank=3, alpha=6.0)),
}


def folder_of(case, root):
    torch.manual_seed(0)
    config = copy.deepcopy(CASES[case][0])
    config.vocab_size, config.tie_word_embeddings = VOCABULARY + 1, case == "tied"
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(root / case)
    return str(root / case)


def settings(case, folder):
    dtype = "float32" if case == "experts" else "float64"  # grouped matrix products know no float64
    return PolicyConfig(name=folder, dtype=dtype, lora=CASES[case][1])


def step(policy, rows):
    """One of plain SGD with learning rate 1, on all log-probs."""
    policy(rows).logprobs.sum().backward()
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad


def published(policy):
    lora = policy.config.lora
    whole = whole_tensors(policy.named_published_parameters())
    return dict(whole if lora is None else merged(whole, lora.scale))


def no_whole_model(*args, **options):
    raise AssertionError("loaded the whole model")


def one_rank(rank, folders, output):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{output}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    found = {}
    load = sharding.load_causal_lm
    for offload in (False, True):
        for case, folder in folders.items():
            sharding.load_causal_lm = load if (case, rank) == ("experts", 0) else no_whole_model
            torch.manual_seed(1)
            policy = sharding.sharded_policy(settings(case, folder), mesh, offload=offload)
            assert all(isinstance(parameter, DTensor) for parameter in policy.parameters())
            rows = BATCH.pad([0, 1, 2, 3])
            with torch.no_grad():
                logprobs = policy(rows).logprobs
            policy.reshard()
            step(policy, rows)
            found[case, offload] = (logprobs, published(policy))
    torch.save(found, f"{output}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {case: folder_of(case, tmp_path_factory.mktemp("models")) for case in CASES}


def test_logprobs_and_an_update_are_those_of_one_process(folders, tmp_path):
    spawn(one_rank, (folders, str(tmp_path)), nprocs=2)
    for case, folder in folders.items():
        torch.manual_seed(1)
        policy = Policy(settings(case, folder))
        rows = BATCH.pad([0, 1, 2, 3])
        tolerance = {"rtol": 0, "atol": 1e-5 if case == "experts" else 1e-10}
        logprobs = policy(rows).logprobs.detach()
        step(policy, rows)
        expected = published(policy)
        for rank in range(2):
            for offload in (False, True):
                found, weights = torch.load(tmp_path / f"{rank}.pt", weights_only=True)[case, offload]
                torch.testing.assert_close(found, logprobs, **tolerance)
                assert weights.keys() == expected.keys()
                for name, weight in weights.items():
                    torch.testing.assert_close(weight, expected[name].detach(), **tolerance)


@pytest.mark.parametrize(
    ("case", "size", "reason"),
    [
        ("tied", 3, r"tensor_parallel_size 3: the model's num_attention_heads is 4"),
        ("untied", 4, r"num_key_value_heads is 2, not a multiple"),
        ("experts", 2, r"Qwen3MoeForCausalLM cannot be split so \(\['moe_tp_experts', 'packed_colwise'\]\)"),
        ("adapters", 2, r"adapters \(model\.policy\.lora\) are not split"),
    ],
)
def test_layers_that_a_team_cannot_share_are_refused(folders, case, size, reason):
    policy = Policy(settings(case, folders[case]))
    team = SimpleNamespace(size=lambda: size)
    with pytest.raises(ValueError, match=reason):
        sharding.split_layers(policy, team)


def test_a_team_lies_on_one_node():
    strategy = FSDP2(tensor_parallel_size=2)
    strategy.parallel_devices = [torch.device("cpu")] * 3
    with pytest.raises(ValueError, match=r"trainer\.devices 3 must be a multiple of .*tensor_parallel_size 2"):
        strategy.setup_environment()

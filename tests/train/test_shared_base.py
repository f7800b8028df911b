"""`lora.share_base`: engine and learner read one copy of the base, and train as they do with two."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from agent_r1.build.engine import build_engine
from agent_r1.build.learner import build_learner, lora_settings
from agent_r1.build.models.load import load_model
from agent_r1.build.plan import build_algorithm
from agent_r1.build.start import base_model
from agent_r1.engines.base import Engine, Prompt, Sampling
from agent_r1.engines.local.gpu import torch_kernels
from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.engines.local.weights import LowRank, adopt_weights, cast_weights, sharing_copy
from agent_r1.errors import DataError
from agent_r1.learn.learner import Learner
from agent_r1.learn.memory import fixed_bytes, size_of
from agent_r1.learn.model.lora import LoRA
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.types import CreditedTrajectory, Step, StopReason, Trajectory
from tests.learn.builders import critic_of, learner_for, tiny_model
from tests.train.test_pipeline import mini

pytest.importorskip("peft")
PROMPT = [5, 9, 2, 7, 3]


def lora(**changes: Any) -> LoRA:
    shared = {"share_base": True, "merges": False}
    return LoRA(**({"rank": 3, "alpha": 6.0, "target_modules": None, "seed": 0} | shared | changes))


def shared_pair(family: str = "llama", *, dtype: torch.dtype = torch.float32, kernels: Any = None) -> Any:
    """(engine, its network, policy) over one base."""
    settings, model = lora(), cast_weights(tiny_model(family), dtype)
    network = sharing_copy(model)
    network.set_attn_implementation("eager")
    engine = LocalEngine(
        network,
        seed=0,
        max_running=4,
        max_batch_tokens=64,
        max_cached_tokens=512,
        burst=4,
        block_size=16,
        kernels=kernels,
        compile_layers=False,
        adapters=LowRank(names=settings.layers_of(network), rank=settings.rank, scale=settings.scale),
    )
    adopt_weights(model, network)
    autocast = None if dtype == torch.float32 else dtype
    return engine, network, PolicyModel(model, lora=settings, autocast_dtype=autocast)


def sample(engine: Engine, tokens: int = 8) -> Any:
    return asyncio.run(engine.generate(Prompt(PROMPT), Sampling(max_tokens=tokens, seed=1), session="a"))


def trajectory(completion: Any) -> CreditedTrajectory:
    step = Step(prompt_ids=PROMPT, response_ids=completion.token_ids, response_logprobs=completion.logprobs)
    played = Trajectory(row_id="r", trajectory_id="t", steps=[step], stop=StopReason.ANSWERED)
    signs = [1.0 if index % 2 else -0.5 for index in range(len(completion.token_ids))]
    return CreditedTrajectory(trajectory=played, advantages=[signs])


def sampled_difference(learner: Learner, engine: LocalEngine) -> tuple[float, CreditedTrajectory]:
    """How far the learner's log-probs are from the engine's, on what the engine samples."""
    credited = trajectory(sample(engine))
    batch = learner._prepare([credited], [0])
    with torch.no_grad():
        logprobs_T = learner.policy.logprobs(batch.packs[0], temperature=1.0)[0]
    expected = torch.tensor(credited.trajectory.steps[0].response_logprobs)
    return (logprobs_T - expected).abs().max().item(), credited


@pytest.mark.parametrize("kernels", [None, torch_kernels], ids=["cpu", "as on a GPU"])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2"])
def test_the_base_exists_once_and_both_sides_agree_while_it_is_trained(family: str, kernels: Any) -> None:
    engine, network, policy = shared_pair(family, kernels=kernels)
    own = dict(network.named_parameters())
    for name, parameter in policy.model.named_parameters():
        if "lora_" not in name:
            assert parameter.data_ptr() == own[name.replace(".base_layer", "")].data_ptr(), name
            assert not parameter.requires_grad
    before = {name: tensor.clone() for name, tensor in own.items() if "lora_" not in name}
    learner = learner_for("reinforce", policy, lr=5e-2)
    for version in range(1, 4):
        difference, credited = sampled_difference(learner, engine)
        assert difference < 1e-5
        learner.update([credited])
        asyncio.run(engine.load_weights(learner.weights().items(), version))
    moved = dict(policy.weights())  # merged, for a checkpoint
    assert any((moved[name] - tensor).abs().max() > 1e-3 for name, tensor in before.items())
    for name, tensor in before.items():
        torch.testing.assert_close(own[name], tensor, rtol=0, atol=0)
    asyncio.run(engine.close())


def test_in_bfloat16_both_sides_agree_as_closely_as_its_rounding_allows() -> None:
    engine, network, policy = shared_pair(dtype=torch.bfloat16)
    assert {p.dtype for name, p in policy.model.named_parameters() if "lora_" not in name} == {torch.bfloat16}
    assert {p.dtype for name, p in policy.model.named_parameters() if "lora_" in name} == {torch.float32}
    learner = learner_for("reinforce", policy, lr=5e-2)
    for version in range(1, 3):
        difference, credited = sampled_difference(learner, engine)
        assert difference < 0.15  # processors round differently: up to 0.06 was seen
        learner.update([credited])
        stale, _ = sampled_difference(learner, engine)
        assert stale > 1.0  # what the learner's adapters change before the engine has them
        asyncio.run(engine.load_weights(learner.weights().items(), version))
    sizes = fixed_bytes(learner)
    base = size_of(p for name, p in network.named_parameters() if "lora_" not in name)
    assert sizes["weights"] == base + sizes["gradients"]  # the base in 2 bytes, adapters in 4
    asyncio.run(engine.close())


def test_training_gives_the_same_weights_as_with_two_copies() -> None:
    trained = []
    for share in (True, False):
        config = mini(
            "lora.rank=4", f"lora.share_base={str(share).lower()}", "algorithm.name=reinforce", "learner.lr=0.01"
        )
        model, algorithm = load_model(config, base_model(config)), build_algorithm(config)
        engine = build_engine(config, model, adapters=lora_settings(config) if share else None)
        learner = build_learner(config, model, algorithm, None)
        for version in range(1, 4):
            learner.update([trajectory(sample(engine))])
            asyncio.run(engine.load_weights(learner.weights().items(), version))
        trained.append((sample(engine).token_ids, dict(learner.policy.weights())))
        asyncio.run(engine.close())
    (ids, weights), (plain_ids, plain_weights) = trained
    assert ids == plain_ids
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, plain_weights[name], rtol=0, atol=1e-5, msg=name)


def test_a_critic_with_adapters_of_its_own_shares_the_base_too() -> None:
    _, _, policy = shared_pair()
    critic = critic_of(policy, shared=False)
    theirs = {p.data_ptr() for p in critic.backbone.model.parameters() if not p.requires_grad}
    assert theirs == {p.data_ptr() for p in policy.model.parameters() if not p.requires_grad}
    assert not {p.data_ptr() for p in critic.parameters} & {p.data_ptr() for p in policy.model.parameters()}


def test_an_engine_refuses_to_overwrite_a_base_it_shares() -> None:
    engine, _, policy = shared_pair()
    with pytest.raises(DataError, match="shared with the learner"):
        asyncio.run(engine.load_weights(policy.weights().items(), 1))
    with pytest.raises(DataError, match="are missing"):
        asyncio.run(engine.load_weights(list(policy.sampler_weights().items())[:1], 1))
    asyncio.run(engine.close())


def test_the_engine_adapts_the_layers_that_peft_adapts() -> None:
    for targets in (None, ("q_proj", "mlp.down_proj")):
        model = tiny_model()
        names = lora(target_modules=targets).layers_of(model)
        policy = PolicyModel(model, lora=lora(target_modules=targets))
        assert {f"{name}.lora_A" for name in names} <= policy.sampler_weights().keys()
        assert len(policy.sampler_weights()) == 2 * len(names) > 0

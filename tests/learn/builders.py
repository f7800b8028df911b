"""Small models and trajectories for the tests of what learns."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agent_r1.types import CreditedTrajectory, Group, Step, StopReason, TaskRow, Trajectory

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)  # tiny matrices: a second thread only waits

VOCABULARY = 32


def tiny_model(family: str = "llama", *, seed: int = 0, **overrides: Any) -> Any:
    """A two-layer model with random weights, large enough that log-probs differ clearly between tokens."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 8192,
    } | overrides
    classes: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (LlamaConfig, LlamaForCausalLM, {}),
        "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
        "qwen2-sliding": (
            Qwen2Config,
            Qwen2ForCausalLM,
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        ),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True}),
        "gemma3": (
            Gemma3TextConfig,
            Gemma3ForCausalLM,
            {
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention"],
                "final_logit_softcapping": 3.0,
                "query_pre_attn_scalar": 8,
            },
        ),
    }
    config_class, model_class, extra = classes[family]
    model = model_class(config_class(**(extra | settings)))
    randomise(model, seed)
    return model


def randomise(model: Any, seed: int) -> None:
    """Weights that depend on the seed alone, not on how a transformers version initialises."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            # Norm weights stay near 1; matrices are large enough to give distributions far from uniform.
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else 0.3 * noise)


def step(prompt: Iterable[int], response: Iterable[int], logprobs: Iterable[float] | None = None) -> Step:
    response = list(response)
    return Step(
        prompt_ids=list(prompt),
        response_ids=response,
        response_logprobs=[-1.0] * len(response) if logprobs is None else list(logprobs),
    )


def trajectory(
    *steps: Step, reward: float = 0.0, name: str = "t", stop: StopReason = StopReason.ANSWERED
) -> Trajectory:
    return Trajectory(row_id="row", trajectory_id=name, steps=list(steps), stop=stop, outcome_reward=reward)


def group(*trajectories: Trajectory) -> Group:
    return Group(row=TaskRow(prompt=[]), trajectories=list(trajectories))


def random_trajectory(rng: random.Random, *, kind: str, name: str, num_steps: int | None = None) -> Trajectory:
    """`append`: each prompt extends what came before; `broken`: each prompt is new; `mixed`: a coin per step."""

    def ids(low: int, high: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))]

    steps: list[Step] = []
    context = ids(1, 4)
    for _ in range(num_steps or rng.randint(1, 4)):
        response = ids(0, 4) if steps else ids(1, 4)
        steps.append(step(context, response, [rng.uniform(-5.0, -1.0) for _ in response]))
        extends = kind == "append" or (kind == "mixed" and rng.random() < 0.5)
        context = context + response + ids(0, 3) if extends else ids(1, 6)
    return trajectory(*steps, name=name)


def random_credited(rng: random.Random, *, kind: str, count: int) -> list[CreditedTrajectory]:
    result = []
    for index in range(count):
        attempt = random_trajectory(rng, kind=kind, name=f"t{index}")
        advantages = [[rng.uniform(-2.0, 2.0) for _ in s.response_ids] for s in attempt.steps]
        result.append(CreditedTrajectory(trajectory=attempt, advantages=advantages))
    return result

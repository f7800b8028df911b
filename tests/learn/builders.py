"""Small models and trajectories for the tests of what learns."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

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

from agent_r1.learn.algorithms import get_algorithm
from agent_r1.learn.batch.minibatch import Share
from agent_r1.learn.batch.packs import Pack, merge_steps, pack, step_sizes
from agent_r1.learn.credit import assign_credit, attempts_of, trainable
from agent_r1.learn.learner import Learner
from agent_r1.learn.losses import Correction
from agent_r1.learn.model.critic import Critic
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.learn.model.sharding import whole
from agent_r1.learn.rewards import KLInReward
from agent_r1.ranks.crew import OneProcess
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


# Groups and learners for any row of the table of algorithms.


def random_groups(rng: random.Random, *, rows: int = 2, size: int = 3, kind: str = "mixed") -> list[Group]:
    """Attempts from one prompt, with process rewards on some steps, some truncated, and a greedy one beside them."""

    def attempt(name: str, prompt: list[int]) -> Trajectory:
        made = random_trajectory(rng, kind=kind, name=name)
        drawn = made.steps[0].prompt_ids
        steps = [
            replace(
                s,
                prompt_ids=prompt + s.prompt_ids[len(drawn) :] if s.prompt_ids[: len(drawn)] == drawn else s.prompt_ids,
                reward=rng.choice([0.0, 0.0, 0.25, -0.5]),
            )
            for s in made.steps
        ]
        stop = rng.choice([StopReason.ANSWERED, StopReason.ANSWERED, StopReason.MAX_STEPS, StopReason.MAX_TOKENS])
        last = steps[-1]
        seen = [*last.prompt_ids, *last.response_ids, rng.randrange(VOCABULARY)]
        return replace(
            made,
            steps=steps,
            stop=stop,
            outcome_reward=rng.choice([0.0, 1.0]),
            next_prompt_ids=seen if stop is StopReason.MAX_STEPS else [],
        )

    prompts = [[rng.randrange(VOCABULARY) for _ in range(3)] for _ in range(rows)]
    return [
        replace(group(*(attempt(f"r{row}t{i}", prompt) for i in range(size))), greedy=attempt(f"r{row}greedy", prompt))
        for row, prompt in enumerate(prompts)
    ]


def on_packs(packs: list[Pack], model: Callable[[Pack], torch.Tensor], like_R: torch.Tensor) -> torch.Tensor:
    return Share(packs=packs, fillers=[], ranks=OneProcess()).column(model, like_R)


def on_policy(groups: list[Group], policy: PolicyModel, rng: random.Random, *, noise: float) -> list[Group]:
    """The same attempts as if (almost) this policy had sampled them: its own log-probs plus some noise."""
    attempts = [trajectory for each in groups for trajectory in each.trajectories]
    packs = pack(merge_steps(attempts), 10_000)
    with torch.no_grad():
        logprobs_R = on_packs(packs, lambda p: policy.logprobs(p, temperature=1.0)[0], step_sizes(attempts))
    numbers = iter(logprobs_R.tolist())

    def heard(made: Step) -> Step:
        return replace(made, response_logprobs=[next(numbers) + rng.gauss(0, noise) for _ in made.response_ids])

    return [
        replace(each, trajectories=[replace(t, steps=[heard(s) for s in t.steps]) for t in each.trajectories])
        for each in groups
    ]


def learner_for(name: str, policy: PolicyModel | None = None, *, shared: bool = False, **overrides: Any) -> Learner:
    """A learner for one row of the table, with the critic it needs."""
    algorithm, policy = get_algorithm(name), policy or PolicyModel(tiny_model("llama-tied"))
    settings: dict[str, Any] = {
        "loss": algorithm.loss,
        "lr": 1e-3,
        "temperature": 1.0,
        "betas": (0.9, 0.999),
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "max_tokens_per_pack": 64,
        "max_nonfinite_updates": 3,
        "kl_estimator": "k3",
        "critic": critic_of(policy, shared=shared) if algorithm.needs_critic else None,
    }
    return Learner(policy, **(settings | overrides))


def new_critic(policy: PolicyModel, *, shared: bool, **overrides: Any) -> Critic:
    """A critic as it begins: it says 0 everywhere."""
    settings: dict[str, Any] = {"lr": 1e-3, "value_clip": None, "value_coef": 1.0, "warmup_updates": 0}
    return Critic(policy=policy, shared=shared, **(settings | overrides))


def critic_of(policy: PolicyModel, *, shared: bool, seed: int = 5, **overrides: Any) -> Critic:
    """A critic whose head says something, so that values differ between states."""
    made = new_critic(policy, shared=shared, **({"value_clip": 0.5} | overrides))
    head, generator = made.head, torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.weight.copy_(0.1 * torch.randn(head.weight.shape, generator=generator))
        head.bias.fill_(0.05)
    return made


def correction(kind: Literal["truncate", "reject"], **overrides: Any) -> Correction:
    settings: dict[str, Any] = {"level": "token", "cap": 2.0, "floor": 0.0}
    return Correction(kind=kind, **(settings | overrides))


def steady_kl(coef: float) -> KLInReward:
    """A KL in the reward whose coefficient stays."""
    return KLInReward(coef=coef, target=None, horizon=1)


def credit_for(name: str, groups: list[Group], learner: Learner) -> list[CreditedTrajectory]:
    algorithm = get_algorithm(name)
    values = learner.values(attempts_of(trainable(groups, algorithm))) if algorithm.needs_critic else None
    return assign_credit(groups, algorithm, values=values)


def gradients_of(learner: Learner) -> dict[str, torch.Tensor]:
    """Of the last optimizer step: of the policy by name, of the critic under `critic.`."""
    named = dict(learner.policy.model.named_parameters())
    if learner.critic is not None:
        critic = learner.critic
        named |= {f"critic.head.{name}": p for name, p in critic.head.named_parameters()}
        if not critic.shared:
            named |= {f"critic.body.{name}": p for name, p in critic.backbone.model.named_parameters()}
    return {name: whole(p.grad).clone() for name, p in named.items() if p.grad is not None}

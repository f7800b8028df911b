"""Bugs that others published, as tests of this project. Each docstring says what went wrong, and where."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from agent_r1.learn.algorithms import ALGORITHMS, Algorithm, get_algorithm
from agent_r1.learn.batch.packs import merge_steps
from agent_r1.learn.credit import assign_credit
from agent_r1.learn.losses import Counts, LossInputs
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.learn.rewards import RewardShaper
from agent_r1.types import CreditedTrajectory, Group, PerToken, Trajectory
from tests.learn.builders import (
    credit_for,
    gradients_of,
    group,
    learner_for,
    random_groups,
    steady_kl,
    step,
    tiny_model,
    trajectory,
)
from tests.learn.episodes import call, critic, episode, flat

ROWS = list(ALGORITHMS.values())
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def with_critic(row: Algorithm, *groups: Group) -> list[CreditedTrajectory]:
    """Credit with a critic that says 0 everywhere, for rows that want one; and a greedy attempt worth 0.5."""
    said = [[[0.0] * len(s.response_ids) for s in t.steps] for g in groups for t in g.trajectories]
    played = [replace(each, greedy=episode([1], 0.5)) for each in groups]
    return assign_credit(played, row, values=critic(*said) if row.needs_critic else None)


def loss_inputs(
    log_ratios: list[float], advantages: list[float], *, steps: list[int], trajectories: list[int]
) -> LossInputs:
    """Tokens with these log-ratios, in these steps and trajectories; `logprobs_T` carries the gradient."""

    def sizes(numbers: list[int]) -> torch.Tensor:
        return torch.tensor([float(numbers.count(n)) for n in numbers])

    return LossInputs(
        logprobs_T=torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True),
        old_logprobs_T=torch.zeros(len(log_ratios), dtype=torch.float64),
        advantages_T=torch.tensor(advantages, dtype=torch.float64),
        importance_T=torch.ones(len(log_ratios), dtype=torch.float64),
        step_ids_T=torch.tensor(steps),
        step_sizes_T=sizes(steps),
        trajectory_sizes_T=sizes(trajectories),
        counts=Counts(tokens=len(steps), steps=len(set(steps)), trajectories=len(set(trajectories))),
    )


def gradient(row: Algorithm, inputs: LossInputs) -> list[float]:
    row.loss(inputs).loss.backward()
    assert inputs.logprobs_T.grad is not None
    numbers: list[float] = inputs.logprobs_T.grad.tolist()
    return numbers


# The published Agent-R1.


def test_agent_r1_a_step_without_reward_is_paid_the_outcome() -> None:
    """AgentR1/Agent-R1, ToolEnv: reward None means "score this step like an answer", so an episode is paid once for
    every step that happens to look right, and dithering pays."""
    dithering, prompt = episode([2, 2, 2, 2], 1.0), episode([2], 1.0)
    (long, short) = RewardShaper()([dithering, prompt])
    assert sum(flat(long)) == sum(flat(short)) == 1.0
    credited = assign_credit([group(dithering, prompt)], get_algorithm("grpo"))
    assert {a for item in credited for a in flat(item.advantages)} == {0.0}


def test_agent_r1_gspo_and_vanilla_losses_train_the_same_thing() -> None:
    """AgentR1/Agent-R1 since #98: one mini-batch and one epoch make every ratio 1, where the two losses are equal. Off
    policy they must differ."""
    gspo = get_algorithm("gspo", clip_low=0.2, clip_high=0.2, aggregation="token")
    vanilla = get_algorithm("grpo")

    def gradients(ratios: list[float]) -> list[list[float]]:
        shape = {"steps": [0, 0], "trajectories": [0, 0]}
        return [
            gradient(row, loss_inputs([math.log(r) for r in ratios], [1.0, 1.0], **shape)) for row in (gspo, vanilla)
        ]

    on_policy, off_policy = gradients([1.0, 1.0]), gradients([2.0, 0.5])
    assert on_policy[0] == pytest.approx(on_policy[1])
    # vanilla clips 2 and keeps 0.5 of each token's own; GSPO's geometric mean is 1 for both
    assert off_policy == [pytest.approx([-0.5, -0.5]), pytest.approx([0.0, -0.25])]


def test_agent_r1_88_padding_rows_bias_losses_and_critic() -> None:
    """AgentR1/Agent-R1#88: duplicated rows that filled up a batch stood in denominators, and the critic was taught that
    they are worth 0. Here nothing is filled up: steps without tokens change neither gradient nor value targets."""
    plain = random_groups(random.Random(3), kind="append")

    def padded(one: Trajectory) -> Trajectory:
        return replace(one, steps=[s for each in one.steps for s in (each, step(each.prompt_ids, []))])

    stuffed = [replace(each, trajectories=[padded(t) for t in each.trajectories]) for each in plain]
    results = []
    for groups in (plain, stuffed):
        learner = learner_for("steppo", PolicyModel(tiny_model()))
        credited = credit_for("steppo", groups, learner)
        metrics = learner.update(credited)
        targets = [target for item in credited for target in flat(item.value_targets or []) if target is not None]
        results.append((gradients_of(learner), metrics["loss"], metrics["value_loss"], targets))
    (gradients, loss, value_loss, targets), (others, other_loss, other_value_loss, other_targets) = results
    assert (loss, value_loss) == pytest.approx((other_loss, other_value_loss), rel=1e-5)
    assert targets == pytest.approx(other_targets, abs=1e-6)
    for name, tensor in gradients.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-4, atol=1e-6)


def test_agent_r1_30_an_inserted_token_explodes_the_ratio() -> None:
    """AgentR1/Agent-R1#30: a token that was never sampled was trained on; its ratio overflowed and training collapsed
    into NaN. Tool text is no response token here, and no ratio can overflow a loss."""
    talk = trajectory(step([1, 2], [3, 4]), step([1, 2, 3, 4, 90, 91], [5]))
    (segment,) = merge_steps([talk])
    assert [segment.token_ids[position] for position in segment.trained] == [3, 4, 5]
    for row in ROWS:
        inputs = loss_inputs([1000.0, -1000.0], [-1.0, 1.0], steps=[0, 1], trajectories=[0, 0])
        assert all(map(math.isfinite, gradient(row, inputs)))


def test_agent_r1_56_process_rewards_are_dead_code() -> None:
    """AgentR1/Agent-R1#56: rewards of tool calls were computed, and the call that added them was commented out."""
    paid = trajectory(replace(step([1], [5, 6, 7]), reward=0.25, calls=(call(0.25, (0, 2)),)))
    for row in ROWS:
        first, _ = with_critic(row, group(paid, episode([3], 0.0)))
        assert any(flat(first.advantages)), row.name


@every_row
def test_agent_r1_an_algorithm_trains_on_zeros_without_a_word(row: Algorithm) -> None:
    """AgentR1/Agent-R1, ray_trainer.py: advantages start as zeros and an `if` without an `else` fills them in, so some
    algorithms of the list train nothing."""
    credited = with_critic(row, group(episode([2, 1], 1.0), episode([2], 0.0), episode([1, 1], 0.0)))
    assert len(credited) == 3
    for item in credited:
        assert all(a != 0.0 for a in flat(item.advantages))
    won, lost = flat(credited[0].advantages), flat(credited[1].advantages)
    assert min(won) > max(lost)


# Peers.


@every_row
def test_skyrl_1492_only_the_last_step_has_an_advantage(row: Algorithm) -> None:
    """NovaSky-AI/SkyRL#1492: advantages were copied with the last step's mask; the other steps got 0."""
    long = episode([3, 1, 4, 2], 1.0)
    credited = with_critic(row, group(long, episode([2], 0.0), episode([5, 2], 0.0)))
    assert [[a != 0.0 for a in numbers] for numbers in credited[0].advantages] == [[True] * n for n in (3, 1, 4, 2)]


def test_slime_1370_the_kl_of_tool_text_enters_the_return() -> None:
    """THUDM/slime#1370: log-ratios of tool tokens were added up in REINFORCE++ returns. Here a log-ratio exists for
    sampled tokens alone."""
    policy = PolicyModel(tiny_model())
    learner = learner_for("reinforce++", policy, reference=PolicyModel(tiny_model(seed=9)))
    talk = trajectory(step([1, 2], [3, 4]), step([1, 2, 3, 4, 20, 21, 22, 23], [5]), reward=1.0)
    (ratios,) = learner.kl_to_reference([talk])
    assert [len(numbers) for numbers in ratios] == [2, 1]

    def rewards(kl: PerToken) -> list[PerToken]:
        return RewardShaper(kl=steady_kl(0.5))([talk], [kl])

    assert sum(flat(rewards(ratios)[0])) == pytest.approx(1.0 - 0.5 * sum(flat(ratios)))
    with pytest.raises(ValueError, match="zip"):
        rewards([ratios[0], [*ratios[1], 0.0]])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "cispo", "dapo", "rloo", "remax"])
def test_verl_7244_taking_another_turn_is_paid_by_the_baseline(name: str) -> None:
    """volcengine/verl#7244: normalising per turn index makes the baseline depend on when an attempt itself stopped, a
    hidden bonus on going on. Here a turn that earns nothing changes nobody's advantage."""
    row = get_algorithm(name)

    def credit(turns: list[int]) -> list[float]:
        attempts = group(episode([2], 1.0), episode(turns, 0.5), episode([1, 1], 0.0))
        return [flat(item.advantages)[0] for item in with_critic(row, attempts)]

    assert credit([2]) == credit([2, 3, 1])

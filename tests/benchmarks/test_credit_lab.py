"""The lab's exact answers are right, play and estimates agree with them, and the page shows the results."""

from __future__ import annotations

import json
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch

from agent_r1.learn.algorithms import ALGORITHMS, get_algorithm
from agent_r1.learn.rewards import is_uniform
from agent_r1.types import StopReason
from benchmarks.credit_lab import report
from benchmarks.credit_lab.__main__ import arguments
from benchmarks.credit_lab.estimate import Gradients, credit, estimate_gradients, judge, shaper_for
from benchmarks.credit_lab.exact import best_return, exact_values, expected_gradient, expected_return, half_trained
from benchmarks.credit_lab.measure import Plan, interval, measure, quick, student_t
from benchmarks.credit_lab.picture import draw
from benchmarks.credit_lab.play import EPISODES_PER_ROW, FIRST_STATE, ROWS_PER_BATCH, Player, initial_policy
from benchmarks.credit_lab.train import EXACT, Curve, Run, train
from benchmarks.credit_lab.variants import VARIANTS, LearnedCritic, oracle, variants_for
from benchmarks.credit_lab.worlds import WORLDS
from benchmarks.machine import RESULTS

worlds = pytest.mark.parametrize("name", WORLDS)


@worlds
def test_played_returns_have_the_expected_return_as_their_mean(name: str) -> None:
    world = WORLDS[name]
    policy_PA = initial_policy(world)
    player = Player(world=world, seed=3)
    groups = chain.from_iterable(player.batch(policy_PA, get_algorithm("grpo")) for _ in range(30))
    returns = torch.tensor([t.total_reward for group in groups for t in group.trajectories], dtype=torch.float64)
    error = float(returns.std()) / len(returns) ** 0.5
    assert abs(float(returns.mean()) - float(expected_return(world, policy_PA))) < 4 * error


@worlds
def test_the_exact_gradient_is_the_slope_of_the_expected_return(name: str) -> None:
    world = WORLDS[name]
    policy_PA = half_trained(world, initial_policy(world))
    gradient_PA = expected_gradient(world, policy_PA)
    direction_PA = torch.randn(policy_PA.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    step_PA = 1e-5 * direction_PA
    slope = (expected_return(world, policy_PA + step_PA) - expected_return(world, policy_PA - step_PA)) / 2e-5
    torch.testing.assert_close(slope, (gradient_PA * direction_PA).sum(), rtol=1e-6, atol=1e-9)


@worlds
def test_style_does_not_matter_and_there_is_something_to_gain(name: str) -> None:
    world = WORLDS[name]
    policy_PA = initial_policy(world)
    gradient_PA = expected_gradient(world, policy_PA)
    assert gradient_PA[world.num_states : -len(world.starts)].abs().max() == 0
    assert gradient_PA.norm() > 0.01
    assert best_return(world) > float(expected_return(world, policy_PA)) + 0.3


def test_the_decisive_step_is_the_fifth_and_no_other() -> None:
    world = WORLDS["decisive_step"]
    actions_TSA = exact_values(world, initial_policy(world)).actions_TSA
    spread_T = [float(actions_TSA[t, t].amax() - actions_TSA[t, t].amin()) for t in range(5)]
    assert spread_T == pytest.approx([0, 0, 0, 0, 1])  # in row 0, state t is the one before step t until it decides


# An estimator that should be unbiased is, and its scale is the one its formula says.


@pytest.mark.parametrize("name", ["misleading_reward", "stop_or_dither"])
def test_dr_grpo_estimates_the_exact_gradient_without_bias(name: str) -> None:
    # The group's mean contains the attempt itself: (8 - 1) / 8 of the gradient. The loss divides by the horizon of 256.
    world = WORLDS[name]
    found = estimate_gradients(world, VARIANTS["dr_grpo"], initial_policy(world), batches=200, critic_batches=0, seed=7)
    scaled_BD = found.estimates_BD * 256 * 8 / 7
    unit_D = found.exact_D / found.exact_D.norm()
    along_B = scaled_BD @ unit_D
    error = float(along_B.std()) / len(along_B) ** 0.5
    assert abs(float(along_B.mean()) - float(found.exact_D.norm())) < 4 * error
    assert error < 0.1 * float(found.exact_D.norm())


@pytest.mark.parametrize("variant", ["rloo", "reinforce unwhitened", "ppo oracle", "ppo oracle lam=0.9"])
def test_estimators_without_bias_point_along_the_exact_gradient(variant: str) -> None:
    world = WORLDS["misleading_reward"]
    quality = judge(
        estimate_gradients(world, VARIANTS[variant], initial_policy(world), batches=200, critic_batches=0, seed=11)
    )
    assert quality.cosine is not None
    assert quality.cosine_error is not None
    assert quality.cosine_error < 0.05
    assert abs(quality.cosine - 1) < 4 * quality.cosine_error


def test_dividing_by_the_standard_deviation_turns_the_gradient() -> None:
    world = WORLDS["stop_or_dither"]
    quality = judge(
        estimate_gradients(world, VARIANTS["grpo"], initial_policy(world), batches=150, critic_batches=0, seed=5)
    )
    assert quality.cosine is not None
    assert quality.cosine_error is not None
    assert quality.cosine + 3 * quality.cosine_error < 1


def test_cosine_and_noise_are_those_the_estimates_were_made_with() -> None:
    # Mean (1, 1) at 45 degrees to the exact (1, 0); noise of variance 4 in each of 2 dimensions: snr = sqrt(2 / 8).
    noise_BD = 2 * torch.randn(4000, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    quality = judge(
        Gradients(estimates_BD=1 + noise_BD, exact_D=torch.tensor([3.0, 0.0]).double(), episodes_per_batch=32)
    )
    assert quality.cosine == pytest.approx(0.5**0.5, abs=0.05)
    assert quality.cosine_error == pytest.approx(0.0158, rel=0.2)  # sqrt(4 / 4000) / sqrt 2 * sin 45
    assert quality.snr == pytest.approx(0.5, abs=0.03)


# GiGPO's home, and the same corridor without it.


def test_stamps_change_nothing_but_what_gigpo_can_compare() -> None:
    def gradients(world: str, variant: str) -> torch.Tensor:
        policy_PA = initial_policy(WORLDS[world])
        return estimate_gradients(
            WORLDS[world], VARIANTS[variant], policy_PA, batches=2, critic_batches=0, seed=1
        ).estimates_BD

    home, away = "revisited_states", "unique_states"
    assert torch.equal(gradients(home, "grpo"), gradients(away, "grpo"))
    torch.testing.assert_close(gradients(away, "gigpo by prompt"), gradients(away, "grpo"), rtol=0, atol=1e-12)
    assert not torch.allclose(gradients(home, "gigpo by prompt"), gradients(home, "grpo"))


# The player produces what a trainer would get.


def test_prompts_extend_the_history_and_truncated_episodes_have_a_next_state() -> None:
    world = WORLDS["stop_or_dither"]
    groups = Player(world=world, seed=0).batch(initial_policy(world), get_algorithm("grpo"))
    attempts = [t for group in groups for t in group.trajectories]
    assert {t.stop for t in attempts} == {StopReason.ANSWERED, StopReason.MAX_STEPS}
    assert {len(step.response_ids) for t in attempts for step in t.steps} == {2, 3}
    for trajectory in attempts:
        for before, after in pairwise(trajectory.steps):
            said = before.prompt_ids + before.response_ids
            assert after.prompt_ids[:-1] == said
            assert before.feedback == str(after.prompt_ids[-1])
        if trajectory.stop is StopReason.MAX_STEPS:
            assert len(trajectory.steps) == world.horizon
            assert trajectory.next_prompt_ids[-1] >= FIRST_STATE
        else:
            assert trajectory.next_prompt_ids == []


def test_a_greedy_attempt_costs_one_of_the_others_and_takes_the_likeliest_tokens() -> None:
    world = WORLDS["decisive_step"]
    policy_PA = half_trained(world, initial_policy(world))
    player = Player(world=world, seed=0)
    groups = player.batch(policy_PA, get_algorithm("remax"))
    assert player.episodes == ROWS_PER_BATCH * EPISODES_PER_ROW
    for group in groups:
        assert group.greedy is not None
        assert all(logprob > -1.0987 for step in group.greedy.steps for logprob in step.response_logprobs)  # > 1/3


def test_dynamic_sampling_continues_until_groups_differ() -> None:
    world = WORLDS["revisited_states"]  # hard rows often fail alike
    algorithm = get_algorithm("dapo")
    player = Player(world=world, seed=0)
    groups = player.batch(initial_policy(world), algorithm)
    assert any(map(is_uniform, groups))
    assert player.episodes == EPISODES_PER_ROW * len(groups) > ROWS_PER_BATCH * EPISODES_PER_ROW
    credited = credit(groups, algorithm, shaper=shaper_for(algorithm), values=None)
    varied = sum(not is_uniform(group) for group in groups)
    assert len(credited) == EPISODES_PER_ROW * min(varied, ROWS_PER_BATCH)


# Critics.


def test_a_learned_critic_approaches_the_exact_values() -> None:
    world = WORLDS["misleading_reward"]
    policy_PA, algorithm = initial_policy(world), get_algorithm("steppo")
    critic, player = LearnedCritic(world), Player(world=world, seed=0)
    for _ in range(60):
        groups = player.batch(policy_PA, algorithm)
        critic.fit(credit(groups, algorithm, shaper=shaper_for(algorithm), values=critic.values))
    firsts = list(world.starts)
    expected = exact_values(world, policy_PA).states_TS[0, firsts]
    torch.testing.assert_close(critic.table_X.detach()[firsts], expected, rtol=0, atol=0.1)


def test_the_oracle_knows_the_decision_after_it_was_taken() -> None:
    world = WORLDS["misleading_reward"]
    policy_PA = initial_policy(world)
    trajectory = Player(world=world, seed=0).batch(policy_PA, get_algorithm("grpo"))[0].trajectories[0]
    rows = oracle(world, policy_PA)([trajectory])[0].per_token
    values = exact_values(world, policy_PA)
    step = trajectory.steps[0]
    state = step.prompt_ids[-1] - FIRST_STATE
    assert rows[0][0] == float(values.states_TS[0, state])
    assert rows[0][1] == float(values.actions_TSA[0, state, step.response_ids[0]])


# Learning.


@worlds
def test_the_exact_gradient_learns_every_world(name: str) -> None:
    curve = train(Run(world=name, variant=EXACT, lr=0.2, seed=0, episodes=80 * 32))
    assert curve.gained[-1] > (0.5 if name == "misleading_reward" else 0.95)  # even that one falls for the lure


def test_learning_depends_only_on_its_seed_and_improves_the_policy() -> None:
    run = Run(world="decisive_step", variant="rloo", lr=0.2, seed=0, episodes=15 * 32)
    first, second = train(run), train(run)
    assert first == second
    assert first.gained[-1] > 0.5


def test_a_curve_is_read_at_the_last_update_before() -> None:
    assert Curve(episodes=[0, 32, 96], gained=[0.0, 0.5, 1.0]).at([0, 31, 32, 95, 200]) == [0.0, 0.0, 0.5, 0.5, 1.0]


# Sums, tables, picture, command.


def test_confidence_intervals_by_hand() -> None:
    assert student_t(4) == pytest.approx(2.776, rel=0.01)  # from the table
    assert student_t(11) == pytest.approx(2.201, rel=0.001)
    # mean 2, standard deviation sqrt(2.5) = 1.581, over sqrt 5 = 0.707, times 2.776
    assert interval([0, 1, 2, 3, 4]) == pytest.approx((2, 1.963), rel=0.01)


def test_every_algorithm_is_measured_in_every_world() -> None:
    for world in WORLDS.values():
        assert set(ALGORITHMS) <= set(variants_for(world))


def test_a_quick_run_has_everything_for_tables_and_picture(tmp_path: Path) -> None:
    plan = quick(Plan(worlds=("misleading_reward",), seeds=5))
    measured = json.loads(json.dumps(measure(plan, workers=1), allow_nan=False))
    head = {"command": "x", "commit": "c", "changed_files": 0, "cores": 1, "processor": "p", "torch": "2", "seconds": 1}
    results = head | measured
    parts = report.tables(results)
    assert parts["area"].count("\n") == 1 + len(variants_for(WORLDS["misleading_reward"])) + 1  # with the exact one
    draw(results, tmp_path / "lab.png")
    assert (tmp_path / "lab.png").stat().st_size > 10_000


def test_a_partial_run_cannot_replace_the_recorded_results(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments(["--quick"])
    assert "--out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        arguments(["--families", "revisited"])
    assert "choose from" in capsys.readouterr().err


def test_the_page_shows_the_recorded_results() -> None:
    results = json.loads((RESULTS / "credit_lab.json").read_text(encoding="utf-8"))
    page = report.PAGE.read_text(encoding="utf-8")
    assert report.fill_in(page, report.tables(results)) == page


def test_a_page_without_its_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="needs <!-- area -->"):
        report.fill_in("no markers", {"area": "| |"})

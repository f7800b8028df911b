"""Rows and scores of reasoning-gym."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_r1.errors import ConfigError
from agent_r1.types import Step, StopReason, TaskRow, Trajectory
from tests.adapters.training import train_two_steps

pytest.importorskip("reasoning_gym", reason="pip install 'agent-r1[reasoning-gym]'")

from agent_r1.adapters.reasoning_tasks import reward, rows


def answered(text: str) -> Trajectory:
    step = Step(prompt_ids=[], response_ids=[], response_logprobs=[], action_text=text)
    return Trajectory(row_id="r", trajectory_id="r#0", steps=[step], stop=StopReason.ANSWERED)


@pytest.mark.parametrize("dataset", ["chain_sum", "leg_counting", "countdown", "propositional_logic", "mini_sudoku"])
def test_the_answer_of_a_row_earns_the_full_reward(dataset: str) -> None:
    for row in rows("train", 3, dataset=dataset):
        if row.ground_truth is not None:
            assert reward(row, answered(f"Well. <answer>{row.ground_truth}</answer>")) == 1.0
        assert reward(row, answered("no idea")) < 1.0


def test_settings_of_the_dataset_make_other_questions() -> None:
    def terms(row: TaskRow) -> int:
        question = str(row.prompt[0]["content"])
        return question.count("+") + question.count("- ") + 1

    short, long = (rows("train", 5, dataset="chain_sum", config={"min_terms": n, "max_terms": n}) for n in (2, 6))
    assert max(map(terms, short)) < min(map(terms, long))


def test_as_many_rows_are_made_as_asked_for_and_fewer_are_the_first_of_them() -> None:
    settings: dict[str, Any] = {"dataset": "chain_sum", "config": {"min_terms": 2, "max_terms": 2}}
    many = [row.prompt for row in rows("train", 1000, **settings)]
    assert len({str(prompt) for prompt in many}) == 1000
    assert [row.prompt for row in rows("train", 5, **settings)] == many[:5]
    small = settings["config"] | {"min_digits": 1, "max_digits": 1}  # 10 * 10 sums and differences
    assert 150 < len(rows("train", 1000, dataset="chain_sum", config=small, held_out=0)) <= 200


def test_rows_repeat_and_test_questions_are_not_trained_on() -> None:
    def questions(split: str, **settings: Any) -> list[str]:
        small = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
        made = rows(split, 30, dataset="chain_sum", config=small, held_out=30, **settings)
        return [row.prompt[0]["content"] for row in made]

    assert questions("train") == questions("train") != questions("train", seed=1)
    assert not set(questions("train")) & set(questions("test"))


def test_the_environment_sees_neither_answer_nor_entry() -> None:
    row = rows("train", 1, dataset="chain_sum")[0]
    assert str(row.ground_truth) in str(row.reward_model)
    assert (row.without_ground_truth().reward_model, dict(row.extra_info)) == ({}, {})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dataset": "chain_sun"}, "'chain_sum'"),
        ({"dataset": "chain_sum", "config": {"min_term": 2}}, "min_term"),
        ({"dataset": "chain_sum", "held_out": 2}, "held_out"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        rows("test", 3, **settings)


def test_two_steps_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = """
task:
  rows: reasoning_gym
  rows_kwargs: {dataset: leg_counting, config: {max_animals: 3}}
  reward: reasoning_gym
  flow: single_step
"""
    assert len(train_two_steps(task, tmp_path, monkeypatch, "task.train_count=10")) == 8

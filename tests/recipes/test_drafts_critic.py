"""The recipe `drafts_critic`: what counts as a choice between drafts."""

from __future__ import annotations

import pytest

from agent_r1.recipes.drafts_critic.task import is_offered
from agent_r1.types import TaskRow

ROW = TaskRow(
    prompt=[{"role": "user", "content": "How many coins do Faro Elm and Tara West have together?"}],
    reward_model={"style": "rule", "ground_truth": "50"},
    env_kwargs={"tools_kwargs": {"lookup": {"table": {"Faro Elm": 19, "Tara West": 31}}}},
)
RIGHT, ALSO_RIGHT, WRONG = "Faro Elm + Tara West", "Tara West + Faro Elm", "Faro Elm"


@pytest.mark.parametrize(
    ("drafts", "offered"),
    [
        ([RIGHT, WRONG], True),
        ([WRONG, RIGHT], True),
        ([RIGHT, RIGHT], False),
        ([RIGHT, ALSO_RIGHT], False),  # the same plan twice: the critic cannot be wrong
        ([WRONG, "Tara West"], False),
    ],
)
def test_only_a_right_and_a_wrong_draft_give_the_critic_a_choice(drafts: list[str], offered: bool) -> None:
    assert is_offered(ROW, drafts) is offered

"""Credit functions of users: one that miscounts, and settings that two functions read, are answered in plain words."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from agent_r1.errors import DataError
from agent_r1.learn.algorithms import Algorithm, get_algorithm
from agent_r1.learn.credit import Credit, Scored, ScoredGroups, assign_credit
from agent_r1.learn.losses import LossInputs, LossOutput
from tests.learn.builders import group, step, trajectory

# Steps of 2 and 1 tokens, and one in which nothing was sampled.
ATTEMPT = trajectory(step([1], [2, 3]), step([1], []), step([1], [4]), reward=1.0, name="a")
OTHER = trajectory(step([1], [2]), reward=0.0, name="b")

Made = Callable[[Scored], Credit]


def algorithm(made: Made, **change: Any) -> Algorithm:
    def own_credit(groups: ScoredGroups, *, scale: float = 1.0) -> list[list[Credit]]:
        return [[made(item) for item in group] for group in groups]

    row: dict[str, Any] = {"name": "own", "paper": "none", "credit": own_credit, "loss": get_algorithm("grpo").loss}
    return Algorithm(**(row | change))


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (lambda item: Credit(advantages=item.spread([1.0])), "1 .* 2 decisions"),
        (lambda item: Credit(advantages=item.spread([1.0] * 3)), "3 .* 2 decisions"),
        (lambda item: Credit(advantages=item.unflatten([1.0] * 2)), "2 .* 3 response tokens"),
        (lambda item: Credit(advantages=item.unflatten([1.0] * 4)), "4 .* 3 response tokens"),
        (lambda item: Credit(advantages=[[1.0], [], [1.0]]), r"'a' .*\[2, 0, 1\] .* \[1, 0, 1\]"),
        (
            lambda item: Credit(advantages=item.spread([1.0, 2.0]), value_targets=[[1.0, 2.0]]),
            r"'a' .*\[2, 0, 1\] .* value_targets \[2\]",
        ),
    ],
)
def test_a_credit_function_that_miscounts_is_named_with_both_counts(made: Made, problem: str) -> None:
    with pytest.raises(DataError, match=f"credit function 'own_credit'.*{problem}"):
        assign_credit([group(ATTEMPT)], algorithm(made))


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made[:1],
        lambda made: [made[0], made[1][:1]],
        lambda made: [[*made[0], *made[1]], []],
    ],
)
def test_credit_with_another_nesting_is_refused(
    change: Callable[[list[list[Credit]]], list[list[Credit]]],
) -> None:
    def regrouped(groups: ScoredGroups) -> list[list[Credit]]:
        return change([[Credit(advantages=i.spread([0.0] * len(i.decisions))) for i in each] for each in groups])

    with pytest.raises(DataError, match="credit function 'regrouped'"):
        assign_credit(
            [group(ATTEMPT), group(ATTEMPT, OTHER)], algorithm(lambda i: Credit(advantages=[]), credit=regrouped)
        )


def test_a_setting_that_two_functions_read_has_one_value() -> None:
    def own_loss(inputs: LossInputs, *, scale: float = 1.0) -> LossOutput:
        raise AssertionError(scale)

    both = algorithm(lambda item: Credit(advantages=[]), loss=own_loss).with_settings(scale=3.0)
    for part in (both.credit, both.loss):
        assert isinstance(part, partial)
        assert part.keywords["scale"] == 3.0

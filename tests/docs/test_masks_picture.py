"""The picture in docs/credit.md shows what the code does: masks, places of rewards, advantages at each level."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.draw_masks import Picture, draw, picture


@pytest.fixture(scope="module")
def shown() -> Picture:
    return picture()


def places(row: list[float | None]) -> dict[int, float]:
    return {position: value for position, value in enumerate(row) if value}


def advantages(shown: Picture, algorithm: str) -> dict[int, list[float]]:
    """Step -> the advantages of its response tokens."""
    (row,) = [values for name, values in shown.rows.items() if name.startswith(f"advantage, {algorithm}\n")]
    assert [value is None for value in row] == [step is None for step in shown.steps]  # none at all on tool text
    return {
        step: [value for value, of in zip(row, shown.steps, strict=True) if value is not None and of == step]
        for step in range(3)
    }


def test_loss_and_advantage_masks_cover_exactly_the_responses(shown: Picture) -> None:
    trained = [word for word, kept in zip(shown.words, shown.rows["loss mask"], strict=True) if kept]
    assert " ".join(trained) == "lookup ( Ann ) <end> lookup ( Bop ) lookup ( Bob ) <end> answer 42 <end>"
    assert shown.rows["advantage mask"] == shown.rows["loss mask"]


def test_rewards_are_on_the_last_token_of_their_call_or_episode(shown: Picture) -> None:
    process, outcome = places(shown.rows["process reward"]), places(shown.rows["outcome reward"])
    assert list(process.values()) == [0.2, -0.4, 0.2]
    assert [" ".join(shown.words[i - 3 : i + 1]) for i in process] == [
        "lookup ( Ann )",
        "lookup ( Bop )",
        "lookup ( Bob )",
    ]
    assert outcome == {len(shown.words) - 1: 1.0}


def test_credit_levels_distinguish_trajectories_steps_and_tokens(shown: Picture) -> None:
    trajectory, step, token = (advantages(shown, name) for name in ("grpo", "reinforce", "reinforce++"))
    assert len({value for values in trajectory.values() for value in values}) == 1
    assert [len(set(values)) for values in step.values()] == [1, 1, 1]
    # Returns from each step on: 0.2 - 0.4 + 0.2 + 1 = 1.0, then -0.4 + 0.2 + 1 = 0.8, then 1.0.
    assert step[0][0] == pytest.approx(step[2][0])
    assert step[1][0] < step[0][0]
    # From the tokens of the misspelt call on: 0.8. From the next token on the mistake is behind it: 1.2, then 1.0.
    assert token[1][3] < token[1][8] < token[1][4]


def test_it_can_be_drawn(shown: Picture, tmp_path: Path) -> None:
    draw(shown, tmp_path / "masks.png")
    assert (tmp_path / "masks.png").stat().st_size > 10_000

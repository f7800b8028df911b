"""Rows and reward for environments that a seed describes."""

from __future__ import annotations

from agent_r1.types import TaskRow, Trajectory

TEST_SEEDS = 1_000_000  # first seed of splits other than train
TRAIN_ROWS, TEST_ROWS = 1000, 100  # used if the config does not say


def rows(split: str, count: int | None = None, *, first_seed: int = 0) -> list[TaskRow]:
    """Return rows with the seeds `first_seed`, `first_seed + 1`, ...; other splits than train have other seeds."""
    start, wanted = (first_seed, TRAIN_ROWS) if split == "train" else (first_seed + TEST_SEEDS, TEST_ROWS)
    seeds = range(start, start + (wanted if count is None else count))
    return [TaskRow(prompt=[], row_id=f"{split}-{seed}", env_kwargs={"seed": seed}) for seed in seeds]


def reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """The sum of the environment's rewards, minus what its steps have already been paid."""
    earned = sum(step.info.get("reward", 0.0) for step in trajectory.steps)
    paid = sum(step.reward for step in trajectory.steps)
    invalid = sum(step.info.get("invalid", False) for step in trajectory.steps)
    return {"reward": earned - paid, "return": earned, "invalid_actions": float(invalid)}

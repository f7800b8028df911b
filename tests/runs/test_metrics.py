"""What a batch of episodes says: success of each kind of row, where there are several."""

from __future__ import annotations

from dataclasses import replace

from agent_r1.runs.metrics import rollout_metrics
from agent_r1.types import Group, StopReason, TaskRow, Trajectory


def played(source: str, *rewards: float, stop: StopReason = StopReason.ANSWERED) -> Group:
    row = TaskRow(prompt=[], row_id=f"{source}-{rewards}", data_source=source)
    episodes = [
        Trajectory(row_id=row.row_id, trajectory_id=str(i), steps=[], stop=stop, outcome_reward=reward)
        for i, reward in enumerate(rewards)
    ]
    return Group(row=row, trajectories=episodes)


def test_every_kind_of_row_has_its_own_success() -> None:
    groups = [played("heat", 1.0, 0.0), played("cool", 0.0, 0.0), played("heat", 1.0, 1.0)]
    metrics = rollout_metrics(groups, success_reward=1.0)
    assert metrics["success"] == 0.5  # 3 of 6
    assert metrics["success/heat"] == 0.75  # 3 of 4
    assert metrics["success/cool"] == 0.0


def test_failed_episodes_are_no_success_of_their_kind() -> None:
    groups = [played("heat", 1.0, stop=StopReason.ERROR), played("heat", 1.0), played("cool", 1.0)]
    assert rollout_metrics(groups, success_reward=1.0)["success/heat"] == 0.5


def test_one_kind_alone_is_not_named() -> None:
    metrics = rollout_metrics([played("heat", 1.0), played("heat", 0.0)], success_reward=1.0)
    assert [name for name in metrics if name.startswith("success")] == ["success"]


def test_the_numbers_of_a_flow_are_means_over_all_episodes() -> None:
    group = played("heat", 1.0, 0.0)
    first = replace(group.trajectories[0], counts={"gateway/calls": 3, "gateway/retries": 1})
    second = replace(group.trajectories[1], counts={"gateway/calls": 4})
    metrics = rollout_metrics([replace(group, trajectories=[first, second])], success_reward=1.0)
    assert (metrics["gateway/calls"], metrics["gateway/retries"]) == (3.5, 0.5)

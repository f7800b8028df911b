"""All sides of the collect benchmark do the same work, and its figures are computed correctly."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from agent_r1.build.models.load import load_model
from agent_r1.build.task import build_task
from agent_r1.cli.commands.train import seeded_start
from agent_r1.config import load_config
from agent_r1.envs.base import AgentEnv
from agent_r1.recipes.quickstart.task import lookup
from agent_r1.types import Action, Observation, StopReason, TaskRow, Transition
from benchmarks.baseline import Played, cut_at_stop, left_padded
from benchmarks.collect import (
    SIDES,
    Contest,
    MakeEnv,
    Run,
    build_contest,
    delays,
    draw,
    env_maker,
    one_attempt_each,
    order,
    show,
    slowed,
    summarise,
    time_all,
)

# Long enough to learn to write calls; copying names, and so answering well, takes longer.
BRIEF = ["sft.count=400", "sft.epochs=1", "sft.warmup_steps=5", "trainer.threads=1", "engine.threads=1"]


@pytest.fixture(scope="module")
def contest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contest]:
    torch.set_num_threads(1)
    config = load_config("quickstart", [*BRIEF, "rollout.group_size=2"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGENT_R1_CACHE", str(tmp_path_factory.mktemp("cache")))
        model = load_model(config, asyncio.run(seeded_start(config, build_task(config), Console(quiet=True))))
    made = build_contest(config, model, episodes=48, at_once=48)
    yield made
    asyncio.run(made.engine.close())


class Chatter(AgentEnv):
    """Answers everything; the length and number of answers depend on the row."""

    def __init__(self, row: TaskRow) -> None:
        self._number = int(row.row_id.rpartition("-")[2])
        self._messages = list(row.prompt)
        self._turns = 0

    async def reset(self, row: TaskRow) -> Observation:
        return Observation(messages=list(self._messages))

    async def step(self, action: Action) -> Transition:
        self._turns += 1
        if self._turns > self._number % 4:
            return Transition(terminated=True)
        words = ["more"] * (1 + (5 * self._number + 3 * self._turns) % 11)
        self._messages.append({"role": "assistant", "content": action.text})
        self._messages.append({"role": "user", "content": " ".join(words)})
        return Transition(observation=Observation(messages=list(self._messages)))


def play_all_sides(contest: Contest, make_env: MakeEnv) -> dict[str, list[Played]]:
    return {side: asyncio.run(contest.greedy().play(side, make_env, seed=0)) for side in SIDES}


def test_all_sides_sample_the_same_ids_with_the_tools_of_the_quickstart(contest: Contest) -> None:
    played = play_all_sides(contest, env_maker(0, seed=0))
    assert played["carried"] == played["collect"]
    assert played["afresh"] == played["collect"]
    # A call, its result, an answer: so brief a warm start takes the demonstrator's short cut. More turns come below.
    assert max(len(episode.responses) for episode in played["collect"]) >= 2


def test_all_sides_sample_the_same_ids_when_fewer_run_at_once_than_are_played(contest: Contest) -> None:
    expected = asyncio.run(contest.greedy().play("collect", env_maker(0, seed=0), seed=0))
    played = play_all_sides(replace(contest, at_once=10), env_maker(0, seed=0))  # 48 = 4 * 10 + 8
    assert played == dict.fromkeys(SIDES, expected)


def test_all_sides_sample_the_same_ids_when_turns_are_ragged(contest: Contest) -> None:
    collector = contest.collector
    # Stop ids taken from inside the responses: they end early and at different places, so the carried cache is full of
    # holes.
    whole = [
        response
        for episode in asyncio.run(contest.greedy().play("collect", Chatter, seed=0))
        for response in episode.responses
    ]
    inside = {response[1 + place % (len(response) - 1)] for place, response in enumerate(whole) if len(response) > 1}
    stop_ids = (*collector.sampling.stop_ids, *sorted(inside)[::2])
    roomy = replace(collector, sampling=replace(collector.sampling, stop_ids=stop_ids))
    # Few enough that some episodes are cut off: after a step, in the middle of a response, or before one.
    brief = replace(roomy, limits=replace(collector.limits, max_steps=2))
    tight = replace(roomy, limits=replace(collector.limits, max_context_tokens=50))
    stops = set()
    for settings in (roomy, brief, tight):
        played = play_all_sides(replace(contest, collector=settings), Chatter)
        assert played["carried"] == played["collect"]
        assert played["afresh"] == played["collect"]
        stops |= {episode.stop for episode in played["collect"]}
        lengths = {len(response) for episode in played["collect"] for response in episode.responses}
        assert len(lengths) > 3
    assert stops == {StopReason.ANSWERED, StopReason.MAX_STEPS, StopReason.MAX_TOKENS}


def test_rows_are_padded_on_the_left_and_cut_after_their_first_stop_id() -> None:
    ids, mask = left_padded([[5], [6, 7, 8]], pad=0)
    assert ids.tolist() == [[0, 0, 5], [6, 7, 8]]
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1]]
    assert cut_at_stop(torch.tensor([[4, 9, 0], [4, 4, 4], [9, 9, 0]]), stop_ids=(9,)) == [[4, 9], [4, 4, 4], [9]]


def test_delays_have_the_mean_asked_for_a_heavy_tail_and_repeat_with_the_seed() -> None:
    drawn = list(itertools.islice(delays(0.05, seed=1), 20_000))
    assert drawn[:5] == list(itertools.islice(delays(0.05, seed=1), 5))
    # The standard deviation of a log-normal of sigma 1 is sqrt(e - 1) = 1.31 means: 0.009 of the mean after 20,000.
    assert sum(drawn) / len(drawn) == pytest.approx(0.05, rel=0.05)
    # P(more than 6 means) = P(normal > ln 6 + 1/2) = 1 - Phi(2.29) = 1.1 %
    assert sum(delay > 0.3 for delay in drawn) / len(drawn) == pytest.approx(0.011, abs=0.004)


def test_a_slowed_tool_is_the_same_tool_to_the_model() -> None:
    waits = iter([0.0])
    slow = slowed(lookup, waits)
    assert slow.schema == lookup.schema
    assert asyncio.run(slow.execute({"name": "Ada Ash"}, table={"Ada Ash": 7})) == "7"
    assert next(waits, None) is None  # it waited


def test_without_groups_nothing_is_shared(contest: Contest) -> None:
    few = replace(contest, rows=contest.rows[:8])
    rows = build_task(load_config("quickstart")).train_rows()

    def shared(played: Contest) -> int:
        before = played.engine.stats.shared_tokens
        (run, *_) = asyncio.run(time_all(played, latencies=(0,), repeats=1))
        assert (run.side, run.episodes) == ("collect", 8 * 2)
        return int(played.engine.stats.shared_tokens - before)

    assert shared(few) > 0
    assert shared(one_attempt_each(few, rows)) == 0
    with pytest.raises(SystemExit, match="16 episodes of one row each need as many rows; the recipe has 15"):
        one_attempt_each(few, rows[:15])


def test_every_side_goes_first_in_its_turn() -> None:
    assert [order(repeat)[0] for repeat in range(4)] == ["collect", "carried", "afresh", "collect"]
    assert all(sorted(order(repeat)) == sorted(SIDES) for repeat in range(4))


def run(side: str, repeat: int, seconds: float, tokens: int) -> Run:
    counted = ("steps", "prefilled_tokens", "reused_tokens", "shared_tokens", "decoded_tokens")
    engine = dict.fromkeys(counted, 10 * (repeat + 1))
    counts = engine if side == "collect" else None
    return Run(
        side=side,
        latency_ms=50,
        repeat=repeat,
        seconds=seconds,
        cpu_seconds=2.0 if side == "collect" else 3.0,
        tokens=tokens,
        steps=6,
        episodes=4,
        engine=counts,
    )


def test_ratios_are_taken_within_repeats() -> None:
    seconds = {"collect": (1, 2, 4), "carried": (2, 2, 4), "afresh": (3, 8, 12)}
    runs = [run(side, repeat, seconds[side][repeat], tokens=120) for side in SIDES for repeat in range(3)]
    summary = summarise(runs, 50)
    # 120/1, 120/2, 120/4 tokens per second, and so on: the middle one of each.
    assert summary["tokens_per_second"] == {"collect": 60, "carried": 60, "afresh": 15}
    # carried: 2/1, 2/2, 4/4; afresh: 3/1, 8/2, 12/4.
    assert summary["collect_over"] == {"carried": 1.0, "afresh": 3.0}
    # 120/2 and 120/3 tokens per second of CPU time
    assert summary["cpu_tokens_per_second"] == {"collect": 60, "carried": 40, "afresh": 40}
    assert summary["cpu_collect_over"] == {"carried": 1.5, "afresh": 1.5}
    assert summary["steps_per_episode"] == dict.fromkeys(SIDES, 1.5)
    assert summary["engine"]["reused_tokens"] == 20


def test_a_short_contest_gives_a_table_and_a_picture(
    contest: Contest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = replace(contest, rows=contest.rows[:4])
    runs = asyncio.run(time_all(few, latencies=(0, 2), repeats=1))
    assert [(run.side, run.latency_ms) for run in runs] == [(side, ms) for ms in (0, 2) for side in SIDES]
    assert all(run.cpu_seconds > 0 for run in runs)
    assert all(run.episodes == 8 and run.tokens >= run.steps >= 8 for run in runs)
    summary = [summarise(runs, 0), summarise(runs, 2)]
    # Later turns find the earlier ones in the engine's cache.
    assert summary[0]["engine"]["reused_tokens"] > 0
    draw(summary, tmp_path / "collect.png")
    assert (tmp_path / "collect.png").read_bytes().startswith(b"\x89PNG")
    show(summary, "8 episodes")
    printed = capsys.readouterr().out
    assert (printed.count(" ms "), printed.count("by CPU time")) == (2, 2)

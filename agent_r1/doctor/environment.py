"""Checks that play the task without a model: what demonstrations, silence and chance earn, and whether episodes are
reproducible.

They see behaviour only. `agent_r1.envs.check` has stricter contracts, for the tests of an env.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from agent_r1.build.plan import Plan
from agent_r1.config import RunConfig
from agent_r1.doctor.finding import Finding, green, red, yellow
from agent_r1.doctor.players import (
    DEMOS,
    MUCH_BY_CHANCE,
    Played,
    make_env,
    play,
    play_demonstrations,
    play_unskilled,
    read,
    silent_collector,
)
from agent_r1.envs.check import CANARY
from agent_r1.errors import DataError
from agent_r1.rollout.collect import most_common_failure
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Group, StopReason, TaskRow, Trajectory

TWICE = 4  # rows that are played and scored again
LARGE_REWARD = 100.0
BLOCKED = 2.0  # seconds
MIN_ANSWER = 6  # characters; shorter answers occur in prompts by accident
FEW_GOOD = 0.25  # some demonstrations are imperfect on purpose, to leave something to learn
OFTEN = 0.9  # share of rows


@dataclass(slots=True)
class Gaps:
    """The longest time for which all other episodes were blocked."""

    longest: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """The episodes of the agents, for checks to read."""

    config: RunConfig
    plan: Plan
    renderer: Renderer
    rows: Sequence[TaskRow]
    demonstrated: Played | None
    unskilled: list[Played]
    gaps: Gaps
    notes: list[str] = field(default_factory=list)

    @property
    def played(self) -> list[Played]:
        return [each for each in (self.demonstrated, *self.unskilled) if each is not None]


async def check_environment(config: RunConfig, plan: Plan, renderer: Renderer, count: int) -> list[Finding]:
    """Play up to `count` rows with each agent. The task's resources must be open."""
    rows, notes, gaps = plan.train_rows[:count], list[str](), Gaps()
    found: list[Finding] = []
    demonstrated = None
    async with _watched(gaps):
        try:
            demonstrated = await play_demonstrations(config, plan, renderer, count, notes.append)
        except DataError as error:
            found.append(
                red("demonstrations", " ".join(str(error).split()), "Correct sft.demos or the limits of rollout")
            )
        unskilled = await play_unskilled(config, plan, renderer, rows)
        shown = Shown(
            config=config,
            plan=plan,
            renderer=renderer,
            rows=rows,
            demonstrated=demonstrated,
            unskilled=unskilled,
            gaps=gaps,
            notes=notes,
        )
        repeated = await check_repeats(shown)
        leaks = await check_canary(shown)
    found += check_failures(shown)
    found += [] if found and demonstrated is None else check_demonstrations(shown)
    found += check_silence_and_chance(shown)
    found += check_rewards(shown)
    found += repeated + leaks
    found += check_answer_in_prompt(shown)
    found += await check_close(shown)
    return found + check_blocking(shown)


def check_failures(shown: Shown) -> list[Finding]:
    name, found = "episodes end without errors", []
    for each in shown.played:
        if not each.failures:
            continue
        late = sum(episode.stop is StopReason.TIMEOUT for episode in each.failures)
        cause = " ".join(str(most_common_failure(each.failures)[0]).split())
        evidence = f"{len(each.failures)} of {len(each.episodes)} episodes of the {each.agent} agent failed: {cause}"
        fix = "Correct the code that it names: failed episodes are not trained on"
        if late:
            fix = "Make the tool or env quicker, or raise rollout.episode_seconds"
        many = len(each.failures) > shown.config.rollout.max_error_fraction * len(each.episodes)
        found.append((red if many or each.agent == DEMOS else yellow)(name, evidence, fix))
    return found or [green(name, f"{sum(len(each.episodes) for each in shown.played)} episodes, none failed")]


def check_demonstrations(shown: Shown) -> list[Finding]:
    name, each = "demonstrations score high", shown.demonstrated
    wanted = f"task.success_reward={shown.config.task.success_reward:g}"
    if each is None:
        return [green(name, "there are none (sft.demos), so nothing shows that the reward can be earned")]
    part = earns_part(each, shown.unskilled)
    if not each.successes:
        most = max(each.rewards)
        evidence = f"none earns {wanted}: the highest of {len(each.episodes)} rewards is {most:g}"
        report = yellow if part and 2 * most >= shown.config.task.success_reward else red
        return [report(name, evidence, "Correct task.reward or sft.demos, or lower task.success_reward")]
    if each.success < FEW_GOOD and not part:
        share = f"{each.successes} of {len(each.episodes)} earn {wanted}"
        return [yellow(name, share, "Look at the others, unless they are imperfect on purpose")]
    if shown.plan.task.calls_tools and not each.calls:
        return [
            yellow(
                "demonstrations call tools",
                "no demonstration calls a tool, so the policy is not taught to",
                "Write calls with write_call in the format of the chat template, or leave out task.tools",
            )
        ]
    bad = [call for call in each.calls if call.error is not None]
    if 2 * len(bad) > len(each.calls):
        evidence = f"{len(bad)} of {len(each.calls)} of their calls fail, such as {bad[0].error!r:.120}"
        return [yellow("demonstrations call tools", evidence, "Correct the calls in sft.demos: they are imitated")]
    average = f", {fmean(each.rewards):.2g} on average" if part else ""
    return [green(name, f"{each.successes} of {len(each.episodes)} earn {wanted}{average}")]


def earns_part(demonstrated: Played, unskilled: Sequence[Played]) -> bool:
    """Whether rewards are graded, and demonstrations earn clearly more than silence and chance."""
    by_chance = max((fmean(each.rewards) for each in unskilled), default=0.0)
    return len(set(demonstrated.rewards)) > 2 and fmean(demonstrated.rewards) > 2 * max(0.0, by_chance)


def check_silence_and_chance(shown: Shown) -> list[Finding]:
    name, found = "silence and chance score low", []
    wanted = f"task.success_reward={shown.config.task.success_reward:g}"
    for each in shown.unskilled:
        if each.success > (0 if each.agent == "empty" else MUCH_BY_CHANCE):
            evidence = f"the {each.agent} agent earns {wanted} in {each.successes} of {len(each.episodes)} episodes"
            report = red if 2 * each.successes > len(each.episodes) else yellow
            found.append(report(name, evidence, "Let task.reward pay only for what solves the task"))
    means = ", ".join(f"{each.agent} {fmean(each.rewards):.2g}" for each in shown.unskilled)
    return found or [green(name, f"mean rewards: {means}")]


def check_rewards(shown: Shown) -> list[Finding]:
    """Variance and range. A reward that is not finite has failed its episode."""
    rewards = [reward for each in shown.played for reward in each.rewards]
    low, high = min(rewards), max(rewards)
    if low == high and shown.demonstrated is not None:
        evidence = f"every episode of every agent earned {low:g}: there is nothing to learn from"
        return [red("reward varies", evidence, "Correct task.reward: it does not depend on the responses")]
    if max(abs(low), abs(high)) > LARGE_REWARD:
        evidence = f"rewards from {low:g} to {high:g}"
        return [yellow("reward varies", evidence, "Scale rewards to about [0, 1]: critics and KL penalties expect it")]
    return [green("reward varies", f"from {low:g} to {high:g}")]


async def check_repeats(shown: Shown) -> list[Finding]:
    """The same words give the same prompts and rewards; the same episode gets the same outcome twice."""
    name, rows = "the same episode repeats", shown.rows[:TWICE]
    first, second = [await play(shown.config, shown.plan, shown.renderer, "random", rows) for _ in range(2)]
    for one, other in zip(first, second, strict=True):
        if _prompts(one.trajectories[0]) != _prompts(other.trajectories[0]):
            evidence = f"row {one.row.row_id!r} gives other prompts when the same responses are played again"
            fix = (
                "Draw randomness from the row, not from the clock or a global generator; attempts at a row are compared"
            )
            return [yellow(name, evidence, fix)]
    scored = [await shown.plan.task.scorer(first) for _ in range(2)]
    for one, other in zip(*scored, strict=True):
        a, b = one.trajectories[0], other.trajectories[0]
        if a.outcome_reward != b.outcome_reward:
            values = f"{a.outcome_reward:g}, then {b.outcome_reward:g}"
            evidence = f"the reward of one episode of row {one.row.row_id!r} is {values}"
            return [yellow(name, evidence, "Make task.reward a function of the row and the episode")]
    return [green(name, f"{len(rows)} rows, played and scored twice")]


def _prompts(trajectory: Trajectory) -> list[tuple[list[int], float]]:
    return [(step.prompt_ids, step.reward) for step in trajectory.steps]


async def check_canary(shown: Shown) -> list[Finding]:
    """Replace the ground truth by a made-up word, and look for it in the policy's prompts."""
    name = "ground truth is never shown"
    rows = [_with_canary(row) for row in shown.rows[:TWICE] if row.ground_truth is not None]
    if not rows:
        return [green(name, "rows have none (reward_model.ground_truth)")]
    groups: list[Group] = []
    for agent in ("empty", "random"):
        groups += await play(shown.config, shown.plan, shown.renderer, agent, rows)
    for group in groups:
        for step in group.trajectories[0].steps:
            text = read(shown.renderer, step.prompt_ids)
            if CANARY in text or CANARY in step.feedback:
                around = (text if CANARY in text else step.feedback).partition(CANARY)[0][-60:]
                return [
                    red(
                        name,
                        f"the policy sees the ground truth of row {group.row.row_id!r} after {around!r}",
                        "Keep the answer out of env_kwargs, extra_info and everything that the env or a tool shows",
                    )
                ]
    played = sum(bool(group.trajectories[0].steps) for group in groups)  # an env may refuse such a row
    return [green(name, f"a canary in its place was not seen in {played} episodes")]


def _with_canary(row: TaskRow) -> TaskRow:
    """Put the canary wherever the row has the answer, except where the policy may read it: in its prompt."""
    truth = row.ground_truth
    return replace(
        row,
        reward_model={**row.reward_model, "ground_truth": _replaced(truth, truth, whole=True)},
        env_kwargs=_replaced(dict(row.env_kwargs), truth),
        extra_info=_replaced(dict(row.extra_info), truth),
    )


def _replaced(value: Any, truth: Any, *, whole: bool = False) -> Any:
    """A copy with the canary for every value equal to the ground truth; with `whole`, for every text or number."""
    if isinstance(value, Mapping):
        return {key: _replaced(each, truth, whole=whole) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(each, truth, whole=whole) for each in value]
    if isinstance(value, bool) or value is None:
        return value
    is_answer = type(value) is type(truth) and value == truth
    return CANARY if whole or (is_answer and isinstance(value, str) and len(value) >= MIN_ANSWER) else value


def check_answer_in_prompt(shown: Shown) -> list[Finding]:
    name = "prompt does not tell the answer"
    answers = [(row, row.ground_truth) for row in shown.rows if isinstance(row.ground_truth, str)]
    long = [(row, answer) for row, answer in answers if len(answer.strip()) >= MIN_ANSWER]
    told = [row for row, answer in long if any(answer.strip() in str(each.get("content")) for each in row.prompt)]
    if len(long) > 1 and len(told) >= OFTEN * len(long):
        evidence = f"{len(told)} of {len(long)} prompts contain the row's ground truth"
        return [yellow(name, evidence, "Remove it from the prompt, unless the task is to choose from what is given")]
    return [green(name, f"{len(told)} of {len(shown.rows)} prompts contain the row's ground truth")]


async def check_close(shown: Shown) -> list[Finding]:
    """`close` may be called before an episode began, and twice."""
    env = make_env(silent_collector(shown.config, shown.plan, shown.renderer), shown.rows[0])
    if env is None:
        return []
    try:
        await env.close()
        await env.close()
    except Exception as error:  # noqa: BLE001 (user code)
        evidence = f"{type(env).__name__}.close raised {type(error).__name__}: {error}"
        return [red("env can be closed", evidence, "Let close work before reset, and when it is called twice")]
    return [green("env can be closed", "before an episode, and twice")]


def check_blocking(shown: Shown) -> list[Finding]:
    name, seconds = "other episodes go on", shown.gaps.longest
    if seconds > BLOCKED:
        return [
            yellow(
                name,
                f"an environment, tool or reward blocked all episodes for {seconds:.1f} s, and no time limit ends it",
                "Await what takes time, or set task.workers.processes=4 to run environments in processes",
            )
        ]
    return [green(name, f"none waited more than {BLOCKED:g} s for another")]


@asynccontextmanager
async def _watched(gaps: Gaps) -> AsyncIterator[None]:
    """Measure how long the event loop is kept busy at a time."""

    async def beat() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.05)
            gaps.longest = max(gaps.longest, time.monotonic() - began - 0.05)

    task = asyncio.create_task(beat())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        await asyncio.sleep(0.1)  # the last beat
        task.cancel()

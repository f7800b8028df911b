"""Checks that play the task without a model: what demonstrations, silence and chance earn, and whether episodes are
reproducible.

They see behaviour only. `agent_r1.envs.check` has stricter contracts, for the tests of an env.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from agent_r1.build.plan import Plan
from agent_r1.config import RunConfig
from agent_r1.doctor.canary import check_answer_in_prompt, check_canary
from agent_r1.doctor.finding import Finding, green, red, yellow
from agent_r1.doctor.players import (
    DEMOS,
    MUCH_BY_CHANCE,
    Played,
    Shown,
    load_few_demos,
    make_env,
    play,
    play_answers,
    play_demonstrations,
    play_unskilled,
    silent_collector,
)
from agent_r1.doctor.quick import judge_room
from agent_r1.doctor.watchdog import Pulse, watched
from agent_r1.errors import DataError
from agent_r1.guard import guarded
from agent_r1.rollout.collect import most_common_failure
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import StopReason, TaskRow, Trajectory

TWICE = 4  # rows that are played and scored again
LONGEST = 4  # rows with most characters, whose first prompts are looked at
LARGE_REWARD = 100.0
BLOCKED, BLOCKED_ONCE = 2.0, 10.0  # seconds
UNBLOCK = "Await what takes time, or set task.workers.processes=4 to run environments in processes"
NAME_BLOCKING = "other episodes go on"
FEW_GOOD = 0.1  # some demonstrations are imperfect on purpose, to leave something to learn


async def check_environment(
    config: RunConfig, plan: Plan, renderer: Renderer, count: int, *, seconds: float, end: Callable[[str], None]
) -> list[Finding]:
    """Play up to `count` rows with each agent, for at most `seconds` per episode. The task's resources must be open.

    Calls `end` if user code blocks everything for as long; see `watched`."""
    allowed = config.rollout.episode_seconds
    config, plan = _limited(config, plan, seconds)
    rows, demos = plan.train_rows[:count], load_few_demos(config, count)
    found, demonstrated = list[Finding](), None
    async with watched(seconds, end) as pulse:
        try:
            demonstrated = await play_demonstrations(config, plan, renderer, demos, lambda _: None)
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
        )
        found += check_failures(shown, allowed)
        if not any(each.is_late for each in shown.played):  # else the others would take as long
            found += await _check_play(shown, has_demos=bool(demos))
    return found + check_blocking(pulse)


def _limited(config: RunConfig, plan: Plan, seconds: float) -> tuple[RunConfig, Plan]:
    rollout, scorer = config.rollout, plan.task.scorer
    limited = rollout.model_copy(update={"episode_seconds": min(seconds, rollout.episode_seconds)})
    scorer = replace(scorer, timeout=min(seconds, scorer.timeout))
    return config.model_copy(update={"rollout": limited}), replace(plan, task=replace(plan.task, scorer=scorer))


async def _check_play(shown: Shown, *, has_demos: bool) -> list[Finding]:
    found: list[Finding] = []
    if shown.demonstrated is not None:
        found += check_demonstrations(shown, shown.demonstrated)
    elif not has_demos:
        found += await check_answers(shown)
    found += check_silence_and_chance(shown)
    found += check_rewards(shown)
    found += await check_repeats(shown)
    found += await check_canary(shown)
    found += check_answer_in_prompt(shown)
    found += await check_room(shown)
    return found + await check_close(shown)


def check_failures(shown: Shown, allowed: float) -> list[Finding]:
    """`allowed`: the recipe's own time limit of an episode, which may be longer than ours."""
    name, found, limit = "episodes end without errors", list[Finding](), shown.config.rollout.episode_seconds
    for each in shown.played:
        if not each.failures:
            continue
        late = sum(episode.stop is StopReason.TIMEOUT for episode in each.failures)
        cause = " ".join(str(most_common_failure(each.failures)[0]).split())
        evidence = f"{len(each.failures)} of {len(each.episodes)} episodes of the {each.agent} agent failed: {cause}"
        fix = "Correct the code that it names: failed episodes are not trained on"
        if late:
            fix = "Make the tool or env quicker, or raise rollout.episode_seconds"
            if limit < allowed:
                fix = f"Make the tool or env quicker, or wait longer than {limit:g} s, such as --seconds {allowed:g}"
        is_bad = each.fails_often(shown.config) or each.agent == DEMOS
        found.append((red if is_bad else yellow)(name, evidence, fix))
    return found or [green(name, f"{sum(len(each.episodes) for each in shown.played)} episodes, none failed")]


def check_demonstrations(shown: Shown, each: Played) -> list[Finding]:
    name, wanted = "demonstrations score high", f"task.success_reward={shown.config.task.success_reward:g}"
    part, most = earns_part(each, shown.unskilled), max(each.rewards)
    if not each.successes and not (part and most >= shown.config.task.success_reward):  # with process rewards
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


async def check_answers(shown: Shown) -> list[Finding]:
    """Without demonstrations, only the ground truth can show that the reward can be earned."""
    name, wanted = "reward can be earned", f"task.success_reward={shown.config.task.success_reward:g}"
    fix = "Set sft.demos to a function that solves a few rows: demonstrations show that the reward can be earned"
    if shown.config.sft.trajectories is not None:
        return [green(name, f"by the episodes of sft.trajectories={shown.config.sft.trajectories}")]
    said = await play_answers(shown.config, shown.plan, shown.renderer, shown.rows[:TWICE])
    if said is None:
        return [yellow(name, "no evidence: there are no demonstrations, and no ground truths that are text", fix)]
    wording, each = said
    answer, played = repr(wording.format("...")), len(each.episodes)
    if each.successes:
        earned = f"{wanted} in {each.successes} of {played} episodes"
        return [green(name, f"the ground truth, said as {answer}, earns {earned}")]
    tried = f"the ground truth, said as {answer}, earns at most {max(each.rewards):g}"
    return [yellow(name, f"no evidence: there are no demonstrations, and {tried}", fix)]


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


async def check_room(shown: Shown) -> list[Finding]:
    """First prompts as the env shows them, of the rows played and of those that look longest, held-out ones too."""
    name, limits = "prompts leave room to answer", shown.config.rollout
    rows = [*shown.plan.train_rows, *shown.plan.test_rows]
    longest = sorted(rows, key=_characters)[-LONGEST:]
    groups = await play(shown.config, shown.plan, shown.renderer, "empty", longest)
    sizes: dict[str, int] = {}
    for each in (*(group.trajectories[0] for group in groups), *(e for p in shown.played for e in p.episodes)):
        if each.steps:
            sizes[each.row_id] = len(each.steps[0].prompt_ids)
        elif each.failure is not None and each.failure.kind == "nothing sampled":
            sizes[each.row_id] = limits.max_context_tokens
    return judge_room(name, [(size, row_id) for row_id, size in sizes.items()], len(rows), limits)


def _characters(row: TaskRow) -> int:
    return len(json.dumps([row.prompt, row.env_kwargs, row.extra_info], default=str))


async def check_close(shown: Shown) -> list[Finding]:
    """`close` may be called before an episode began, and twice."""
    env = make_env(silent_collector(shown.config, shown.plan, shown.renderer), shown.rows[0])
    if env is None:
        return []
    try:
        for _ in range(2):
            await guarded(env.close(), seconds=shown.config.rollout.episode_seconds)
    except Exception as error:  # noqa: BLE001 (user code)
        evidence = f"{type(env).__name__}.close raised {type(error).__name__}: {error}"
        return [red("env can be closed", evidence, "Let close work before reset, and when it is called twice")]
    return [green("env can be closed", "before an episode, and twice")]


def check_blocking(pulse: Pulse) -> list[Finding]:
    """Once may be the first use of what is then kept, such as an index."""
    gaps = [gap for gap in pulse.gaps if gap > BLOCKED]
    if len(gaps) > 1 or sum(gaps) > BLOCKED_ONCE:
        evidence = (
            f"an environment, tool or reward blocked all episodes {len(gaps)} times, for up to {max(gaps):.1f} s, and "
            "no time limit ends it"
        )
        return [yellow(NAME_BLOCKING, evidence, UNBLOCK)]
    return [green(NAME_BLOCKING, f"none waited more than once or for more than {max(gaps, default=BLOCKED):.2g} s")]


def blocked(place: str, seconds: float) -> Finding:
    return red(
        NAME_BLOCKING,
        f"{place} has blocked all episodes for {seconds:g} s, and no time limit ends it; doctor stopped here",
        UNBLOCK,
    )

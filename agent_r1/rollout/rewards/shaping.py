"""Outcome rewards made of named parts: weighted sums, the published gate, and format parts ready to use.

    reward = weighted(answer=(exact, 1.0), format=(clean_calls, 0.1))

Every part is itself a reward function of (row, trajectory), so a judge or a reward model is a part like any other. What
is made here is one too: name it as `task.reward`, or use it as a part of something larger. The total is trained on; the
parts are reported as they were returned, without their weights.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Mapping
from inspect import isawaitable
from typing import Any, Literal

from agent_r1.errors import ConfigError
from agent_r1.guard import call, describe, guarded, is_async
from agent_r1.rollout.rewards.attempts import PerLoop
from agent_r1.rollout.scoring import SYNC_THREADS, RewardFunction, check_reward_signature, named_components
from agent_r1.types import TaskRow, Trajectory

Format = Callable[[TaskRow, Trajectory], float]  # in [0, 1]

# Of all sync parts that run beside async ones, whatever reward they belong to: they share the interpreter.
_TURNS = PerLoop(lambda: asyncio.Semaphore(SYNC_THREADS))


def weighted(**parts: tuple[RewardFunction, float]) -> RewardFunction:
    """The sum of weight times part: `weighted(answer=(exact, 1.0), format=(clean_calls, 0.1))`.

    A part that returns named components of its own counts with its "reward"; the others are reported as part/name.
    """
    if not parts:
        raise ConfigError("weighted() has no parts; give at least one, as in weighted(answer=(exact, 1.0))")
    for name, part in parts.items():
        if not isinstance(part, tuple) or len(part) != 2:
            raise ConfigError(f"part {name!r} is {part!r:.80}; give (function, weight), as in {name}=(exact, 1.0)")
        if not isinstance(part[1], int | float) or not math.isfinite(part[1]):
            raise ConfigError(f"part {name!r} has the weight {part[1]!r:.80}; weights are finite numbers")
    weights = {name: weight for name, (_, weight) in parts.items()}

    def total(values: Mapping[str, float]) -> float:
        return math.fsum(weights[name] * value for name, value in values.items())

    return _composed("weighted", {name: function for name, (function, _) in parts.items()}, total)


def gated(
    answer: RewardFunction, format: RewardFunction, *, threshold: float = 0.5, offset: float = -1.0
) -> RewardFunction:
    """offset + format + answer, where the answer counts only if format >= threshold; format counts at most 1.

    The rule of the published question-answering rewards: with parts in [0, 1] and the defaults the total lies in
    [-1, 1], and is 1 for a right answer in perfect form. Both parts are always computed and reported.
    """
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in (threshold, offset)):
        raise ConfigError(f"gated() needs a finite threshold and offset, got {threshold!r} and {offset!r}")
    if threshold > 1:
        raise ConfigError(
            f"gated(threshold={threshold}): format counts at most 1, so the answer would never count; give at most 1"
        )

    def total(values: Mapping[str, float]) -> float:
        form = min(values["format"], 1.0)
        return offset + form + (values["answer"] if form >= threshold else 0.0)

    return _composed("gated", {"answer": answer, "format": format}, total)


def clean_calls(row: TaskRow, trajectory: Trajectory) -> float:
    """The share of tool-calling steps whose calls all went through; 1 for an episode that calls nothing.

    A call goes through when it can be read, names a tool, has arguments that fit, and its tool does not refuse with a
    ToolError. Nothing is earned by calling, so a policy that never calls has full marks: weigh it below the answer.
    """
    calling = [step.calls for step in trajectory.steps if step.calls]
    return _share([all(call.error is None for call in calls) for calls in calling])


def matches(pattern: str | re.Pattern[str], where: Literal["final", "earlier", "every"] = "final") -> Format:
    r"""The share of responses in which the regular expression is found: 0 or 1 for the final one, the default.

    "earlier" are the responses before the final one; where there are none, the share is 1. Anchor with \A and \Z, let
    dots match line ends with (?s). The policy writes the text: a pattern that backtracks without end, such as (a+)+b,
    holds the interpreter, and no time limit can take it back.
    """
    try:
        compiled = re.compile(pattern)
        compiled.search("")  # a pattern of bytes finds nothing in a text
    except (re.error, TypeError) as error:
        raise ConfigError(f"matches({pattern!r}): not a regular expression: {error}") from error
    if where not in ("final", "earlier", "every"):
        raise ConfigError(f"matches(where={where!r}): choose one of final, earlier, every")

    def matching(row: TaskRow, trajectory: Trajectory) -> float:
        said = [step.action_text for step in trajectory.steps if not step.is_summary]
        texts = {"final": [trajectory.final_text], "earlier": said[:-1], "every": said}[where]
        return _share([compiled.search(text) is not None for text in texts])

    return matching


def _share(good: list[bool]) -> float:
    return sum(good) / len(good) if good else 1.0


def _composed(
    maker: str, parts: Mapping[str, RewardFunction], total: Callable[[Mapping[str, float]], float]
) -> RewardFunction:
    for name, part in parts.items():
        if name == "reward":
            raise ConfigError("a part cannot be called 'reward': that is the name of the total; choose another")
        check_reward_signature(part, name)

    def report(outcomes: Mapping[str, Any]) -> dict[str, float]:
        results = {name: _read(name, outcome) for name, outcome in outcomes.items()}
        values = {name: result["reward"] for name, result in results.items()}
        inner = {
            f"{name}/{key}": value
            for name, result in results.items()
            for key, value in result.items()
            if key != "reward"
        }
        return {"reward": total(values), **values, **inner}

    async def together(outcomes: Mapping[str, Any]) -> dict[str, float]:
        # Each in a task of its own, which a bare sys.exit() must not end the run from. The time limit is the scorer's.
        running = (guarded(_awaited(outcome), seconds=math.inf) for outcome in outcomes.values())
        awaited = await asyncio.gather(*running, return_exceptions=True)  # no part outlives the others
        return report(dict(zip(outcomes, awaited, strict=True)))

    def in_turn(row: TaskRow, trajectory: Trajectory) -> dict[str, float] | Awaitable[dict[str, float]]:
        outcomes = {name: _outcome(part, row, trajectory) for name, part in parts.items()}
        # A part can be async without looking so: `lambda row, trajectory: judge(row, trajectory)`. Then this is, too.
        return together(outcomes) if any(map(isawaitable, outcomes.values())) else report(outcomes)

    async def at_once(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
        return await together({name: _called(part, row, trajectory) for name, part in parts.items()})

    in_turn.__name__ = at_once.__name__ = maker  # what messages call the reward
    # Sync when all parts are: the scorer runs few sync rewards at a time, and starts the time of each when its turn
    # comes. Beside an async part, sync parts take turns as well, but out of their episode's time.
    return at_once if any(map(is_async, parts.values())) else in_turn


def _outcome(part: RewardFunction, row: TaskRow, trajectory: Trajectory) -> Any:
    """What the part returns, or the exception it raises."""
    try:
        return part(row, trajectory)
    except Exception as error:  # noqa: BLE001 (raised again by `_read`, which knows the name of the part)
        return error


async def _called(part: RewardFunction, row: TaskRow, trajectory: Trajectory) -> Any:
    if is_async(part):
        return await call(part, row, trajectory)
    async with _TURNS.use() as turns, turns:
        # In a list, so that `call` leaves alone what still has to be awaited: waiting takes no thread, and no turn.
        [returned] = await call(lambda: [part(row, trajectory)])
    return await _awaited(returned)


async def _awaited(outcome: Any) -> Any:
    return await outcome if isawaitable(outcome) else outcome


def _read(name: str, outcome: Any) -> dict[str, float]:
    if isinstance(outcome, BaseException):
        # With the traceback of the part: what is logged should lead to the user's own line.
        failure = RuntimeError(f"part {name!r} failed: {describe(outcome)}")
        raise failure.with_traceback(outcome.__traceback__) from outcome
    try:
        return named_components(outcome)
    except ValueError as error:
        raise ValueError(f"part {name!r}: {error}") from error

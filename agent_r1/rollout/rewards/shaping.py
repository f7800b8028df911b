"""Outcome rewards made of named parts: weighted sums, the published gate, and format parts ready to use.

    reward = weighted(answer=(exact, 1.0), format=(clean_calls, 0.1))

Every part is a reward function of (row, trajectory), so a judge, a reward model or another weighted sum can be a part.
The total is trained on; the parts are reported as they were returned, without their weights.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from inspect import isawaitable
from typing import Any, Literal

from agent_r1.errors import ConfigError
from agent_r1.guard import call, describe, guarded, is_async
from agent_r1.rollout.rewards.attempts import PerLoop
from agent_r1.rollout.scoring import SYNC_THREADS, RewardFunction, check_reward_signature, named_components
from agent_r1.types import TaskRow, Trajectory

Format = Callable[[TaskRow, Trajectory], float]  # returns a number in [0, 1]

_TURNS = PerLoop(lambda: asyncio.Semaphore(SYNC_THREADS))  # limits sync parts beside async ones: they share the GIL


def weighted(**parts: tuple[RewardFunction, float]) -> RewardFunction:
    """The sum of weight times part: `weighted(answer=(exact, 1.0), format=(clean_calls, 0.1))`.

    A part that returns named components counts with its "reward"; the others are reported as part/name.
    """
    if not parts:
        raise ConfigError("weighted() has no parts; give at least one, as in weighted(answer=(exact, 1.0))")
    for name, part in parts.items():
        if not isinstance(part, tuple) or len(part) != 2 or not _is_finite(part[1]):
            raise ConfigError(f"part {name!r} is {part!r:.80}; give (function, weight), as in {name}=(exact, 1.0)")
    weights = {name: weight for name, (_, weight) in parts.items()}

    def total(values: Mapping[str, float]) -> float:
        return math.fsum(weights[name] * value for name, value in values.items())

    return _compose("weighted", {name: function for name, (function, _) in parts.items()}, total)


def gated(
    answer: RewardFunction, format: RewardFunction, *, threshold: float = 0.5, offset: float = -1.0
) -> RewardFunction:
    """offset + format + answer, where the answer counts only if format >= threshold; format counts at most 1.

    The rule of the published question-answering rewards: with parts in [0, 1] and the defaults the total lies in
    [-1, 1], and is 1 for a right answer in perfect form. Both parts are always computed and reported.
    """
    if not _is_finite(offset) or not _is_finite(threshold) or threshold > 1:
        raise ConfigError(
            f"gated(threshold={threshold!r}, offset={offset!r}): both must be finite, and the threshold at most 1, or "
            "the answer would never count"
        )

    def total(values: Mapping[str, float]) -> float:
        form = min(values["format"], 1.0)
        return offset + form + (values["answer"] if form >= threshold else 0.0)

    return _compose("gated", {"answer": answer, "format": format}, total)


def clean_calls(row: TaskRow, trajectory: Trajectory) -> float:
    """The share of tool-calling steps whose calls all succeeded; 1 for an episode without calls.

    A call succeeds if it can be read, names a tool, has valid arguments, and its tool raises no ToolError. A policy
    that never calls gets full marks, so give it less weight than the answer.
    """
    calling = [step.calls for step in trajectory.steps if step.calls]
    return _share([all(call.error is None for call in calls) for calls in calling])


def matches(pattern: str | re.Pattern[str], where: Literal["final", "earlier", "every"] = "final") -> Format:
    r"""The share of responses in which the regular expression is found: 0 or 1 for the final one, the default.

    "earlier" are the responses before the final one; if there are none, the share is 1. Anchor with \A and \Z, let dots
    match line ends with (?s). The policy writes the text: a pattern that backtracks forever, such as (a+)+b, blocks the
    interpreter, and no time limit can interrupt it.
    """
    try:
        compiled = re.compile(pattern)
        compiled.search("")  # refuses a pattern of bytes
    except (re.error, TypeError) as error:
        raise ConfigError(f"matches({pattern!r}): not a regular expression: {error}") from error
    if where not in ("final", "earlier", "every"):
        raise ConfigError(f"matches(where={where!r}): choose one of final, earlier, every")

    def matching(row: TaskRow, trajectory: Trajectory) -> float:
        actions = [step.action_text for step in trajectory.steps if not step.is_summary]
        texts = {"final": [trajectory.final_text], "earlier": actions[:-1], "every": actions}[where]
        return _share([compiled.search(text) is not None for text in texts])

    return matching


def _share(good: list[bool]) -> float:
    return sum(good) / len(good) if good else 1.0


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _compose(
    name: str, parts: Mapping[str, RewardFunction], total: Callable[[Mapping[str, float]], float]
) -> RewardFunction:
    """Combine parts. The result is sync if all parts are, so that the scorer runs only a few at a time."""
    for part_name, part in parts.items():
        if part_name == "reward":
            raise ConfigError("a part cannot be called 'reward': that is the name of the total; choose another")
        check_reward_signature(part, part_name)

    def report(outcomes: Iterable[Any]) -> dict[str, float]:
        results = {part: _read(part, outcome) for part, outcome in zip(parts, outcomes, strict=True)}
        values = {part: result.pop("reward") for part, result in results.items()}
        inner = {f"{part}/{key}": value for part, result in results.items() for key, value in result.items()}
        return {"reward": total(values), **values, **inner}

    async def together(works: Iterable[Coroutine[Any, Any, Any]]) -> dict[str, float]:
        # Guarded, so that a bare sys.exit() in a part cannot end the run. The scorer sets the time limit.
        running = [guarded(work, seconds=math.inf) for work in works]
        return report(await asyncio.gather(*running, return_exceptions=True))

    def in_turn(row: TaskRow, trajectory: Trajectory) -> dict[str, float] | Awaitable[dict[str, float]]:
        outcomes = [_try(part, row, trajectory) for part in parts.values()]
        # A part may be async without looking so: `lambda row, trajectory: judge(row, trajectory)`.
        return together(map(_resolve, outcomes)) if any(map(isawaitable, outcomes)) else report(outcomes)

    async def at_once(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
        return await together(_call(part, row, trajectory) for part in parts.values())

    in_turn.__name__ = at_once.__name__ = name  # the reward's name in messages
    return at_once if any(map(is_async, parts.values())) else in_turn


def _try(part: RewardFunction, row: TaskRow, trajectory: Trajectory) -> Any:
    try:
        return part(row, trajectory)
    except Exception as error:  # noqa: BLE001 (raised again by `_read`, which knows the name of the part)
        return error


async def _resolve(outcome: Any) -> Any:
    return await outcome if isawaitable(outcome) else outcome


async def _call(part: RewardFunction, row: TaskRow, trajectory: Trajectory) -> Any:
    if is_async(part):
        return await call(part, row, trajectory)
    async with _TURNS.use() as turns, turns:
        [outcome] = await call(lambda: [part(row, trajectory)])  # in a list, so that `call` does not await it
    return await _resolve(outcome)  # outside the limit, because a sync part inside this one may wait for it


def _read(name: str, outcome: Any) -> dict[str, float]:
    """Return the components of a part, or raise its error with the part's name."""
    if isinstance(outcome, BaseException):
        failure = RuntimeError(f"part {name!r} failed: {describe(outcome)}")
        raise failure.with_traceback(outcome.__traceback__) from outcome  # the log should lead to the user's line
    try:
        return named_components(outcome)
    except ValueError as error:
        raise ValueError(f"part {name!r}: {error}") from error

"""What an env answered, attached to the step it answers: checked, and as plain as a trajectory file needs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from agent_r1.data.files import is_nested_deeper
from agent_r1.text import sanitize
from agent_r1.types import Step, ToolCallRecord, Transition

MAX_INFO_CHARS = 100_000
MAX_INFO_NESTING = 80  # more than the arguments of a call may have

TokenSpan = Callable[[int, int], tuple[int, int] | None]  # of characters [start, end) of the response


def attach(
    step: Step, transition: Transition, *, source: str, seconds: float = 0.0, token_span: TokenSpan | None = None
) -> Step:
    """The step with the transition added to what it has already. `source` is named in errors."""
    return replace(
        step,
        reward=step.reward + float(transition.reward),
        calls=step.calls + tuple(_plain_call(call, source, token_span) for call in transition.calls),
        feedback="\n".join(filter(None, (step.feedback, sanitize(transition.feedback)))),
        env_seconds=step.env_seconds + seconds,
        info={**step.info, **_plain(transition.info, source)},
    )


def _plain_call(call: ToolCallRecord, source: str, token_span: TokenSpan | None) -> ToolCallRecord:
    return replace(
        call,
        token_span=None if token_span is None else token_span(*call.text_span),
        reward=float(call.reward),
        result=sanitize(call.result),
        arguments=_plain(call.arguments, source),
        info=_plain(call.info, f"tool {call.name!r}" if call.name else source),
    )


def _plain(info: Mapping[str, Any], source: str) -> dict[str, Any]:
    try:
        text = json.dumps(info, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"what {source} returned cannot be kept with the trajectory: info and arguments must be JSON: {error}"
        ) from error
    if len(text) > MAX_INFO_CHARS:
        raise ValueError(
            f"{source} returned info of {len(text)} characters; {MAX_INFO_CHARS} at most are kept with the trajectory"
        )
    plain: dict[str, Any] = json.loads(sanitize(text))
    if is_nested_deeper(plain, MAX_INFO_NESTING, text=text):
        raise ValueError(f"{source} returned info that is nested more than {MAX_INFO_NESTING} levels deep")
    return plain

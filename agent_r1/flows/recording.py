"""Convert what an environment returns into a form that a trajectory file can hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from agent_r1.data.files import is_nested_deeper
from agent_r1.text import sanitize
from agent_r1.tokens.conversations import Exchange
from agent_r1.types import MAPPING, Step, ToolCallRecord, Transition

MAX_INFO_CHARS = 100_000
MAX_INFO_NESTING = 80  # deeper than the arguments of a call may be

TokenSpan = Callable[[int, int], tuple[int, int]]  # characters [start, end) of the response -> its tokens [start, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """A response that overlapping calls may wait for; see `Episode.respond`."""

    text: str  # without the stop token; ends before a stop text
    step: Step  # the recorded step; its ids end with a stop text
    extends: bool  # the prompt continues an earlier exchange with its exact ids
    exchange: Exchange  # the exchange that later calls may continue

    @property
    def token_ids(self) -> list[int]:
        return self.step.response_ids


def attach_transition(
    step: Step, transition: Transition, *, source: str, seconds: float = 0.0, token_span: TokenSpan | None = None
) -> None:
    """Add the transition to the step, in a form that a trajectory file can hold. Errors name `source`.

    Changes the step itself, which only its episode knows so far: a copy would take longer than all the rest.
    """
    changes: dict[str, object] = {
        "reward": step.reward + float(transition.reward),
        "calls": step.calls + tuple([_recordable_call(call, source, token_span) for call in transition.calls]),
        "feedback": "\n".join(filter(None, (step.feedback, sanitize(transition.feedback)))),
        "env_seconds": step.env_seconds + seconds,
        "info": {**step.info, **_recordable(transition.info, source)},
    }
    for name, value in changes.items():
        object.__setattr__(step, name, value)


def _recordable_call(call: ToolCallRecord, source: str, token_span: TokenSpan | None) -> ToolCallRecord:
    return replace(
        call,
        token_span=None if token_span is None else token_span(*call.text_span),
        reward=float(call.reward),
        result=sanitize(call.result),
        arguments=_recordable(call.arguments, source),
        info=_recordable(call.info, f"tool {call.name!r}" if call.name else source),
    )


def _recordable(info: Mapping[str, Any], source: str) -> dict[str, Any]:
    if len(info) <= 16 and all(type(key) is str and _is_short(key) and _is_short(info[key]) for key in info):
        return dict(info)  # short, and JSON would give back the same
    try:
        text = json.dumps(dict(info))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{source}: info and arguments must be JSON: {error}") from error
    if len(text) > MAX_INFO_CHARS:
        raise ValueError(f"{source} returned info of {len(text)} characters; at most {MAX_INFO_CHARS} can be recorded")
    plain: dict[str, Any] = json.loads(sanitize(text))
    if is_nested_deeper(plain, MAX_INFO_NESTING, text=text):
        raise ValueError(f"{source} returned info that is nested more than {MAX_INFO_NESTING} levels deep")
    return plain


def _is_short(value: object) -> bool:
    """Whether JSON reads the value back as it is, and writes at most 3,000 characters."""
    if type(value) is str:
        return len(value) <= 500 and value.isascii()
    return value is None or type(value) in (bool, float) or (type(value) is int and value.bit_length() < 64)


def text_size(value: object) -> int:
    """The characters of all strings in a nested value, including contents in parts and tool calls."""
    if isinstance(value, str):
        return len(value)
    items = value.values() if isinstance(value, MAPPING) else value if isinstance(value, list | tuple) else ()
    return sum([len(item) if type(item) is str else text_size(item) for item in items])


def sanitize_messages(value: Any) -> Any:
    """A copy of messages for people, whose text can be printed and stored."""
    if isinstance(value, str):
        return sanitize(value)
    if isinstance(value, Mapping):
        return {key: sanitize_messages(item) for key, item in value.items()}
    return [sanitize_messages(item) for item in value] if isinstance(value, list | tuple) else deepcopy(value)

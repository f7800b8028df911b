"""The pictures that a record of an episode names: where they were shown, and how their tokens are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent_r1.vision.pictures import index_of, key_of

KEY_DIGITS = 12  # hex digits of the picture's name that its token ids encode


def names_in(content: Any) -> list[str]:
    """The names of the pictures of a stored content."""
    parts = content if isinstance(content, list) else []
    return [part["image"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("image"), str)]


def names_added(record: Mapping[str, Any], index: int) -> list[str]:
    """The names of the pictures with which an environment answered a step, in order; those of calls are not repeated.

    If the next prompt continues this one, they are exactly what it adds; otherwise those that this prompt lacks.
    """
    steps = record["steps"]
    step = steps[index]
    if index + 1 < len(steps):
        later, names = steps[index + 1]["prompt_ids"], steps[index + 1].get("pictures")
    else:
        later, names = record.get("next_prompt_ids") or [], record.get("next_pictures")
    if not names or any(call.get("pictures") for call in step["calls"]):
        return []
    before = [*step["prompt_ids"], *step["response_ids"]]
    if later[: len(before)] != before:
        return [str(name) for name in names if name not in (step.get("pictures") or ())]
    by_key = {str(name)[:KEY_DIGITS]: str(name) for name in names}
    found = [f"{key_of(token):012x}" for token in later[len(before) :] if token < 0 and index_of(token) == 0]
    return [by_key[key] for key in found if key in by_key]


def spell_pictures(ids: Sequence[int], texts: list[str]) -> list[str]:
    """The texts of tokens, with a mark for the first token of each picture and a sign for the others."""
    marks = (f"[image {key_of(token):012x}"[:13] + "]" if index_of(token) == 0 else "\u25aa" for token in ids)
    return [mark if token < 0 else text for token, text, mark in zip(ids, texts, marks, strict=True)]

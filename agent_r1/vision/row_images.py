"""Pictures of rows as they are published: a column of them beside a prompt that says where each is shown.

The column is `images`, or `image` if there is one picture: `{bytes, path}` as the datasets library stores them, paths,
data URLs or PIL images. The prompt says `<image>` in a text, or has a part `{"type": "image"}` without a picture.
Relative paths start in the folder of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_r1.errors import DataError
from agent_r1.vision.contents import Message
from agent_r1.vision.pictures import Picture, as_picture

MARK = "<image>"
COLUMNS = ("images", "image")


def take_images(
    record: Mapping[str, Any], messages: list[Message], *, place: str, folder: Path | None
) -> tuple[Mapping[str, Any], list[Message]]:
    """Put the pictures of the column into the messages. Returns the record without the column."""
    marks = sum(1 for message in messages for part in _parts(message) if part is None)
    column = next((name for name in COLUMNS if record.get(name) is not None), None)
    if column is None or (column == "image" and not marks):  # `image` may be anything
        return record, messages
    images = _as_list(record[column])
    if marks != len(images):
        raise DataError(
            f"{place} has {len(images)} pictures in {column!r}, and its prompt shows {marks}: write {MARK} where each "
            "picture belongs"
        )
    left = iter([as_picture(each, what=f"{place}: picture {n}", folder=folder) for n, each in enumerate(images)])
    shown = [_with_images(message, left) for message in messages]
    return {key: value for key, value in record.items() if key != column}, shown


def _as_list(images: Any) -> Sequence[Any]:
    one = isinstance(images, Mapping | str | bytes | Path | Picture) or not isinstance(images, Iterable)
    return [images] if one or hasattr(images, "convert") else list(images)


def _parts(message: Message) -> Iterator[dict[str, Any] | None]:
    """Yield the parts of the content, and None in place of each picture from the column."""
    content = message.get("content")
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or ():
        if not isinstance(part, Mapping):
            raise DataError(f"a part of a content must be a mapping, got {part!r:.80}")
        if part.get("type") == "image" and not any(part.get(key) is not None for key in part if key != "type"):
            yield None
        elif part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            yield dict(part)
        else:
            for index, text in enumerate(part["text"].split(MARK)):
                yield from [None] if index else []
                yield from [{**part, "text": text}] if text else []


def _with_images(message: Message, left: Iterator[Picture]) -> Message:
    parts = list(_parts(message))
    if None not in parts:
        return message
    return {**message, "content": [{"type": "image", "image": next(left)} if part is None else part for part in parts]}

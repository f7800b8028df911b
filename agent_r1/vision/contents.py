"""Contents of messages with pictures: read any spelling, build new ones, and describe them as text for people.

Published rows often have a column of pictures beside a prompt that says where each is shown. The column is `images`,
or `image` if there is one picture: `{bytes, path}` as the datasets library stores them, paths, data URLs or PIL images.
The prompt says `<image>` in a text, or has a part `{"type": "image"}` without a picture. Relative paths start in the
folder of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_r1.errors import DataError
from agent_r1.vision.pictures import MAX_PER_MESSAGE, Picture, as_picture, check_all, image_part

Message = dict[str, Any]

MARK = "<image>"
COLUMNS = ("images", "image")


def read_pictures(messages: list[Message], start: int = 0, *, folder: Path | None = None) -> list[Message]:
    """The messages with every picture, in any spelling, as {"type": "image", "image": Picture}. Relative paths start in
    the folder, or where the program was started."""
    new = messages[start:]
    if {type(message.get("content")) for message in new} <= {str}:  # nearly always
        return messages
    read = [_with_pictures(message, f"message {index}", folder) for index, message in enumerate(new, start)]
    changed = any(now is not before for now, before in zip(read, new, strict=True))
    return [*messages[:start], *read] if changed else messages


def _with_pictures(message: Message, place: str, folder: Path | None) -> Message:
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    parts, count = [], 0
    for index, part in enumerate(content):
        given = _without_nulls(part)
        read = image_part(given, what=f"part {index} of {place}", folder=folder)
        parts.append(given if read is None else read)
        count += read is not None
    if count > MAX_PER_MESSAGE:
        raise ValueError(f"{place} has {count} pictures; at most {MAX_PER_MESSAGE} are accepted")
    changed = any(now is not before for now, before in zip(parts, content, strict=True))
    return {**message, "content": parts} if changed else message


def _without_nulls(part: Any) -> Any:
    """Drop keys that only other parts of the table use: chat templates take any key `image` for a picture."""
    has_nulls = isinstance(part, Mapping) and any(value is None for value in part.values())
    return {key: value for key, value in part.items() if value is not None} if has_nulls else part


def shown_content(text: str, images: Sequence[Any], *, what: str) -> str | list[dict[str, Any]]:
    """A content with a text and the pictures after it; only the text if there are none. Damaged pictures raise here."""
    if not images:
        return text
    pictures = [as_picture(image, what=f"picture {index} of {what}") for index, image in enumerate(images)]
    check_all(pictures)
    words = [{"type": "text", "text": text}] if text else []
    return [*words, *({"type": "image", "image": picture} for picture in pictures)]


def picture_mark(picture: Picture | str) -> str:
    """The text that stands for a picture where only text can be shown. It has no size if only the name is known."""
    size = f"{picture.width}x{picture.height} " if isinstance(picture, Picture) else ""
    return f"[image {size}{str(picture)[:6]}]"


def text_of(content: Any) -> str:
    """The text of a content for people, with marks for its pictures; also of a content that was stored."""
    if isinstance(content, list | tuple):
        return "\n".join(map(_part_text, content))
    return "" if content is None else str(content)


def _part_text(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    if isinstance(image := part.get("image"), Picture | str):
        return picture_mark(image)
    return str(part.get("text", part))


# a column of pictures


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

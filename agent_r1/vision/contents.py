"""Contents of messages with pictures: read any spelling, build new ones, and describe them as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_r1.vision.pictures import MAX_PER_MESSAGE, Picture, as_picture, check_all, image_part

Message = dict[str, Any]


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

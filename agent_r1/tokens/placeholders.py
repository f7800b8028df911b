"""Pictures in a prompt: the placeholder that a chat template writes for each becomes the ids of that picture.

This happens once, when the text is first written; ids are never expanded again. There must be as many placeholders as
pictures. Text from outside that looks like a placeholder has been cut (`control_tokens.py`), so it does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agent_r1.errors import DataError
from agent_r1.types import Message
from agent_r1.vision.pictures import Picture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agent_r1.vision.picture_format import PictureFormat


class Placeholders:
    """The placeholders of one tokenizer. Without a format, the model takes text only."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, form: PictureFormat | None) -> None:
        self._form = form
        self._id = None if form is None else tokenizer.get_vocab().get(form.placeholder)
        if form is not None and self._id is None:
            raise DataError(f"the tokenizer has no token {form.placeholder!r}, which stands for a picture")

    def surround(self, text: str) -> str:
        """Add the tokens that stand around a picture and that the template does not write."""
        form = self._form
        if form is None or not (form.before or form.after):
            return text
        return text.replace(form.placeholder, f"{form.before}{form.placeholder}{form.after}")

    def fill(self, ids: list[int], pictures: Sequence[Picture]) -> list[int]:
        """Put the ids of the pictures, in their order, in place of the placeholders."""
        if self._form is None:
            if pictures:
                raise DataError(f"the messages have {len(pictures)} pictures, but the model takes text only")
            return ids
        places = ids.count(self._id)  # type: ignore[arg-type]  # an id is known if there is a format
        if places != len(pictures):
            raise DataError(
                f"the chat template wrote {places} placeholders for {len(pictures)} pictures: it does not show "
                "pictures of some role. Show them in a user message (for results of tools: "
                "task.env_kwargs.tool_role=user), or set another template (model.chat_template)"
            )
        shown = iter(pictures)
        filled: list[int] = []
        for token in ids:
            filled += self._form.ids(next(shown)) if token == self._id else [token]
        return filled


def as_parts(message: Message) -> Message:
    """Return the message with its text as a part: some templates (SmolVLM's) ignore contents that are strings."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def picture_name(value: Any) -> str:
    """For `json.dumps`: a picture is written as its name."""
    if isinstance(value, Picture):
        return value.name
    raise TypeError(f"not JSON: {type(value).__name__}")

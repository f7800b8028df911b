"""Create a vision-language model of 1.6M parameters for a task with pictures in seconds: no hub, no download.

The network is that of `vision_quickstart`; the tokenizer is trained on the text of the task.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from agent_r1.data.rows import Demo
from agent_r1.recipes.gridworld import task
from agent_r1.recipes.quickstart import tiny as text_only
from agent_r1.recipes.vision_quickstart.tiny import (
    CHAT_TEMPLATE,
    PICTURE,
    PREPROCESSOR,
    VISION_END,
    VISION_START,
    make_network,
)
from agent_r1.tools.base import BaseTool
from agent_r1.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEXT_ROWS = 500  # demonstrations that the tokenizer learns from


def make_tiny_model(directory: str | Path, seed: int) -> None:
    """Write config, random weights (a function of `seed`), tokenizer and preprocessor config to `directory`."""
    write_model(directory, seed, make_tokenizer(task.demos(TEXT_ROWS, seed=0), ()))


def write_model(directory: str | Path, seed: int, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.save_pretrained(directory)
    make_network(tokenizer, seed).save_pretrained(directory)
    text = json.dumps(PREPROCESSOR, indent=2) + "\n"
    Path(directory, "preprocessor_config.json").write_text(text, encoding="utf-8")


def make_tokenizer(
    demos: Sequence[Demo], tools: Sequence[BaseTool], template: Path = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """A tokenizer for the text of demonstrations, with the tokens that stand around a picture."""
    texts = [(replace(row, prompt=[_without_pictures(message) for message in row.prompt]), said) for row, said in demos]
    tokenizer = text_only.make_tokenizer(texts, tools)
    tokens = [text_only.TURN_START, VISION_START, VISION_END, PICTURE]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def _without_pictures(message: Message) -> Message:
    content = message["content"]
    parts = [] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
    return {**message, "content": content if isinstance(content, str) else "\n".join(parts)}

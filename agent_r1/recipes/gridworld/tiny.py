"""Create a vision-language model of 1.6M parameters for a task with pictures in seconds: no hub, no download.

The network is the one of `vision_quickstart`; the tokenizer is trained on the text of the task. The name of a cell is
one token, and so is its content. Captions and walks share these tokens, so walks benefit from what captions teach.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Regex

from agent_r1.recipes.gridworld import task
from agent_r1.recipes.gridworld.lake import SIDE
from agent_r1.recipes.quickstart import tiny as text_only
from agent_r1.recipes.vision_quickstart.tiny import (
    CHAT_TEMPLATE,
    PATCH,
    PICTURE,
    PREPROCESSOR,
    VISION_END,
    VISION_START,
    make_network,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VISION_TOKENS = (VISION_START, VISION_END, PICTURE)
TEXT_ROWS = 500  # demonstrations that the tokenizer learns from
# Text that never merges with its neighbours: cells, their contents, and the header of a turn.
PIECES = Regex(" [a-d][1-4]| [A-Z][a-z]*|(?:system|user|assistant|tool)\\n")
PATCHES_PER_SIDE = SIDE * task.CELL_PIXELS // PATCH


def make_tiny_model(directory: str | Path, seed: int) -> None:
    """Write config, random weights (a function of `seed`), tokenizer and preprocessor config to `directory`."""
    write_model(directory, seed, make_tokenizer())


def make_tokenizer() -> PreTrainedTokenizerFast:
    demos = task.demos(TEXT_ROWS, seed=0)
    return text_only.make_tokenizer(demos, (), template=CHAT_TEMPLATE, special=VISION_TOKENS, pieces=PIECES)


def write_model(directory: str | Path, seed: int, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a model with this tokenizer, which must have the `VISION_TOKENS`."""
    tokenizer.save_pretrained(directory)
    make_network(tokenizer, seed, PATCHES_PER_SIDE).save_pretrained(directory)
    text = json.dumps(PREPROCESSOR, indent=2) + "\n"
    Path(directory, "preprocessor_config.json").write_text(text, encoding="utf-8")

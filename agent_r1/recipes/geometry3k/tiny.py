"""A tiny vision-language model for the synthetic problems, with the chat template that Qwen2.5-VL gets."""

from __future__ import annotations

from pathlib import Path

from agent_r1.recipes.geometry3k import synthetic, task
from agent_r1.recipes.gridworld.tiny import VISION_TOKENS, write_model
from agent_r1.recipes.quickstart.tiny import make_tokenizer

CHAT_TEMPLATE = Path(__file__).with_name("qwen_vl_tools.jinja")
TEXT_ROWS = 200  # demonstrations that the tokenizer learns from


def make_tiny_model(directory: str | Path, seed: int) -> None:
    """Write config, random weights (a function of `seed`), tokenizer and preprocessor config to `directory`."""
    demos = synthetic.demos(TEXT_ROWS, seed=0)
    tokenizer = make_tokenizer(demos, [task.zoom], template=CHAT_TEMPLATE, special=VISION_TOKENS)
    write_model(directory, seed, tokenizer)

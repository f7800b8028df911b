"""Say what a picture shows. Too hard for its model, so the reward pays for letters, to give a signal."""

from __future__ import annotations

import json
from pathlib import Path

from agent_r1 import tool
from agent_r1.tools.base import ToolResult
from agent_r1.types import TaskRow, Trajectory
from tests.vision.tiny_models import make_model as make_network
from tests.vision.tiny_models import make_tokenizer, picture

# Not the numbers that a model without this file would get.
PREPROCESSOR = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.3, 0.2, 0.1]}
CALL = '<tool_call>{"name": "look", "arguments": {"at": %d}}</tool_call>'


def rows(split: str, count: int = 8) -> list[TaskRow]:
    start = 0 if split == "train" else 1000
    shown = [{"type": "image", "image": picture(start + i, 16, 24)} for i in range(count)]
    return [
        TaskRow(prompt=[{"role": "user", "content": [each, {"type": "text", "text": "what?"}]}], row_id=f"{split}-{i}")
        for i, each in enumerate(shown)
    ]


@tool
def look(at: int) -> ToolResult:
    """Look at a place."""
    return ToolResult(f"place {at}", images=[picture(at, 24, 16)])


def demos(count: int, seed: int) -> list[tuple[TaskRow, list[str]]]:
    """A look, then an answer."""
    return [(row, [CALL % i, f"it is {i}"]) for i, row in enumerate(rows("train", count))]


def reward(row: TaskRow, trajectory: Trajectory) -> float:
    text = trajectory.final_text
    return sum(char.isalpha() for char in text) / max(1, len(text))


def make_model(directory: Path, seed: int) -> None:
    tokenizer = make_tokenizer("qwen3_vl")
    network, _ = make_network("qwen3_vl", tokenizer, seed)
    network.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    Path(directory, "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR), encoding="utf-8")

"""Look up a number with a tool and say it. What is sound comes first; everything below `reward` has one fault."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from tokenizers.normalizers import Lowercase
from transformers import LlamaConfig, LlamaForCausalLM

from agent_r1 import AgentEnv, tool
from agent_r1.recipes.quickstart.tiny import CALL_TAGS, CHAT_TEMPLATE
from agent_r1.tokens.formats.table import get_format
from agent_r1.types import Action, Observation, TaskRow, Trajectory, Transition
from tests import chatml

NAMES = ("Anna", "Berta", "Carla", "Dora", "Emma", "Frida")


def answer_of(name: str) -> str:
    return f"Number {ord(name[0]) * 7 + len(name)}"


def rows(split: str) -> list[TaskRow]:
    names = [name if split == "train" else f"{name}-Maria" for name in NAMES]
    return [
        TaskRow(
            row_id=f"{split}-{name}",
            prompt=[{"role": "user", "content": f"Which number has {name}?"}],
            reward_model={"ground_truth": answer_of(name)},
        )
        for name in names
    ]


@tool
async def look_up(name: str) -> str:
    """Find the number of a person."""
    return answer_of(name)


def demos(count: int, seed: int) -> list[tuple[TaskRow, list[str]]]:
    return [demo(row, "look_up") for row in rows("train")][:count]


def demo(row: TaskRow, called: str) -> tuple[TaskRow, list[str]]:
    name = str(row.row_id).removeprefix("train-")
    return row, [get_format("hermes").write_call(called, {"name": name}), answer_of(name)]


def make_model(
    directory: Path, seed: int, *, embedded: int | None = None, lowers: bool = False, ends: bool = True
) -> None:
    """Byte-level tokens, the quickstart's chat template, and hardly any weights."""
    chatml.tokenizer.cache_clear()  # it is changed below
    tokenizer = chatml.tokenizer()
    chatml.tokenizer.cache_clear()
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in CALL_TAGS])
    tokenizer.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    if lowers:
        tokenizer.backend_tokenizer.normalizer = Lowercase()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=embedded or len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None if embedded else tokenizer.pad_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    if not ends:
        tokenizer.eos_token = None
    tokenizer.save_pretrained(directory)


def reward(row: TaskRow, trajectory: Trajectory) -> float:
    return float(trajectory.final_text == row.ground_truth)


def for_a_box(row: TaskRow, trajectory: Trajectory) -> float:
    return float(trajectory.final_text == f"\\boxed{{{row.ground_truth}}}")


def graded(row: TaskRow, trajectory: Trajectory) -> float:
    """From 0.3 for Anna to 1 for Emma and Frida."""
    return reward(row, trajectory) * min(1.0, 0.3 + 0.2 * NAMES.index(str(row.row_id).removeprefix("train-")))


# Rewards


def never(row: TaskRow, trajectory: Trajectory) -> float:
    return 0.0


def for_anything(row: TaskRow, trajectory: Trajectory) -> float:
    return 1.0 + 0.01 * len(trajectory.steps)


def broken(row: TaskRow, trajectory: Trajectory) -> float:
    raise KeyError("gold")


def not_a_number(row: TaskRow, trajectory: Trajectory) -> float:
    return float("nan")


def huge(row: TaskRow, trajectory: Trajectory) -> float:
    return 1000 * reward(row, trajectory)


_drawn = itertools.count()


def by_luck(row: TaskRow, trajectory: Trajectory) -> float:
    return reward(row, trajectory) - 0.001 * next(_drawn)


# Rows


def rows_with_answers(split: str) -> list[TaskRow]:
    return [
        replace(row, prompt=[{"role": "user", "content": f"{row.prompt[0]['content']} ({row.ground_truth})"}])
        for row in rows(split)
    ]


def long_rows(split: str) -> list[TaskRow]:
    return [replace(row, prompt=[{"role": "user", "content": f"{row.row_id} " * 60}]) for row in rows(split)]


def same_rows(split: str) -> list[TaskRow]:
    return [replace(row, row_id=f"{split}-{row.row_id}") for row in rows("train")]


def bare_rows(split: str) -> list[TaskRow]:
    return [replace(row, reward_model={}) for row in rows(split)]


def rows_with_one_long(split: str) -> list[TaskRow]:
    """Only a held-out row is long."""
    found = rows(split)
    return found if split == "train" else [*found[1:], *long_rows(split)[:1]]


def rows_with_numbers(split: str) -> list[TaskRow]:
    """Short numeric answers, which extra_info repeats as text beside other short numbers."""
    found = enumerate(rows(split), 10)
    return [
        replace(row, reward_model={"ground_truth": number}, extra_info={"note": str(number), "size": 12})
        for number, row in found
    ]


def rows_with_notes(split: str) -> list[TaskRow]:
    return [replace(row, extra_info={"note": row.ground_truth}) for row in rows(split)]


# Demonstrations


def calling_another_tool(count: int, seed: int) -> list[tuple[TaskRow, list[str]]]:
    return [demo(row, "find") for row in rows("train")][:count]


def not_calling(count: int, seed: int) -> list[tuple[TaskRow, list[str]]]:
    return [(row, [row.ground_truth]) for row in rows("train")][:count]


# Tools and environments


@tool(name="look_up")
async def slow_look_up(name: str) -> str:
    """Find the number of a person."""
    await asyncio.sleep(60)
    return answer_of(name)


@tool(name="look_up")
async def stubborn_look_up(name: str) -> str:
    """Find the number of a person."""
    for _ in range(9):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue
    return answer_of(name)


class Asks(AgentEnv):
    """Asks once. Sound, but without a tool."""

    async def reset(self, row: TaskRow) -> Observation:
        return Observation(messages=list(row.prompt))

    async def step(self, action: Action) -> Transition:
        return Transition(terminated=True)


class Tells(Asks):
    async def reset(self, row: TaskRow) -> Observation:
        note: Any = row.extra_info["note"]
        return Observation(messages=[*row.prompt, {"role": "user", "content": f"Hint: {note}"}])


class Counts(Asks):
    episodes = itertools.count()

    async def reset(self, row: TaskRow) -> Observation:
        return Observation(messages=[*row.prompt, {"role": "user", "content": f"Episode {next(self.episodes)}"}])


class Blocks(Asks):
    async def step(self, action: Action) -> Transition:
        while not Path(os.environ["BLOCKED_UNTIL"]).exists():
            time.sleep(0.01)
        return Transition(terminated=True)


class ShowsMuch(Asks):
    """The row does not tell how long its first prompt is."""

    async def reset(self, row: TaskRow) -> Observation:
        return Observation(messages=[*row.prompt, {"role": "user", "content": "and so on, " * 40}])


class ClosesOnce(Asks):
    closed = False

    async def close(self) -> None:
        if self.closed:
            raise RuntimeError("already closed")
        self.closed = True


# Models


def make_small(directory: Path, seed: int) -> None:
    make_model(directory, seed, embedded=200)


def make_endless(directory: Path, seed: int) -> None:
    make_model(directory, seed, ends=False)


def make_lowering(directory: Path, seed: int) -> None:
    make_model(directory, seed, lowers=True)

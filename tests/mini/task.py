"""Double a number with a tool. Too hard for its model, so the reward also pays for letters to give a signal."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agent_r1 import AgentEnv, tool
from agent_r1.types import Action, Observation, TaskRow, Trajectory, Transition
from tests.chatml import tokenizer


def rows(split: str, count: int = 20) -> list[TaskRow]:
    start = 0 if split == "train" else 1000
    return [
        TaskRow(
            prompt=[{"role": "user", "content": f"double {start + i}"}],
            row_id=f"{split}-{i}",
            reward_model={"ground_truth": 2 * (start + i)},
        )
        for i in range(count)
    ]


@tool
async def double(number: int) -> str:
    """Twice a number."""
    return str(2 * number)


class Endless(AgentEnv):
    """Never ends, and pays a little for every vowel."""

    async def reset(self, row: TaskRow) -> Observation:
        self.messages = list(row.prompt)
        return Observation(messages=list(self.messages))

    async def step(self, action: Action) -> Transition:
        self.messages += [{"role": "assistant", "content": action.text}, {"role": "user", "content": "and?"}]
        paid = 0.1 * sum(char in "aeiou" for char in action.text)
        return Transition(observation=Observation(messages=list(self.messages)), reward=paid)


def demos(count: int, seed: int) -> list[tuple[TaskRow, list[str]]]:
    """A call, then an answer."""
    call = '<tool_call>{"name": "double", "arguments": {"number": %d}}</tool_call>'
    return [(row, [call % i, f"it is {2 * i}"]) for i, row in enumerate(rows("train", count))]


def reward(row: TaskRow, trajectory: Trajectory) -> float:
    """The share of letters in what was said."""
    text = trajectory.final_text
    return sum(char.isalpha() for char in text) / max(1, len(text))


def make_model(directory: Path, seed: int) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer().save_pretrained(directory)

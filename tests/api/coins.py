"""How many coins has somebody? One tool, two steps; the demonstrator mostly gives up. Learned in seconds."""

from __future__ import annotations

import random
from typing import Any

import agent_r1 as ar

NAMES = ["Ada", "Ben", "Cleo", "Dov", "Elin", "Faro", "Gale", "Hugo", "Iris", "Jon"]
NAMES += ["Kira", "Lena", "Milo", "Nora", "Otto", "Pia", "Quin", "Rosa", "Sami", "Tess"]
COINS = {name: 10 + 7 * index % 90 for index, name in enumerate(NAMES)}
EFFORT = 0.35  # how often the demonstrator looks the number up


@ar.tool
async def lookup(name: str) -> str:
    """How many coins a person has."""
    if name not in COINS:
        raise ar.ToolError(f"nobody is called {name!r}")
    return str(COINS[name])


def question(name: str) -> str:
    return f"How many coins has {name}?"


def reward(row: ar.TaskRow, trajectory: ar.Trajectory) -> float:
    return float(trajectory.final_text.strip() == row.ground_truth)


def demos(count: int, seed: int) -> list[tuple[ar.TaskRow, list[str]]]:
    rng = random.Random(seed)
    shown = []
    for index, name in enumerate(rng.choices(NAMES, k=count)):
        row = ar.TaskRow(prompt=[{"role": "user", "content": question(name)}], row_id=f"demo-{index}")
        call = f'<tool_call>{{"name": "lookup", "arguments": {{"name": "{name}"}}}}</tool_call>'
        shown.append((row, [call, str(COINS[name])] if rng.random() < EFFORT else ["I do not know"]))
    return shown


ROWS = [
    {"prompt": question(name), "row_id": name, "reward_model": {"ground_truth": str(coins)}}
    for name, coins in COINS.items()
]
TASK: dict[str, Any] = {"rows": ROWS, "tools": [lookup], "reward": reward, "model": "tiny", "demos": demos}
SETTINGS: dict[str, Any] = {
    "sft": {"count": 600, "epochs": 2, "batch_size": 8, "lr": 1.5e-3, "warmup_steps": 20},
    "rollout": {
        "rows_per_step": 8, "group_size": 8, "max_steps": 4, "max_response_tokens": 24, "max_context_tokens": 256,
    },
    "engine": {"threads": 1, "max_cached_tokens": 16384},
    "learner": {"lr": 3e-4},
    "trainer": {"eval_every": 5, "save_every": 5, "threads": 1},
}  # fmt: skip
# The same model and warm start, in steps and evaluations too small to learn from.
SMALL = SETTINGS | {"rollout": SETTINGS["rollout"] | {"rows_per_step": 2, "group_size": 2}, "eval": {"rows": 2}}

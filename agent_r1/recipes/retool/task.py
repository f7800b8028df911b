"""Mathematics with a Python interpreter: rows and reward. See README.md; `data.py` has the data.

The reward is `correct`; all components are reported:
correct   1 if the answer in \\boxed{} is the same as the true one (`answers.py`)
format    1 if the episode ended with a message that holds an answer in \\boxed{}
ran       programs that ran
failed    programs that raised or were stopped
earned    the sum of their process rewards (`paid.py`); 0 without the preset `process`
"""

from __future__ import annotations

from agent_r1.data.downloads import data_folder
from agent_r1.envs.python_env import PythonEnv as PythonEnv
from agent_r1.recipes.retool.answers import require_math_verify, same_answer
from agent_r1.recipes.retool.data import FOLDER, boxed, split_problems
from agent_r1.recipes.retool.paid import PaidPythonTool as PaidPythonTool
from agent_r1.tools.python.tool import PythonTool as PythonTool
from agent_r1.types import StopReason, TaskRow, Trajectory

INSTRUCTION = (
    "Solve the problem. Think step by step, and leave calculations to the tool python. "
    "When you know the answer, write it as \\boxed{answer}."
)


def rows(split: str, count: int | None = None, path: str | None = None) -> list[TaskRow]:
    """Return the first `count` problems of a split: train, test (MATH-500), or a set named in `data.SOURCES`."""
    require_math_verify()
    found = split_problems(data_folder(FOLDER, path), split)[:count]
    return [as_row(p.text, p.answer, f"{split}-{index}", source) for index, (source, p) in enumerate(found)]


def as_row(text: str, answer: str, row_id: str, source: str) -> TaskRow:
    return TaskRow(
        prompt=[{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": text}],
        row_id=row_id,
        reward_model={"style": "rule", "ground_truth": answer},
        data_source=source,
    )


async def reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    answer = boxed(trajectory.final_text) if trajectory.stop is StopReason.ANSWERED else None
    correct = float(bool(answer) and await same_answer(str(row.ground_truth), answer or ""))
    calls = [call for step in trajectory.steps for call in step.calls]
    return {
        "reward": correct,
        "correct": correct,
        "format": float(bool(answer)),
        "ran": float(sum(call.fault is None for call in calls)),
        "failed": float(sum(call.fault == "failed" for call in calls)),
        "earned": sum(call.reward for call in calls),
    }

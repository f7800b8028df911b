"""Plane geometry with figures, and a tool to look closer. See README.md; `data.py` has the problems.

The reward is `correct`; all components are reported:
correct   1 if the answer in \\boxed{} is the same as the true one (`retool/answers.py`)
format    1 if the episode ended with a message that holds an answer in \\boxed{}
zooms     the number of pictures that `zoom` returned
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from agent_r1.errors import DataError
from agent_r1.recipes.geometry3k.data import problems
from agent_r1.recipes.retool.answers import require_math_verify, same_answer
from agent_r1.recipes.retool.data import boxed
from agent_r1.tools.base import FromRow, ToolError, ToolResult, tool
from agent_r1.types import StopReason, TaskRow, Trajectory
from agent_r1.vision.pictures import Picture, as_picture, pictures_of

SCALE = 1000  # coordinates go from 0 to this, as Qwen3-VL learned to point
SMALLEST = 20  # smallest side of a part, on that scale


@tool
def zoom(
    picture: Annotated[int, "number of the picture; the first one is 1"],
    x0: Annotated[float, "left edge"],
    y0: Annotated[float, "top edge"],
    x1: Annotated[float, "right edge"],
    y1: Annotated[float, "bottom edge"],
    pictures: FromRow[list[Picture]],
) -> ToolResult:
    """Enlarge a part of a picture. Edges go from 0 (left, top) to 1000 (right, bottom)."""
    if not 1 <= picture <= len(pictures):
        raise ToolError(f"there is no picture {picture}; pictures are numbered from 1 to {len(pictures)}")
    if min(x0, y0) < 0 or max(x1, y1) > SCALE or min(x1 - x0, y1 - y0) < SMALLEST:
        raise ToolError(
            f"({x0:g}, {y0:g}) to ({x1:g}, {y1:g}) is not a part of a picture: edges go from 0 to {SCALE}, and width "
            f"and height are at least {SMALLEST}"
        )
    pictures.append(enlarged(pictures[picture - 1], (x0, y0, x1, y1)))
    return ToolResult(f"Picture {len(pictures)}:", images=[pictures[-1]])


def enlarged(picture: Picture, box: Sequence[float]) -> Picture:
    """The part of a picture in a box, as large as the picture's longer side allows."""
    from PIL import Image

    edges = [edge * side / SCALE for edge, side in zip(box, 2 * (picture.width, picture.height), strict=True)]
    left, top, right, bottom = int(edges[0]), int(edges[1]), -int(-edges[2] // 1), -int(-edges[3] // 1)
    scale = max(picture.width, picture.height) / max(right - left, bottom - top)
    size = (max(1, round((right - left) * scale)), max(1, round((bottom - top) * scale)))
    try:
        return as_picture(picture.image().crop((left, top, right, bottom)).resize(size, Image.Resampling.BICUBIC))
    except DataError as error:  # the picture itself cannot be decoded, or the part is a mere line
        raise ToolError(str(error)) from error


def rows(split: str, count: int | None = None, path: str | None = None) -> list[TaskRow]:
    """Return the first `count` problems of a split: train, validation or test."""
    require_math_verify()
    return [with_tools(row) for row in problems(split, path)[:count]]


def with_tools(row: TaskRow) -> TaskRow:
    """Let `zoom` see the pictures of the prompt; it adds its own."""
    return replace(row, env_kwargs={"tools_kwargs": {"zoom": {"pictures": pictures_of(row.prompt)}}})


async def reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    answer = boxed(trajectory.final_text) if trajectory.stop is StopReason.ANSWERED else None
    correct = float(bool(answer) and await same_answer(as_latex(row.ground_truth), as_latex(answer or "")))
    zooms = sum(len(call.pictures) for step in trajectory.steps for call in step.calls)
    return {"reward": correct, "correct": correct, "format": float(bool(answer)), "zooms": float(zooms)}


def as_latex(answer: str) -> str:
    """Replace signs such as ° by LaTeX."""
    return answer.replace("°", "^\\circ").replace("√", "\\sqrt").replace("π", "\\pi")

"""Episodes as columns of numbers. Each block of summaries is converted once; blocks are joined when some were added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_r1.serve.view.index.summary import Summary

NUMBERS = (
    "reward", "outcome", "steps", "calls", "bad_calls", "tokens", "prompt_tokens", "seconds", "sampling", "waiting",
)  # fmt: skip
NAMES = ("row", "stop", "tools", "roles")  # columns of codes; the last two are combinations, joined by zero characters
Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """The columns of some summaries, with codes of their own for names."""

    numbers: NDArray[Any]  # [summary, number]
    names: dict[str, list[str]]
    codes: dict[str, NDArray[Any]]

    def view(self, start: int, stop: int) -> Part:
        """Return some of the rows, without copying them."""
        codes = {column: values[start:stop] for column, values in self.codes.items()}
        return Part(self.numbers[start:stop], self.names, codes)

    @classmethod
    def of(cls, rows: Sequence[Summary]) -> Part:
        texts = {
            "row": [r.row for r in rows],
            "stop": [r.stop for r in rows],
            "tools": ["\0".join(r.tools) for r in rows],
            "roles": ["\0".join(r.roles) for r in rows],
        }
        names = {column: list(dict.fromkeys(values)) for column, values in texts.items()}
        codes = {}
        for column, values in texts.items():
            code = {name: number for number, name in enumerate(names[column])}
            codes[column] = np.array([code[value] for value in values], np.int32)
        return cls(np.array([[getattr(row, name) for name in NUMBERS] for row in rows], float), names, codes)


def join(files: Sequence[tuple[str, int, Sequence[Part]]]) -> tuple[Columns, Part]:
    """Return the columns of (kind, step, parts) of files: numbers, codes, the names of codes, and the default order.

    The part has the same numbers and codes, so that views of it can replace the parts.
    """
    parts = [part for _, _, some in files for part in some]
    counts = [sum(len(part.numbers) for part in some) for _, _, some in files]
    numbers = np.concatenate([np.zeros((0, len(NUMBERS))), *(part.numbers for part in parts)])
    columns: Columns = {name: numbers[:, index] for index, name in enumerate(NUMBERS)}
    columns["step"] = np.repeat(np.array([step for _, step, _ in files], int), counts)
    kinds = sorted({kind for kind, _, _ in files})
    columns["kind"] = np.repeat(np.array([kinds.index(kind) for kind, _, _ in files], np.int32), counts)
    columns["kind_names"] = np.array(kinds, object)
    whole = Part(numbers, {}, {})
    for column in NAMES:
        # Views of one table share its list of names, which may have some of files that are gone.
        lists = {id(part.names[column]): part.names[column] for part in parts}
        used = {key: np.zeros(len(names), bool) for key, names in lists.items()}
        for part in parts:
            used[id(part.names[column])][part.codes[column]] = True
        whole.names[column] = sorted({lists[key][number] for key in lists for number in np.flatnonzero(used[key])})
        code = {name: number for number, name in enumerate(whole.names[column])}
        new = {key: np.array([code.get(name, -1) for name in names], np.int32) for key, names in lists.items()}
        taken = (new[id(part.names[column])][part.codes[column]] for part in parts)
        columns[column] = whole.codes[column] = np.concatenate([np.zeros(0, np.int32), *taken])
        columns[f"{column}_names"] = np.array(whole.names[column], object)
    position = np.concatenate([np.zeros(0, int), *map(np.arange, counts)])
    columns["order"] = np.lexsort((position, columns["kind"], -columns["step"])).astype(np.int32)  # newest first
    return columns, whole


def thin(points: Sequence[Any], most: int) -> list[Any]:
    """Return at most so many of the points, evenly, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(index * (len(points) - 1) / max(1, most - 1))] for index in range(most)]

"""A synthetic corpus and questions, for a run that needs no data: rivers, the towns on them, and their mayors.

The question names a river, whose page names the town, whose page names the mayor: two searches, as in the real task.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

from agent_r1.data.downloads import data_dir
from agent_r1.data.rows import Demo
from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.recipes.hotpotqa.data import FOLDER, Question
from agent_r1.recipes.hotpotqa.task import as_row, expert_demos
from agent_r1.tools.search.corpus import Passage
from agent_r1.tools.search.index import MANIFEST, Index
from agent_r1.tools.search.lexical import LexicalSettings
from agent_r1.tools.search.tool import SearchTool
from agent_r1.types import TaskRow

STARTS = ("Al", "Bren", "Cor", "Dun", "El", "Far", "Gal", "Hol", "Ir", "Jan", "Kel", "Lor")
ENDS = ("by", "dale", "ford", "ham", "mere", "wick")
FIRST_NAMES = ("Ada", "Bo", "Cleo", "Dov", "Elin", "Faro", "Gita", "Hugo", "Ines", "Jon", "Kira", "Lev")
NUM_TRAIN = 48  # of the 72 towns; test questions ask for the mayors of the others


def world() -> list[tuple[str, str, str]]:
    """Return (river, town, mayor) triples, always the same."""
    names = ["".join(parts) for parts in product(STARTS, ENDS)]
    count = len(names)
    return [
        (f"{names[(31 * i + 7) % count]} River", name, f"{FIRST_NAMES[i % 12]} {names[(17 * i + 5) % count]}son")
        for i, name in enumerate(names)
    ]


def passages() -> list[Passage]:
    found = []
    for index, (river, town, mayor) in enumerate(world()):
        found.append(Passage(passage_id=f"r{index}", title=river, text=f"A river that flows past {town}."))
        found.append(Passage(passage_id=f"t{index}", title=town, text=f"A town whose mayor is {mayor}."))
    return found


def questions(split: str) -> list[Question]:
    if split not in ("train", "test"):
        raise ConfigError(f"unknown split {split!r}.{did_you_mean(split, ('train', 'test'))}")
    asked = [
        Question(text=f"Who is mayor of the town on the {river}?", answers=(mayor,), gold=(river, town), kind="bridge")
        for river, town, mayor in world()
    ]
    return asked[:NUM_TRAIN] if split == "train" else asked[NUM_TRAIN:]


def rows(split: str, count: int | None = None) -> list[TaskRow]:
    asked = questions(split)[:count]
    return [as_row(question, row_id=f"{split}-{question.key}", source="synthetic") for question in asked]


def demos(count: int, seed: int) -> list[Demo]:
    return expert_demos(SyntheticSearch(), questions("train"), count, seed)


class SyntheticSearch(SearchTool):
    """Searches the synthetic corpus. Builds its index on first use, which takes a second."""

    def __init__(self, *, index: str | Path | None = None, top_k: int = 2, max_chars: int = 60) -> None:
        place = data_dir(FOLDER) / "synthetic" if index is None else Path(index)
        if not _is_current(place):
            Index.build(passages(), place, lexical=LexicalSettings())
        super().__init__(index=place, top_k=top_k, max_chars=max_chars)


def _is_current(place: Path) -> bool:
    """Return whether a current index exists; a stale or damaged one is rebuilt."""
    if not (place / MANIFEST).is_file():
        return False
    try:
        return list(Index.open(place).corpus) == passages()
    except DataError:
        return False

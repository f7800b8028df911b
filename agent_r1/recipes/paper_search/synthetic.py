"""Synthetic papers, questions and a tiny model, for a run that needs no data.

Every paper extends another one, which it cites without naming it. A question names the older paper and asks for the one
that extends it: a search finds the older paper, and `expand` follows the citation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path

from agent_r1.data.downloads import data_dir
from agent_r1.data.rows import Demo
from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.recipes.paper_search.corpus import LocalPapers, build_library, open_library
from agent_r1.recipes.paper_search.data import FOLDER
from agent_r1.recipes.paper_search.env import INSTRUCTION, MAX_CALLS
from agent_r1.recipes.paper_search.papers import Paper
from agent_r1.recipes.paper_search.queries import Query
from agent_r1.recipes.paper_search.task import as_row, expert_demos
from agent_r1.recipes.paper_search.tools import Expand, Search
from agent_r1.types import TaskRow

STARTS = ("Al", "Bren", "Cor", "Dun", "El", "Far", "Gal", "Hol", "Ir", "Jan", "Kel", "Lor")
ENDS = ("by", "dale", "ford", "ham", "mere", "wick")
TASKS = ("parsing", "tagging", "summaries", "dialogue", "translation", "retrieval")
PEOPLE = ("Ada", "Bo", "Cleo", "Dov", "Elin", "Faro")
NUM_TRAIN = 48  # number of training questions; there are 72 in all


@lru_cache(maxsize=1)
def papers() -> tuple[Paper, ...]:
    """Return the papers, always the same; each extends the one that is 31 places before it."""
    names = ["".join(parts) for parts in product(STARTS, ENDS)]
    count = len(names)
    return tuple(
        Paper(
            paper_id=f"p{index}",
            title=f"{name} for {TASKS[index * 5 % 6]}",
            abstract="It extends earlier work.",
            year=2000 + index % 20,
            authors=(f"{PEOPLE[index % 6]} {name}son",),
            venue=f"Meeting {index % 4}",
            references=(f"p{(index - 31) % count}",),
        )
        for index, name in enumerate(names)
    )


def queries(split: str) -> list[Query]:
    if split not in ("train", "test"):
        raise ConfigError(f"unknown split {split!r}.{did_you_mean(split, ('train', 'test'))}")
    by_id = {paper.paper_id: paper for paper in papers()}
    asked = []
    for paper in papers():
        older, task = by_id[paper.references[0]].title.split()[0], paper.title.split()[-1]
        asked.append(Query(text=f"Which {task} extends {older}?", gold=(paper.key,), kind="synthetic"))
    return asked[:NUM_TRAIN] if split == "train" else asked[NUM_TRAIN:]


def rows(split: str, count: int | None = None) -> list[TaskRow]:
    return [as_row(query, split) for query in queries(split)[:count]]


def demos(count: int, seed: int) -> list[Demo]:
    return expert_demos(open_synthetic(), queries("train"), count, seed)


def open_synthetic(folder: Path | None = None) -> LocalPapers:
    """Return the library of the synthetic papers, built in a second on first use."""
    return library_of(papers(), data_dir(FOLDER) / "synthetic" if folder is None else folder)


def library_of(kept: tuple[Paper, ...], place: Path) -> LocalPapers:
    """Return the library of these papers, built again if the folder holds others."""
    try:
        found = open_library(place)
        if [found[index] for index in range(len(found))] == list(kept):
            return found
    except (ConfigError, DataError):  # missing, stale or damaged
        pass
    return build_library(kept, place)


class SyntheticSearch(Search):
    """Searches the synthetic papers."""

    def __init__(self, *, library: Path | None = None) -> None:
        super().__init__(library=open_synthetic(library).folder)


def make_model(directory: str | Path, seed: int) -> None:
    """Write a tiny random model whose tokenizer knows the words of the prompts."""
    from agent_r1.recipes.quickstart.tiny import make_tiny_model

    read = with_prompts(demos(NUM_TRAIN, seed=0), papers())
    make_tiny_model(directory, seed, demos=read, tools=[SyntheticSearch(), Expand()])


def with_prompts(shown: Sequence[Demo], known: Sequence[Paper]) -> list[Demo]:
    """Return the demonstrations with all that a prompt may show, for a tokenizer to learn from."""
    lines = "\n".join(
        f"[{number}] (0.{number:02}) [NEW] {paper.title}: {paper.abstract}".removesuffix(": ")
        for number, paper in enumerate(known)
    )
    said = "\n".join(
        f"search {paper.title}: found 10 papers, {number % 11} of them new" for number, paper in enumerate(known)
    )
    page = [
        {"role": "system", "content": INSTRUCTION.format(calls=MAX_CALLS)},
        {
            "role": "user",
            "content": f"### Question\n### Calls so far\n{said}\n### Papers ({len(known)} found)\n{lines}",
        },
    ]
    return [(TaskRow(prompt=[*page, *row.prompt]), texts) for row, texts in shown]

"""A few hundred generated papers that use each other's work, and three kinds of questions, to learn from on a CPU.

* `places` asks for the papers about two places: a search for both finds only some of them.
* `uses` asks for the papers on a task that use a named one: search for its name, then expand it.
* `chain` asks for those that use one of these: search, expand, find the right paper in the list, expand that.

Gold papers of test questions are about places that training questions never ask for. Most of `loose_demos` stop a step
too early, or search for the whole question and stop.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import combinations, islice, product
from pathlib import Path

from agent_r1.data.downloads import data_dir
from agent_r1.data.rows import Demo
from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.recipes.paper_search.agents import DONE, Call, Visit, one_search
from agent_r1.recipes.paper_search.corpus import CITED, LocalPapers
from agent_r1.recipes.paper_search.data import FOLDER
from agent_r1.recipes.paper_search.env import INSTRUCTION, MAX_CALLS
from agent_r1.recipes.paper_search.papers import Paper
from agent_r1.recipes.paper_search.queries import Query
from agent_r1.recipes.paper_search.synthetic import ENDS, STARTS, TASKS, library_of, with_prompts
from agent_r1.recipes.paper_search.task import as_row
from agent_r1.recipes.paper_search.tools import Expand, Search
from agent_r1.recipes.quickstart.task import FIRST_NAMES, LAST_NAMES
from agent_r1.types import TaskRow

PLACES = tuple(f"{start}{end.title()}" for start, end in product(STARTS, ENDS[:3]))
PER_PLACE = 8  # papers about a place, fewer than a search finds
COUNT = PER_PLACE * len(PLACES)
NUM_PARTS = 18  # first and last parts of names: few, so that a tiny model learns to copy them
TEST_SHARE = 0.3  # of the places
SPLITS = ("train", "test")
FIXED = (  # text of many prompts
    INSTRUCTION.format(calls=MAX_CALLS),
    f"(query): {Search.description}",
    f"(paper_id): {Expand.description}",
    CITED,
)
SHARES = {"expert": 0.25, "early": 0.5, "one_search": 0.25}  # of the demonstrations


@lru_cache(maxsize=1)
def papers() -> tuple[Paper, ...]:
    """Return the papers, always the same; two use each one of the first half."""
    rng = random.Random("papers")
    first, last = FIRST_NAMES.split()[:NUM_PARTS], LAST_NAMES.split()[:NUM_PARTS]
    names = rng.sample([f"{a}{b}" for a in first for b in last], COUNT)
    places = rng.sample(PLACES * PER_PLACE, COUNT)
    return tuple(
        Paper(
            paper_id=f"p{index}",
            title=f"{name} for {rng.choice(TASKS)} in {place}",
            references=(f"p{(index - 1) // 2}",) if index else (),
        )
        for index, (name, place) in enumerate(zip(names, places, strict=True))
    )


def name_of(paper: Paper) -> str:
    return paper.title.split()[0]


def task_of(paper: Paper) -> str:
    return paper.title.split()[2]


def place_of(paper: Paper) -> str:
    return paper.title.split()[-1]


def queries(split: str) -> list[Query]:
    """Return the questions of a split in a fixed, mixed order."""
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}.{did_you_mean(split, SPLITS)}")
    places = random.Random("places").sample(PLACES, len(PLACES))
    cut = int(TEST_SHARE * len(places))
    asked = set(places[:cut] if split == "test" else places[cut:])
    about = {paper.key: place_of(paper) for paper in papers()}
    kinds = [_places(sorted(asked)), _uses(), _chain()]
    kept = [[query for query in kind if all(about[key] in asked for key in query.gold)] for kind in kinds]
    rng, each = random.Random("order"), min(map(len, kept))  # as many of each kind
    chosen = [query for kind in kept for query in rng.sample(kind, each)]
    return rng.sample(chosen, len(chosen))


def _places(places: list[str]) -> Iterator[Query]:
    for one, other in combinations(places, 2):
        gold = tuple(paper.key for paper in papers() if place_of(paper) in (one, other))
        yield Query(text=f"Which papers are about {one} or {other}?", gold=gold, kind="places")


@cache
def _users(paper: Paper, task: str) -> list[Paper]:
    return [each for each in papers() if paper.paper_id in each.references and task_of(each) == task]


def _uses() -> Iterator[Query]:
    for paper, task in product(papers(), TASKS):
        if gold := _users(paper, task):
            text = f"Which {task} papers use {name_of(paper)}?"
            yield Query(text=text, gold=tuple(each.key for each in gold), kind="uses")


def _chain() -> Iterator[Query]:
    for paper, between, task in product(papers(), TASKS, TASKS):
        gold = [each for middle in _users(paper, between) for each in _users(middle, task)]
        if gold and between != task:
            text = f"Which {task} papers use {between} work that uses {name_of(paper)}?"
            yield Query(text=text, gold=tuple(each.key for each in gold), kind="chain")


def rows(split: str, count: int | None = None) -> list[TaskRow]:
    return [as_row(query, query.kind) for query in queries(split)[:count]]


def loose_demos(count: int, seed: int) -> list[Demo]:
    """Return training questions, each with an expert's responses or with a part of them."""
    library, rng = open_generated(), random.Random(f"demos:{seed}")
    shown: list[Demo] = []
    for query in islice(_forever(queries("train"), rng), count):
        [how] = rng.choices(list(SHARES), weights=list(SHARES.values()))
        said = one_search(query, library) if how == "one_search" else expert(query, library)
        shown.append((as_row(query, "train"), [*said[:-2], DONE] if how == "early" else said))
    return shown


def expert(query: Query, library: LocalPapers) -> list[str]:
    """Search for each name in the question, then expand the papers that lead to the gold ones."""
    words = query.text.rstrip("?").split()
    visit, tasks = Visit(query.text, library), [word for word in words if word in TASKS]
    for name in words[1:]:
        if name[0].isupper():
            visit.make([Call(name)])
    if tasks:
        visit.make([Call(1)])
    for between in tasks[1:]:
        visit.make([Call(each.number) for each in visit.papers.entries[1:] if task_of(each.paper) == between])
    return [*visit.said, DONE]


def _forever(asked: list[Query], rng: random.Random) -> Iterator[Query]:
    while True:
        yield from rng.sample(asked, len(asked))


def open_generated() -> LocalPapers:
    return library_of(papers(), data_dir(FOLDER) / "generated")


class GeneratedSearch(Search):
    """Searches the generated papers."""

    def __init__(self, *, library: Path | None = None, call_cost: float = 0.0) -> None:
        super().__init__(library=library or open_generated().folder, call_cost=call_cost)


def make_model(directory: str | Path, seed: int) -> None:
    """Write the quickstart's network, and a tokenizer for which a word or a part of a name is one token."""
    from agent_r1.recipes.quickstart import tiny

    known = papers()
    shown = with_prompts(loose_demos(20, seed=0), known)
    tokenizer = tiny.make_tokenizer(shown, [GeneratedSearch(), Expand()], pieces=tiny.whole(*FIXED))
    tokenizer.save_pretrained(directory)
    tiny.make_network(tokenizer, seed).save_pretrained(directory)

"""Find programs that a question may mean, by words that it shares with columns, cells and typical operations.

`candidates` orders them by how much of the question they explain. `synthesize` returns the first one that gives the
known answer, for demonstrations. `guess` returns the best one without knowing the answer: a scripted
agent, which a trained one has to beat.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from agent_r1.recipes.tables.answers import normalized, read_number, same_answers
from agent_r1.recipes.tables.programs import (
    Condition,
    Kind,
    Program,
    execute,
)
from agent_r1.recipes.tables.sql import Database
from agent_r1.recipes.tables.table import ROW, Cell, Table

MAX_TRIES = 30  # programs that are run for a question
MAX_TRIES_FOR_NUMBERS = 8  # if the answer is a number: many wrong programs find the right one
MAX_WORDS = 7  # words of a phrase that is looked for in cells
SECONDS = 0.5  # time limit of a program

WORD = re.compile(r"\d+(?:,\d{3})+(?:\.\d+)?|\d+\.\d+|\w+")
COMMON = """
a about above after all also an and any are as at be been before being below between but by did different do does
during each end ever every fewer first for from had has have he her him his how i in is it its larger largest last
least less list listed long many more most much name next no not number of on one only or other out over previous same
she show shows since so some than that the their them then there these they this those time times to top total two
under until up was way were what when where which while who whom whose why will with won year years
"""
COMMON_WORDS = frozenset(COMMON.split())
COUNTERS = ("no", "number", "rank", "no_in_series", "no_in_season", "week", "game", "round")

COUNT = re.compile(r"\b(how many|number of|count of|total of|how often)\b")
LARGEST = re.compile(
    r"\b(most|highest|largest|greatest|biggest|longest|best|max\w*|top|tallest|heaviest|richest|fastest|latest|more"
    r"|higher|larger|greater|longer|taller|older)\b"
)
SMALLEST = re.compile(
    r"\b(least|lowest|smallest|fewest|shortest|worst|min\w*|lightest|slowest|earliest|oldest|less|fewer|lower|smaller"
    r"|shorter|younger)\b"
)
FIRST = re.compile(r"\b(first|earliest|oldest|top|before|earlier|begin\w*|start\w*)\b")
LAST = re.compile(r"\b(last|latest|newest|most recent\w*|final|bottom|later|after)\b")
NEXT = re.compile(r"\b(next|after|following|follow\w*|below|succeed\w*|later)\b")
PREVIOUS = re.compile(r"\b(before|previous\w*|prior|above|preced\w*|earlier)\b")
SUM = re.compile(r"\b(total|sum|combined|altogether|all together|in all|how many|overall)\b")
AVERAGE = re.compile(r"\b(average|mean)\b")
DIFFERENCE = re.compile(
    r"\b(difference|how (many|much) (more|less|fewer|longer|higher|larger)|how long|how many years)\b"
)
OFTEN = re.compile(r"\b(most|common|often|frequent\w*|times|more)\b")
SELDOM = re.compile(r"\b(least|fewest)\b")
SAME = re.compile(r"\b(same|other|another|besides|as|also|share\w*|else|aside)\b")
COMPARISONS = (
    (re.compile(r"(?:at least|no less than|minimum of) (\d[\d,.]*)"), ">="),
    (re.compile(r"(\d[\d,.]*) or (?:more|higher|above|greater|later)"), ">="),
    (re.compile(r"(?:at most|no more than|up to|maximum of) (\d[\d,.]*)"), "<="),
    (re.compile(r"(\d[\d,.]*) or (?:less|fewer|lower|below|earlier)"), "<="),
    (
        re.compile(r"(?:more than|over|above|greater than|higher than|exceed\w*|larger than|longer than) (\d[\d,.]*)"),
        ">",
    ),
    (re.compile(r"(?:less than|fewer than|under|below|lower than|smaller than|shorter than) (\d[\d,.]*)"), "<"),
    (re.compile(r"(?:after|later than) (?:the year )?(\d{4})\b"), ">"),
    (re.compile(r"(?:since) (?:the year )?(\d{4})\b"), ">="),
    (re.compile(r"(?:before|prior to|earlier than) (?:the year )?(\d{4})\b"), "<"),
    (re.compile(r"(?:exactly|only|just|of) (\d[\d,.]*)"), "="),
)
ASKED = {  # words that ask for a kind of column -> beginnings of its name
    r"\bwho(m|se)?\b": ("name", "player", "driver", "winner", "candidate", "artist", "rider", "athlete", "actor"),
    r"\bwhen\b|\b(what|which) (year|date|season)\b": ("year", "date", "season", "released", "opened"),
    r"\bwhere\b|\bwhat (city|place)\b": ("location", "city", "venue", "place", "stadium", "site", "country"),
    r"\bhow (long|old)\b": ("time", "duration", "length", "age"),
    r"\bcountr\w*|\bnations?\b": ("country", "nation", "nationality", "team"),
    r"\b(song|album|film|movie|show|book)s?\b": ("title", "song", "album", "film", "name", "single"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mention:
    """A phrase of the question that stands in cells of a column."""

    condition: Condition
    rows: frozenset[int]  # places
    words: int
    start: int  # the place of its first word in the question
    is_whole: bool  # some cell holds nothing else


class Question:
    """Links between a question and a table."""

    def __init__(self, text: str, table: Table) -> None:
        self.table = table
        whole = " ".join(text.lower().split())
        self.words = WORD.findall(whole)
        self._has: dict[re.Pattern[str], bool] = {}
        self.columns = {name: self._explained(name) for name in table.columns if name != ROW}
        self.numeric = [name for name in self.columns if name in table.numeric_columns | table.dated_columns]
        self.comparisons = list(self._comparisons(whole))
        self.text = _without_comparisons(whole)  # "more than 5" means neither the maximum nor the number 5
        self.words = WORD.findall(self.text)
        self.mentions = self._mentions()
        self.targets = self._targets()
        self.measures = sorted(self.numeric, key=lambda name: (name in COUNTERS) - self.columns[name])[:4]

    def has(self, pattern: re.Pattern[str]) -> bool:
        if pattern not in self._has:
            self._has[pattern] = pattern.search(self.text) is not None
        return self._has[pattern]

    def _explained(self, column: str) -> float:
        """How much of the column's name the question says, from 0 to 1, and a little more for longer names."""
        parts = [part for part in column.split("_") if len(part) > 1 or part.isalpha()]
        stems = {stem(word) for word in self.words}
        said = sum(stem(part) in stems and part not in ("of", "in", "the", "no", "number") for part in parts)
        return said / max(1, len(parts)) + 0.1 * said

    def _mentions(self) -> list[Mention]:
        cells = {column: [_spelled(cell) for cell in self.table.values(column)] for column in self.columns}
        found: list[Mention] = []
        taken: set[int] = set()
        for size in range(min(MAX_WORDS, len(self.words)), 0, -1):
            for start in range(len(self.words) - size + 1):
                phrase, places = self.words[start : start + size], set(range(start, start + size))
                if places & taken or all(map(_says_little, phrase)):
                    continue
                here = [each for column in self.columns if (each := self._mention(column, cells[column], start, size))]
                if here:
                    here.sort(key=lambda each: (-each.is_whole, -self.columns[each.condition.column], len(each.rows)))
                    found += here[:3]
                    taken |= places
        return found

    def _mention(self, column: str, cells: Sequence[str], start: int, size: int) -> Mention | None:
        phrase = self.words[start : start + size]
        text = f" {' '.join(phrase)} "
        rows = frozenset(place for place, words in enumerate(cells) if text in words)
        if not rows:
            return None
        place = min(rows)
        value = self.table.values(column)[place]
        is_whole = any(cells[row] == text for row in rows)
        if not isinstance(value, str):
            condition = Condition(column=column, operator="=", value=value)
        else:
            spelled = re.search(r"\W+".join(map(re.escape, phrase)), value, re.IGNORECASE)
            condition = Condition(column=column, operator="contains", value=spelled[0] if spelled else value)
        return Mention(condition=condition, rows=rows, words=size, start=start, is_whole=is_whole)

    def _comparisons(self, text: str) -> Iterator[Condition]:
        for pattern, operator in COMPARISONS:
            for found in pattern.finditer(text):
                number = float(found[1].replace(",", "").rstrip(".") or "0") if _is_number(found[1]) else None
                if number is None:
                    continue
                value: Cell = int(number) if number.is_integer() else number
                is_year = re.fullmatch(r"1[5-9]\d\d|20\d\d", found[1]) is not None
                for column in self._compared(is_year):
                    if is_year and column in self.table.dated_columns:
                        text = f"{value}-99" if operator in (">", "<=") else f"{value}"
                        yield Condition(column=column, operator=operator, value=text)
                    else:
                        yield Condition(column=column, operator=operator, value=value)

    def _compared(self, is_year: bool) -> list[str]:
        def fits(column: str) -> bool:
            names_year = column.startswith(("year", "season")) or column in self.table.dated_columns
            return names_year == is_year

        fitting = [column for column in self.numeric if fits(column)] or (self.numeric if is_year else [])
        return sorted(fitting, key=lambda name: -self.columns[name])[:3]

    def _targets(self) -> list[str]:
        """Columns that may hold the answer, the likeliest first."""
        scores = dict(self.columns)
        for pattern, names in ASKED.items():
            if re.search(pattern, self.text):
                for column in scores:
                    scores[column] += 0.6 * any(part.startswith(names) for part in column.split("_"))
        mentioned = {mention.condition.column for mention in self.mentions}
        for place, column in enumerate(scores):
            scores[column] += 0.3 * (column not in self.numeric) - 0.02 * place - 0.2 * (column in mentioned)
        return sorted(scores, key=lambda name: -scores[name])[:5]


def _without_comparisons(text: str) -> str:
    for pattern, _ in COMPARISONS:
        text = pattern.sub(" ", text)
    return text


def stem(word: str) -> str:
    for ending, instead in (("ies", "y"), ("sses", "ss"), ("ches", "ch"), ("s", "")):
        if word.endswith(ending) and len(word) > len(ending) + 2:
            return word[: -len(ending)] + instead
    return word


def _spelled(cell: Cell) -> str:
    """The words of a cell, with a space before and after each."""
    return "" if cell is None else f" {' '.join(WORD.findall(str(cell).lower()))} "


def _says_little(word: str) -> bool:
    return word in COMMON_WORDS or (len(word) == 1 and not word.isdigit())


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d[\d,]*(\.\d+)?\.?,?", text) is not None


def candidates(text: str, table: Table) -> list[Program]:
    """Programs that the question may mean, the likeliest first, each once."""
    question = Question(text, table)
    scored: dict[Program, float] = {}
    filters = list(_filters(question))
    for conditions, explained in filters:
        for program, fit in _programs(question, conditions):
            asks_number = question.has(COUNT) and program.target not in question.numeric
            score = fit + explained - 1.5 * (asks_number and program.kind not in (Kind.COUNT, Kind.DISTINCT))
            scored[program] = max(score, scored.get(program, score))
    return sorted(scored, key=lambda program: -scored[program])


def synthesize(text: str, table: Table, answers: Sequence[str], database: Database) -> tuple[Program, list[str]] | None:
    """The first likely program whose answer is right, and its answer."""
    is_number = len(answers) == 1 and read_number(normalized(answers[0])) is not None
    for program in candidates(text, table)[: MAX_TRIES_FOR_NUMBERS if is_number else MAX_TRIES]:
        items = execute(program, table, database)
        if same_answers(items, answers):
            return program, items
    return None


def guess(text: str, table: Table, database: Database) -> tuple[Program, list[str]] | None:
    """The likeliest program that has an answer, and its answer."""
    for program in candidates(text, table)[:MAX_TRIES]:
        if items := execute(program, table, database):
            return program, items
    return None


def _filters(question: Question) -> Iterator[tuple[tuple[Condition, ...], float]]:
    """Conditions that the question may set, and how many of its words they explain."""
    yield (), 0.0
    single = [(mention.condition, mention.start, _weight(mention)) for mention in question.mentions[:9]]
    single += [(condition, -1 - place, 0.8) for place, condition in enumerate(question.comparisons[:5])]
    for condition, _, weight in single:
        yield (condition,), weight
    for (one, start, weight), (other, place, more) in combinations(single, 2):
        if start != place and one.column != other.column:
            yield (one, other), weight + more


def _weight(mention: Mention) -> float:
    return 0.4 + 0.25 * min(mention.words, 4) + 0.3 * mention.is_whole


def _programs(question: Question, conditions: tuple[Condition, ...]) -> Iterator[tuple[Program, float]]:
    """Programs with these conditions, and how well they fit the question otherwise."""
    said = question.columns
    used = {condition.column for condition in conditions}
    targets = [
        (column, said[column] - 0.15 * place) for place, column in enumerate(question.targets) if column not in used
    ]
    # Questions about the largest value rarely mean a column that only numbers the rows.
    measures = [
        (column, said[column] - 0.4 * (column in COUNTERS)) for column in question.measures if column not in used
    ]
    if question.has(COUNT):
        yield Program(kind=Kind.COUNT, conditions=conditions), 0.9
        for column, fit in targets:
            extra = 0.6 * ("different" in question.text or "unique" in question.text)
            yield Program(kind=Kind.DISTINCT, target=column, conditions=conditions), 0.1 + 0.5 * fit + extra
    for column, fit in targets:
        if conditions:
            yield Program(kind=Kind.VALUES, target=column, conditions=conditions), 0.5 + fit
        yield from _ordered(question, column, fit, measures, conditions)
        yield from _by_place(question, column, fit, conditions)
    yield from _computed(question, measures, conditions)


def _ordered(
    question: Question,
    column: str,
    fit: float,
    measures: Sequence[tuple[str, float]],
    conditions: tuple[Condition, ...],
) -> Iterator[tuple[Program, float]]:
    for pattern, kind in ((LARGEST, Kind.LAST), (SMALLEST, Kind.FIRST)):
        if question.has(pattern):
            for measure, said in measures:
                if measure != column:
                    program = Program(kind=kind, target=column, by=measure, conditions=conditions)
                    yield program, 0.7 + fit + 0.7 * said
    for pattern, kind in ((FIRST, Kind.FIRST), (LAST, Kind.LAST)):
        if question.has(pattern):
            yield Program(kind=kind, target=column, conditions=conditions), 0.7 + fit
            for measure, said in measures:
                timed = measure.startswith(("year", "date", "season"))
                program = Program(kind=kind, target=column, by=measure, conditions=conditions)
                yield program, 0.3 + fit + 0.3 * said + 0.4 * timed
    for pattern, kind in ((OFTEN, Kind.COMMON), (SELDOM, Kind.RARE)):
        if question.has(pattern):
            yield Program(kind=kind, target=column, conditions=conditions), 0.4 + fit


def _by_place(
    question: Question, column: str, fit: float, conditions: tuple[Condition, ...]
) -> Iterator[tuple[Program, float]]:
    if len(conditions) != 1:
        return
    for pattern, kind in ((NEXT, Kind.NEXT), (PREVIOUS, Kind.PREVIOUS)):
        if question.has(pattern):
            yield Program(kind=kind, target=column, conditions=conditions), 0.9 + fit
            if conditions[0].column != column:
                own = Program(kind=kind, target=conditions[0].column, conditions=conditions)
                yield own, 1.1
    if question.has(SAME):
        for by in question.targets:
            if by not in (column, conditions[0].column):
                same = Program(kind=Kind.SAME, target=conditions[0].column, by=by, conditions=conditions)
                yield same, 0.5 + question.columns[by]


def _computed(
    question: Question, measures: Sequence[tuple[str, float]], conditions: tuple[Condition, ...]
) -> Iterator[tuple[Program, float]]:
    kinds = ((SUM, Kind.SUM, 0.4), (AVERAGE, Kind.AVERAGE, 1.0), (LARGEST, Kind.MAX, 0.3), (SMALLEST, Kind.MIN, 0.3))
    for measure, said in measures:
        if measure in question.table.dated_columns:
            continue
        for pattern, kind, base in kinds:
            if question.has(pattern):
                yield Program(kind=kind, target=measure, conditions=conditions), base + said
        if conditions:
            yield Program(kind=Kind.VALUES, target=measure, conditions=conditions), 0.4 + said
    if len(conditions) == 1:
        yield from _compared_rows(question, conditions[0], measures)


def _compared_rows(
    question: Question, condition: Condition, measures: Sequence[tuple[str, float]]
) -> Iterator[tuple[Program, float]]:
    """Programs over two rows that the question names in one column."""
    for mention in question.mentions:
        other = mention.condition
        if other.column != condition.column or other == condition:
            continue
        if " or " in question.text:
            yield from _either(question, (condition, other), measures)
        for measure, said in measures:
            if question.has(DIFFERENCE) and measure not in question.table.dated_columns:
                yield Program(kind=Kind.DIFFERENCE, by=measure, conditions=(condition, other)), 1.6 + said


def _either(
    question: Question, pair: tuple[Condition, Condition], measures: Sequence[tuple[str, float]]
) -> Iterator[tuple[Program, float]]:
    """Programs that choose one of two rows: the larger or the smaller, the first or the last."""
    target = pair[0].column
    for pattern, kind in ((LARGEST, Kind.LAST), (SMALLEST, Kind.FIRST), (FIRST, Kind.FIRST), (LAST, Kind.LAST)):
        if question.has(pattern):
            for measure, said in measures:
                program = Program(kind=kind, target=target, by=measure, conditions=pair, either=True)
                yield program, 1.5 + said
            if pattern in (FIRST, LAST):
                yield Program(kind=kind, target=target, conditions=pair, either=True), 1.4
    if question.has(OFTEN):
        yield Program(kind=Kind.COMMON, target=target, conditions=pair, either=True), 1.4

"""Compare answers with the expected ones, by the rules of WikiTableQuestions' evaluation.

An answer is a set of items, in any order; repeated items count once. Both sets must have the same size, and each wanted
item must match a given one: as a normalised text, as the same number, or as the same date with the same parts.

The official evaluation takes numbers and dates of the wanted answers from CoreNLP's annotations. We read them with the
rules below instead, which also apply to the given answers: `12,467` is a number, and `June 20, 1990` is a date. As in
the official evaluation, `$5`, `5%` and `5 games` are only texts.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

SEPARATOR = "|"  # between the items of an answer
MAX_CHARS = 2000  # characters of an answer; longer ones match nothing
TOLERANCE = 1e-6  # allowed difference between equal numbers

_PLAIN = {"'": "\u2018\u2019\u00b4`", '"': "\u201c\u201d", "-": "\u2010\u2011\u2012\u2013\u2014\u2212"}
_QUOTES = str.maketrans({char: plain for plain, chars in _PLAIN.items() for char in chars})  # also maps dashes
_MARKS = "•♦†‡*#+"  # footnote marks at the end of a cell
_CITATION = re.compile(r"\[[^\[\]]*\]\Z")
_NUMBERED_CITATION = re.compile(r"\[\d+\]\Z")
_DETAILS = re.compile(r" \([^()]*\)\Z")
_QUOTED = re.compile(r'"([^"]*)"')

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:e[-+]?\d{1,3})?", re.ASCII)
_NUMBER_WORDS = "zero one two three four five six seven eight nine ten eleven twelve"
_WORDS = _NUMBER_WORDS.split()
_MONTH_NAMES = "january february march april may june july august september october november december"
_MONTHS = _MONTH_NAMES.split()
_MONTH = r"(?P<month>jan|feb|mar|apr|may|jun|jul|aug|sept?|oct|nov|dec|" + "|".join(_MONTHS) + r")\.?"
_DAY, _YEAR = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?", r"(?P<year>\d{4})"
_WEEKDAY = r"(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day,? )?"
_DATES = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        r"(?P<year>\d{4}|xx(?:xx)?)-(?P<month>\d{1,2}|xx)-(?P<day>\d{1,2}|xx)",
        rf"{_WEEKDAY}{_MONTH} {_DAY}(?:,? {_YEAR})?",
        rf"{_WEEKDAY}{_DAY} (?:of )?{_MONTH}(?:,? {_YEAR})?",
        rf"{_MONTH},? {_YEAR}",
    )
)
_YEAR_ALONE = re.compile(r"(\d{4})-xx-xx", re.ASCII)

Date = tuple[int | None, int | None, int | None]  # year, month, day; None: not given


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One item of an answer, in the forms in which it may match another."""

    text: str  # normalised
    number: float | None
    date: Date | None

    @property
    def key(self) -> object:
        """Equal items of one answer have equal keys."""
        return next(form for form in (self.number, self.date, self.text) if form is not None)

    def matches(self, other: Item) -> bool:
        if self.text == other.text:
            return True
        if self.number is not None and other.number is not None:
            return abs(self.number - other.number) < TOLERANCE
        return self.date is not None and self.date == other.date


def same_answers(given: Sequence[str], wanted: Sequence[str]) -> bool:
    """Return whether the given items are the expected ones. An empty answer never is."""
    if not given or sum(map(len, given)) > MAX_CHARS:
        return False
    ours, theirs = _items(given), _items(wanted)
    return len(ours) == len(theirs) and all(any(item.matches(other) for other in ours) for item in theirs)


def split_items(text: str) -> list[str]:
    """The items of an answer as the agent writes it: `Chile | Peru`."""
    return [item.strip() for item in text.split(SEPARATOR) if item.strip()]


def _items(texts: Sequence[str]) -> list[Item]:
    found = {item.key: item for item in map(read_item, texts)}
    return list(found.values())


def read_item(text: str) -> Item:
    plain = normalized(text)
    year = _YEAR_ALONE.fullmatch(plain)
    number = read_number(plain if year is None else year[1])
    return Item(text=plain, number=number, date=read_date(plain) if number is None else None)


def normalized(text: str) -> str:
    """Drop accents, citations, details in parentheses, outer quotation marks, a final full stop, and case."""
    plain = without_accents(text).translate(_QUOTES).strip()
    before = None
    while plain != before:
        before = plain
        plain = _without_ending(plain)
    return " ".join(plain.removesuffix(".").lower().split())


def without_accents(text: str) -> str:
    return "".join(char for char in unicodedata.normalize("NFKD", text) if unicodedata.category(char) != "Mn")


def _without_ending(text: str) -> str:
    """Remove one footnote mark, citation or detail from the end, or the quotation marks around the whole."""
    if text and text[-1] in _MARKS:
        return text[:-1].strip()
    # Keep a text that consists of a bracket or a parenthesis only: nothing else would be left to compare.
    for pattern in (_NUMBERED_CITATION, _CITATION, _DETAILS):
        found = pattern.search(text)
        if found and (found.start() > 0 or pattern is _NUMBERED_CITATION):
            return text[: found.start()].strip()
    quoted = _QUOTED.fullmatch(text)
    return quoted[1].strip() if quoted else text


def read_number(text: str) -> float | None:
    """Read a normalised text as a number: digits, with or without thousands separators, or a word up to twelve."""
    if text in _WORDS:
        return float(_WORDS.index(text))
    if not any(map(str.isdecimal, text)) or not _NUMBER.fullmatch(text):
        return None
    try:
        value = float(text.replace(",", ""))
    except ValueError:  # an exponent alone
        return None
    return value if math.isfinite(value) else None


def read_date(text: str) -> Date | None:
    """Read a normalised text as a date with at least two parts; a year alone is a number."""
    found = next((match for pattern in _DATES if (match := pattern.fullmatch(text))), None)
    if found is None:
        return None
    parts = found.groupdict()
    year, day = (_part(parts.get(name)) for name in ("year", "day"))
    named = parts["month"][:3]
    month = next((n for n, name in enumerate(_MONTHS, 1) if name.startswith(named)), None) or _part(parts["month"])
    possible = (month is None or 1 <= month <= 12) and (day is None or 1 <= day <= 31)
    given = sum(part is not None for part in (year, month, day))
    return (year, month, day) if possible and given > 1 else None


def _part(text: str | None) -> int | None:
    return None if text is None or text.startswith("x") else int(text)

"""Answers of the recipe `tables` match by the rules of WikiTableQuestions' evaluation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.recipes.tables.answers import MAX_CHARS, normalized, read_date, read_number, same_answers, split_items


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("  García \n Márquez ", "garcia marquez"),  # accents, spaces, case
        ("\u2018Hits\u2019 \u2013 \u201cLive\u201d", "'hits' - \"live\""),  # typographic quotes and dashes
        ("SMU*", "smu"),
        ("Lima\u2020[3][note 1]", "lima"),
        ("[1]", ""),  # a number in brackets is always a citation
        ("[sic]", "[sic]"),  # but another text in brackets stays if it is all there is
        ("Polydioxanone (PDS)", "polydioxanone"),
        ("20 (tie) [3] *", "20"),
        ("(A) b", "(a) b"),
        ("f(x)", "f(x)"),  # details follow a space
        ('"Hello"', "hello"),
        ('"Weird Al" Yankovic', '"weird al" yankovic'),
        ('"A" and "B"', '"a" and "b"'),
        ("U.S.", "u.s"),
        ("", ""),
    ],
)
def test_texts_are_normalised_as_published(text: str, plain: str) -> None:
    assert normalized(text) == plain


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12,467", 12467.0),
        ("-5", -5.0),
        ("+3", 3.0),
        (".5", 0.5),
        ("1.50", 1.5),
        ("2e3", 2000.0),
        ("three", 3.0),
        ("1,2", None),  # no thousands
        ("1,2345", None),
        ("$5", None),  # texts for the official evaluation, too
        ("5%", None),
        ("5 games", None),
        ("3-1", None),
        ("e5", None),
        ("1e400", None),
        ("nan", None),
        ("", None),
        ("-", None),
    ],
)
def test_numbers_are_read_or_left_as_text(text: str, number: float | None) -> None:
    assert read_number(text) == number


@pytest.mark.parametrize(
    ("text", "date"),
    [
        ("june 20, 1990", (1990, 6, 20)),
        ("20 june 1990", (1990, 6, 20)),
        ("june 20th 1990", (1990, 6, 20)),
        ("wednesday, june 20, 1990", (1990, 6, 20)),
        ("1990-06-20", (1990, 6, 20)),
        ("november 21", (None, 11, 21)),
        ("xx-11-21", (None, 11, 21)),
        ("may 2005", (2005, 5, None)),
        ("2005-05-xx", (2005, 5, None)),
        ("sept. 4", (None, 9, 4)),
        ("june 32", None),
        ("1990-13-01", None),
        ("1990", None),  # a number
        ("june", None),
        ("march madness", None),
    ],
)
def test_dates_are_read_with_the_parts_that_they_have(text: str, date: object) -> None:
    assert read_date(text) == date


@pytest.mark.parametrize(
    ("given_text", "wanted", "is_right"),
    [
        ("Chile | Uruguay|Venezuela", ["Venezuela", "Chile", "Uruguay"], True),  # any order
        ("Chile | Uruguay", ["Chile", "Uruguay", "Venezuela"], False),
        ("Chile | Uruguay | Peru", ["Chile", "Uruguay"], False),
        ("Chile, Uruguay", ["Chile", "Uruguay"], False),  # a comma is part of an item
        ("3", ["3", "3"], True),  # repeated items count once
        ("3 | 3", ["3"], True),
        ("12467", ["12,467"], True),
        ("2.0", ["2"], True),
        ("two", ["2"], True),
        ("0.3000001", ["0.3"], True),
        ("0.301", ["0.3"], False),
        ("20", ["20 games"], False),  # as in the official evaluation
        ("20 games", ["20 games"], True),
        ("6/20/1990", ["June 20, 1990"], False),
        ("1990-06-20", ["June 20, 1990"], True),
        ("June 20", ["June 20, 1990"], False),  # all parts must be the same
        ("1990-xx-xx", ["1990"], True),
        ("garcia", ["García"], True),
        ("Akron (Ohio)", ["Akron"], True),
        ("Bogotá, Colombia", ["Bogota, Colombia"], True),
        ("yes", ["no"], False),
        ("", ["x"], False),
        ("|", ["x"], False),
    ],
)
def test_answers_match_as_sets_of_texts_numbers_and_dates(given_text: str, wanted: list[str], is_right: bool) -> None:
    assert same_answers(split_items(given_text), wanted) is is_right


@pytest.mark.parametrize("item", ["[" * 10**6, "*" * MAX_CHARS, "[a]" * 600, " (a)" * 500, "[" * MAX_CHARS])
def test_answers_of_many_marks_or_brackets_are_judged(item: str) -> None:
    assert not same_answers([item], ["x"])


@given(st.lists(st.text(max_size=20).map(str.strip).filter(bool), min_size=1, max_size=4))
def test_every_answer_matches_itself_in_any_order(items: list[str]) -> None:
    assert same_answers(items[::-1], items)


def test_an_answer_that_is_too_long_is_wrong() -> None:
    assert same_answers(["x" * MAX_CHARS], ["x" * MAX_CHARS])
    assert not same_answers(["x" * (MAX_CHARS + 1)], ["x" * (MAX_CHARS + 1)])

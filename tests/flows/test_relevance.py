"""How relevant an episode's exchanges are to an observation."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from agent_r1.flows import context
from agent_r1.flows.context import MAX_CHARS, MAX_QUERY_CHARS, Notes, count_words, score_texts


def relevance(query: str, texts: list[str]) -> list[float]:
    return score_texts(query, list(map(count_words, texts)))


def test_rare_words_and_short_texts_count_more() -> None:
    texts = ["the key is red", "the key is under the old mat near the door", "nothing", "the wall"]
    scores = relevance("Where is the KEY?", texts)
    assert scores[0] > scores[1] > scores[3] > scores[2] == 0
    assert relevance("anything", []) == []
    assert relevance("", ["a"]) == relevance("a", [""]) == [0.0]
    # each shares one word, which occurs as often, with the query; "vault" is in one text and "hall" in three
    rare, *common = relevance("vault hall", ["grey vault", "cold hall", "wide hall", "dark hall"])
    assert rare > max(common) == min(common) > 0


def test_the_end_of_a_very_long_text_or_query_is_ignored() -> None:
    assert relevance("key", ["x " * (MAX_CHARS // 2) + "key", "a key"])[0] == 0
    assert relevance("x " * (MAX_QUERY_CHARS // 2) + "key", ["a key"]) == [0.0]


def test_each_episode_counts_a_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []

    def count(text: str) -> Counter[str]:
        counted.append(text)
        return count_words(text)

    monkeypatch.setattr(context, "count_words", count)
    talk = [{"role": "user", "content": "?"}]
    for number in range(4):
        talk += [{"role": "assistant", "content": f"say {number}"}, {"role": "user", "content": "and?"}]
    for policy in (notes := [Notes(turns=1, notes=1, note_chars=9) for _ in range(2)]) * 3:
        asyncio.run(policy.show(talk))
    assert len(counted) == 3 * len(notes)

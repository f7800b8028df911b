"""Which of an episode's exchanges bear on an observation: scores, and an index that grows with the episode."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent_r1.flows.relevance import MAX_CHARS, MAX_QUERY_CHARS, Index


def relevance(query: str, texts: list[str]) -> list[float]:
    index = Index()
    index.hold(texts)
    return index.scores(query)


def test_relevance_counts_rare_words_and_short_texts_more() -> None:
    texts = ["the key is red", "the key is under the old mat near the door", "nothing", "the wall"]
    scores = relevance("Where is the KEY?", texts)
    assert scores[0] > scores[1] > scores[3] > scores[2] == 0
    assert relevance("anything", []) == []
    assert relevance("", ["a"]) == relevance("a", [""]) == [0.0]
    # each shares one word, which occurs as often, with the query; "vault" is in one text and "hall" in three
    rare, *common = relevance("vault hall", ["grey vault", "cold hall", "wide hall", "dark hall"])
    assert rare > max(common) == min(common) > 0


words = st.lists(st.sampled_from("abcde"), max_size=6).map(" ".join)


@given(texts=st.lists(words, max_size=6), cut=st.integers(0, 6), query=words)
def test_an_index_that_grew_is_the_one_made_at_once(texts: list[str], cut: int, query: str) -> None:
    index = Index()
    for held in (texts[:cut], texts, texts[::-1]):  # some, all of them, and then a history that was rewritten
        index.hold(held)
        assert index.scores(query) == relevance(query, held)


def test_the_end_of_a_very_long_text_or_query_is_not_looked_at() -> None:
    assert relevance("key", ["x " * (MAX_CHARS // 2) + "key", "a key"])[0] == 0
    assert relevance("x " * (MAX_QUERY_CHARS // 2) + "key", ["a key"]) == [0.0]

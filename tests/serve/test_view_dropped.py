"""What a step no longer saw: windows, placeholders, summaries and stripped thinking, found in the ids alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.errors import ConfigError
from agent_r1.serve.view.api import Api
from agent_r1.serve.view.detail import TOKENS
from agent_r1.serve.view.dropped import Kept, kept_spans
from agent_r1.serve.view.library import Library, NotFound
from agent_r1.types import Step
from tests.serve.small_runs import group, make_episode, make_run, make_step


def message(number: int, length: int = 10) -> list[int]:
    """Ids that no other message has, between the marks that a chat template repeats."""
    return [1, 2, 3, *range(1000 * number, 1000 * number + length), 4, 5]


OPENING, CALL, RESULT, LATER, NEW = (message(number) for number in range(1, 6))


@pytest.mark.parametrize(
    ("after", "left_out"),
    [
        (OPENING + CALL + RESULT + LATER + NEW, []),  # nothing
        (OPENING + LATER + NEW, CALL + RESULT),  # a window
        # A placeholder for a result: the template's marks around it are too short to be taken for the old ones.
        (OPENING + CALL + [1, 2, 3, 900, 901, 4, 5] + LATER + NEW, RESULT[3:-2]),
        (OPENING + CALL[:5] + CALL[9:] + RESULT + LATER[:4] + LATER[8:] + NEW, CALL[5:9] + LATER[4:8]),  # thinking
        (OPENING + message(9) + NEW, CALL + RESULT + LATER),  # a summary
        (message(9), OPENING + CALL + RESULT + LATER),  # everything
    ],
)
def test_what_is_left_out_is_found_in_the_ids(after: list[int], left_out: list[int]) -> None:
    before = OPENING + CALL + RESULT + LATER
    kept = {index for span in kept_spans(before, after) for index in range(span.before, span.before + span.length)}
    gone = [token for index, token in enumerate(before) if index not in kept]
    # Equal ids at both ends of a gap could be taken from either: compare as sets of what is not a mark.
    assert [token for token in gone if token > 5] == [token for token in left_out if token > 5]


def test_a_repeated_message_is_matched_in_order() -> None:
    before = OPENING + CALL + CALL + RESULT + CALL
    assert sum(span.length for span in kept_spans(before, OPENING + CALL + RESULT + CALL + NEW)) == len(before) - len(
        CALL
    )


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_kept_spans_are_equal_in_both_and_in_order(before: list[int], after: list[int]) -> None:
    end = Kept(0, 0, 0)
    for span in kept_spans(before, after):
        assert span.length > 0
        assert span.before >= end.before + end.length
        assert span.after >= end.after + end.length
        assert before[span.before :][: span.length] == after[span.after :][: span.length]
        end = span
    assert end.before + end.length <= len(before)
    assert end.after + end.length <= len(after)


@given(st.lists(st.booleans(), max_size=60))
def test_what_was_only_shortened_is_found_exactly(is_kept: list[bool]) -> None:
    before = [token for number in range(len(is_kept)) for token in message(number + 1)]
    after = [token for number, keep in enumerate(is_kept) for token in (message(number + 1) if keep else [])]
    assert sum(span.length for span in kept_spans(before, after)) == len(after)


def asking(tmp_path: Path, *steps: Step) -> Api:
    run = make_run(tmp_path / "shop", steps=0)
    run.write_trajectories("train", 1, [group("row", "?", None, make_episode("row", 0, 1.0, *steps))])
    return Api(Library([tmp_path]))


def test_the_answer_is_paged_and_tells_prompt_from_response(tmp_path: Path) -> None:
    """Prompt 1: [0 .. 2999], response [1, 2, 5, 4]. Prompt 2 keeps the first 500 and the last 400 of the prompt."""
    first = replace(make_step(), prompt_ids=list(range(3000)), role="a")
    other = replace(make_step(), prompt_ids=[7, 8, 9], role="b")
    second = replace(make_step(), prompt_ids=[*range(500), *range(2600, 3000), 77, 78], role="a")
    api = asking(tmp_path, first, other, second)
    asked = {"run": "shop", "file": "train_000001", "n": "0", "step": "2"}
    answer = api.answer("dropped", asked)
    assert answer["kept"] == [[0, 500], [500, 400]]
    assert answer["total"] == 2100 + 4
    [part] = answer["parts"]
    assert (part["at"], part["position"], part["was_sampled"]) == (500, 500, False)
    assert part["ids"] == list(range(500, 500 + TOKENS))
    [middle, response] = api.answer("dropped", {**asked, "start": str(TOKENS)})["parts"]
    assert middle["ids"] == list(range(2500, 2600))
    assert (response["at"], response["was_sampled"], response["ids"]) == (900, True, [1, 2, 5, 4])
    assert response["texts"] == ["one", " two", "</script><b>x</b>", "\u2039e2\u203a\u203982\u203a"]
    assert api.answer("dropped", {**asked, "step": "1"})["total"] == 0  # the first step of its role
    with pytest.raises(NotFound, match="no step 3"):
        api.answer("dropped", {**asked, "step": "3"})
    with pytest.raises(ConfigError, match="file is missing"):
        api.answer("dropped", {**asked, "file": ""})

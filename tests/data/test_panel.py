"""A panel's hash: the same for the same questions, wherever and from whatever they were read."""

from __future__ import annotations

import datetime
import hashlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.data.panels import panel_hash
from agent_r1.errors import DataError
from agent_r1.types import TaskRow

ROW = TaskRow(
    prompt=[{"role": "user", "content": "Größe?"}],
    row_id="a",
    reward_model={"style": "rule", "ground_truth": 3},
    env_kwargs={"z": 1, "a": [1.5, None]},
    data_source="made",
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def test_the_hash_is_of_canonical_json_and_nothing_else() -> None:
    # keys sorted, no spaces, ASCII, a line per row: written out here so that it can never change by accident
    line = (
        '{"data_source":"made","env_kwargs":{"a":[1.5,null],"z":1},"ground_truth":3,'
        '"prompt":[{"content":"Gr\\u00f6\\u00dfe?","role":"user"}],"row_id":"a"}\n'
    )
    assert panel_hash([ROW]) == hashlib.sha256(line.encode()).hexdigest()[:12] == "5cda09d5a6e0"


@pytest.mark.parametrize(
    "changed",
    [
        replace(ROW, row_id="b"),
        replace(ROW, prompt=[{"role": "user", "content": "Grösse?"}]),
        replace(ROW, reward_model={"ground_truth": "3"}),
        replace(ROW, env_kwargs={"z": 1, "a": [1.5]}),
        replace(ROW, data_source="found"),
    ],
)
def test_what_is_asked_and_what_is_right_is_part_of_it(changed: TaskRow) -> None:
    assert panel_hash([changed]) != panel_hash([ROW])


def test_what_only_describes_a_row_is_not_part_of_it() -> None:
    described = replace(ROW, extra_info={"index": 7, "split": "test"}, reward_model={"ground_truth": 3, "style": "x"})
    assert panel_hash([described]) == panel_hash([ROW])


def test_order_and_number_of_rows_are_part_of_it() -> None:
    other = replace(ROW, row_id="b")
    panels = [[ROW, other], [other, ROW], [ROW], [ROW, other, other]]
    assert len({panel_hash(rows) for rows in panels}) == 4


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=3), JSON)
def test_rows_read_back_from_a_file_are_the_same_panel(env_kwargs: dict[str, Any], truth: Any) -> None:
    row = replace(ROW, env_kwargs=env_kwargs, reward_model={"ground_truth": truth})
    read = json.loads(json.dumps({"env_kwargs": dict(reversed(env_kwargs.items())), "truth": truth}))
    again = replace(ROW, env_kwargs=read["env_kwargs"], reward_model={"ground_truth": read["truth"]})
    assert panel_hash([again]) == panel_hash([row])


def test_values_that_json_lacks_have_a_fixed_form_of_their_own() -> None:
    def of(value: Any) -> str:
        return panel_hash([replace(ROW, env_kwargs={"value": value})])

    assert of(np.array([1, 2])) == of([1, 2]) == of((1, 2))
    assert of(np.float64(0.5)) == of(0.5)
    day = datetime.date(2026, 1, 2)
    assert len({of(day), of(str(day)), of(b"2026"), of("2026"), of(True), of(1), of("1")}) == 7


def test_a_row_with_a_live_object_is_refused_with_its_name() -> None:
    with pytest.raises(DataError, match=r"row 'a' .* <object .* of type object"):
        panel_hash([replace(ROW, env_kwargs={"world": object()})])

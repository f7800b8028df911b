"""The table of docs/models.md is what engines and learner really do."""

from __future__ import annotations

import pytest
import transformers

from tests.models.architecture_table import REGENERATE, committed_rows, find_row
from tests.models.architectures import ARCHITECTURES, Architecture


def verdicts(row: str) -> list[str]:
    """Without reasons, whose wording depends on the version of transformers."""
    return [cell.partition(":")[0].strip(" |") for cell in row.split(" | ")[2:]]


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.name)
def test_each_architecture_is_exact_or_refused_as_the_table_says(architecture: Architecture) -> None:
    if not architecture.exists:
        pytest.skip(f"transformers {transformers.__version__} has no {architecture.config}")
    version, rows = committed_rows()
    found, written = find_row(architecture), rows.get(architecture.name, "")
    hint = f"docs/models.md is out of date; to write the table: {REGENERATE}"
    assert verdicts(found) == verdicts(written), hint
    if transformers.__version__ == version:
        assert found == written, hint


def test_the_table_has_no_other_rows() -> None:
    assert list(committed_rows()[1]) == [architecture.name for architecture in ARCHITECTURES]

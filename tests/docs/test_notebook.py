"""The notebook runs from top to bottom, in a real kernel, and what it shows is what its text says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "python-api.ipynb"


def shown(cell: Any, kind: str) -> list[str]:
    """What a cell displays in one format, in order."""
    return [output["data"][kind] for output in cell.outputs if kind in output.get("data", {})]


@pytest.mark.slow
def test_the_notebook_runs_and_its_agent_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("AGENT_R1_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # outputs are not kept: they would grow old
    nbclient.NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()

    train, plot, transcript, view, evaluate, ask, resume = [c for c in notebook.cells if c.cell_type == "code"][2:]
    progress = shown(train, "text/html")[0]  # one block, which every line updated
    assert "training 8/8" in progress
    assert "held-out success" in progress
    assert "success 100.0%" in shown(train, "text/plain")[-1]
    assert shown(plot, "image/png")
    assert "lookup" in shown(transcript, "text/html")[0]
    [page] = shown(view, "text/html")
    assert page.startswith("<iframe sandbox='allow-scripts")
    assert "default-src &#39;none&#39;" in page  # the policy of an exported page
    assert re.search(r'<a href="http://127\.0\.0\.1:\d+/"', page)
    assert shown(evaluate, "text/plain")[-1].startswith("success")
    assert shown(ask, "text/plain")[-1] == "('10', 2)"
    step, first, last = eval(shown(resume, "text/plain")[-1])
    assert (step, first < 0.6, last > 0.6) == (10, True, True)

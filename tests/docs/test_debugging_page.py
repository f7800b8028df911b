"""docs/debugging.md names metrics, settings and checks that exist."""

from __future__ import annotations

import re

from tests.docs.shown.blocks import ROOT

PAGE = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
LINES = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| symptom")]
PROGRAM = {"run.log"}  # a file


def terms(page: str) -> set[str]:
    return set(re.findall(r"`([\w/.@]+)`", (ROOT / "docs" / page).read_text(encoding="utf-8")))


def test_every_setting_on_the_page_is_listed_in_the_configuration() -> None:
    named = {name.partition("=")[0] for name in re.findall(r"`([a-z_]+\.[\w.]+(?:=[^`]*)?)`", PAGE)}
    assert len(named) > 20
    assert named - terms("configuration.md") - PROGRAM == {"task.env_kwargs.tool_format"}  # of ToolEnv
    assert "tool_format" in terms("tool-env.md")


def test_every_metric_that_a_symptom_names_is_explained() -> None:
    cells = [line.split(" | ")[1] for line in LINES]
    named = {name for cell in cells for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)*)`", cell)}
    assert len(named) > 15
    assert {name for name in named if not name.startswith("stop/")} <= terms("metrics.md")


def test_every_check_of_doctor_that_the_page_names_exists() -> None:
    named = {
        name
        for line in LINES
        for part in re.findall(r"doctor's ((?:\*[^*]+\*(?:, )?)+)", line)
        for name in re.findall(r"\*([^*]+)\*", part)
    }
    table = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    listed = {name.strip() for row in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE) for name in row.split(",")}
    assert len(named) > 10
    assert named <= listed

"""The clients on docs/serve.md talk to real servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.docs.shown.blocks import ROOT, blocks
from tests.serve.api_server import CALL, serving_agent, serving_script


def test_the_clients_on_the_page_get_answers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="pip install 'agent-r1[dev]'")
    namespace: dict[str, Any] = {}
    bare, agent = blocks(ROOT / "docs" / "serve.md", "py")
    with serving_script(["3 coins", "3 coins"]) as (url, _):
        exec(bare.replace("http://localhost:8300", url), namespace)
    assert capsys.readouterr().out.startswith("3 coins ")
    with serving_agent([CALL % "a", "aaa"]) as (url, _):
        exec(agent.replace("http://localhost:8301", url), namespace)
    assert capsys.readouterr().out == 'calls echo({"text": "a"})\naaa'

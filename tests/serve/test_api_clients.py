"""Clients that no one here wrote talk to the server. Their interpreter is AGENT_R1_CLIENTS_PYTHON (see .ci/clients)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chatml import tokenizer
from tests.serve.api_server import CALL, serving_script

PYTHON = os.environ.get("AGENT_R1_CLIENTS_PYTHON")
SCRIPT = Path(__file__).with_name("foreign_clients.py")

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(PYTHON is None, reason="set AGENT_R1_CLIENTS_PYTHON, or run .ci/clients"),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Says what it is told to say; CALL becomes a tool call."""

    def told(call: Any) -> str:
        text = tokenizer().decode(call.prompt_ids).rpartition("say: ")[2].partition("<|im_end|>")[0]
        return str(text).replace("CALL", f"I ask.\n{CALL % 'a'}")

    with serving_script(told, key="secret-key") as (address, _):
        yield address


@pytest.mark.parametrize("client", ["langchain", "litellm"])
def test_other_clients_get_answers_streams_calls_and_errors(url: str, client: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": ""}
    result = subprocess.run(
        [str(PYTHON), str(SCRIPT), client, url],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    told = json.loads(result.stdout.splitlines()[-1])
    assert (told["whole"], told["streamed"]) == ("it is 4", "it is 4")
    assert told["tokens"] == len("it is 4") + 1
    assert told["calls"] == told["streamed_calls"] == [["echo", {"text": "a"}]]
    assert "maximum context length" in told["error"]
    if client == "litellm":
        assert "ContextWindowExceededError" in told["error"]

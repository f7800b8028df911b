"""`agent-r1 serve`: what it serves, and what it refuses before a model is loaded."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from agent_r1.errors import ConfigError
from agent_r1.serve.api.limits import ServeLimits
from agent_r1.serve.api.open_model import choose, open_server
from tests.conftest import Cli
from tests.serve.api_server import make_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"))


def test_a_run_is_served_until_ctrl_c(run: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "AGENT_R1_API_KEY": "from-shell"}
    words = ["serve", str(run), "rollout.max_context_tokens=400", "--port", "0"]
    command = [sys.executable, "-m", "agent_r1.cli", *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "serving" in line)
        url = line.split(" at ")[1].split("/v1")[0]
        headers = {"Authorization": "Bearer from-shell"}
        (model,) = httpx.get(f"{url}/v1/models", headers=headers).json()["data"]
        body = {"model": "mini", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60).json()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.communicate()
    assert (model["id"], model["max_model_len"]) == ("mini", 400)
    assert 1 <= answer["usage"]["completion_tokens"] <= 5


def test_a_checkpoint_is_served_with_the_settings_of_its_run(run: Path) -> None:
    chosen = choose(str(run / "checkpoints" / "step_000001"), ["eval.temperature=0.5"], name=None)
    assert (chosen.name, chosen.has_recipe) == ("mini/step_000001", True)
    server = open_server(chosen, agent=True, limits=ServeLimits())
    assert (server.model.sampling.temperature, server.model.max_context_tokens) == (0.5, 512)


def test_a_model_without_a_run_has_all_of_its_context(run: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    (run / "checkpoints" / "step_000001").rename(model)
    try:
        server = open_server(choose(str(model), [], name=None), agent=False, limits=ServeLimits())
        assert (server.model.name, server.model.max_context_tokens) == ("model", 1024)
        short = choose(str(model), ["rollout.max_context_tokens=300"], name="given")
        assert open_server(short, agent=False, limits=ServeLimits()).model.max_context_tokens == 300
        with pytest.raises(ConfigError, match="--agent"):
            open_server(choose(str(model), [], name=None), agent=True, limits=ServeLimits())
    finally:
        model.rename(run / "checkpoints" / "step_000001")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--api-key", "short"], "8 printable"),
        (["learner.lr=1"], "learner.lr"),
        (["rollout.max_context_tokens=5000"], "5000"),
    ],
)
def test_mistakes_are_found_before_anything_is_served(words: list[str], named: str, run: Path, cli: Cli) -> None:
    ended = cli("serve", run, *words)
    assert ended.code == 2
    assert named in ended.err


def test_a_taken_port_is_found_before_a_model_is_looked_for(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert str(port) in cli("serve", "no/such/model", "--port", str(port)).err


def test_a_model_that_does_not_exist_is_named(cli: Cli) -> None:
    assert "no/such/model" in cli("serve", "no/such/model").err

"""Two real vLLM servers on the CPU, with a model whose embeddings are tied. Skipped without an environment for vLLM.

The servers are started once; every test leaves them with weights of its own and expects none.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from agent_r1.build.engine import build_engine
from agent_r1.build.models.load import Model, load_model
from agent_r1.config import RunConfig, load_config
from agent_r1.engines.base import Completion, Prompt, Sampling, generate_all
from agent_r1.engines.vllm import assemble, gpu_weights
from agent_r1.engines.vllm.vllm_engine import VLLMEngine
from agent_r1.errors import ConfigError
from agent_r1.learn.model.layers import untied_state
from agent_r1.runs.reader import RunReader
from tests.chatml import tokenizer
from tests.conftest import Cli
from tests.engines import cpu_ipc

PYTHON = os.environ.get("AGENT_R1_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(PYTHON is None, reason="AGENT_R1_VLLM_PYTHON names no interpreter with vLLM"),
]
MINI = str(Path(__file__).parents[1] / "mini" / "base.yaml")
TOLERANCE = 1e-4
Result = TypeVar("Result")


class Session:
    """One engine and one event loop for all tests of this file."""

    def __init__(self, config: RunConfig, model: Model, logs: Path) -> None:
        self.model, self._runner = model, asyncio.Runner()
        engine = build_engine(config, model, logs=logs)
        assert isinstance(engine, VLLMEngine)
        self.engine = engine
        self.version = 0

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(work)

    def change_weights(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.network.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        self.load()

    def load(self) -> None:
        self.version += 1
        self.run(self.engine.load_weights(untied_state(self.model.network).items(), self.version))

    async def sample(self, count: int, sampling: Sampling) -> list[Completion]:
        return await asyncio.gather(
            *(self.engine.generate(Prompt(prompt(i)), seeded(sampling, i), session=str(i)) for i in range(count))
        )

    def off(self, completions: list[Completion], *, temperature: float = 1.0) -> float:
        """The largest difference from the learner's log-probs."""
        worst = 0.0
        for i, completion in enumerate(completions):
            scores = self.scores(prompt(i), completion) / temperature
            if completion.support is not None:
                keep = torch.full_like(scores, -torch.inf)
                for row, ids in enumerate(completion.support.per_token()):
                    keep[row, ids] = 0.0
                scores = scores + keep
            chosen = torch.tensor(completion.token_ids)[:, None]
            expected = scores.log_softmax(-1).gather(-1, chosen)[:, 0]
            worst = max(worst, (expected - torch.tensor(completion.logprobs)).abs().max().item())
        return worst

    def scores(self, ids: list[int], completion: Completion) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.model.network(torch.tensor([ids + completion.token_ids])).logits
        return logits[0, len(ids) - 1 : -1].float()

    def close(self) -> None:
        self.run(self.engine.close())
        self._runner.close()


def prompt(number: int) -> list[int]:
    return [(number * 31 + 7 * i) % 200 + 5 for i in range(40)]


def seeded(sampling: Sampling, seed: int) -> Sampling:
    return Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        keep_support=sampling.keep_support,
        stop_ids=sampling.stop_ids,
        seed=seed,
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 64 dimensions: vLLM's attention on a CPU takes 32, 64, 80, ...
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def settings(directory: Path, *engine: str) -> list[str]:
    return [f"model.path={directory}", "engine.kind=vllm", *engine]


@pytest.fixture(scope="module")
def session(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    start = [f"engine.python={PYTHON}", "engine.servers=2", "engine.args=[--enforce-eager]", "rollout.top_k=20"]
    config = load_config(MINI, settings(directory, *start))
    one = Session(config, load_model(config, directory), tmp_path_factory.mktemp("logs"))
    yield one
    one.close()
    assert not one.engine._weights.path.exists()


@pytest.mark.parametrize(
    ("sampling", "temperature"),
    [
        (Sampling(max_tokens=24), 1.0),
        (Sampling(max_tokens=24, temperature=0.7), 0.7),
        (Sampling(max_tokens=24, temperature=0.0), 1.0),  # greedy: the plain softmax
        (Sampling(max_tokens=24, temperature=0.7, top_k=20, top_p=0.9, keep_support=True), 0.7),
    ],
    ids=["plain", "cooler", "greedy", "top-k and top-p"],
)
def test_logprobs_are_the_learners_before_and_after_updates(
    session: Session, sampling: Sampling, temperature: float
) -> None:
    before = session.run(session.sample(8, sampling))
    assert session.off(before, temperature=temperature) < TOLERANCE
    assert [c.token_ids for c in session.run(session.sample(8, sampling))] == [c.token_ids for c in before]
    session.change_weights(seed=1)
    after = session.run(session.sample(8, sampling))
    assert session.off(after, temperature=temperature) < TOLERANCE
    assert {c.versions for c in after} == {((session.version, 24),)}
    assert [c.token_ids for c in after] != [c.token_ids for c in before]


def test_a_stop_id_ends_a_response_and_is_part_of_it(session: Session) -> None:
    (free,) = session.run(session.sample(1, Sampling(max_tokens=24)))
    stop = free.token_ids[10]
    (stopped,) = session.run(session.sample(1, Sampling(max_tokens=24, stop_ids=(stop,))))
    end = free.token_ids.index(stop) + 1
    assert (stopped.token_ids, stopped.stop) == (free.token_ids[:end], "stop")


def test_an_aborted_response_continues_exactly(session: Session) -> None:
    async def interrupted(pause: float) -> Completion:
        sampling = Sampling(max_tokens=400, seed=3)
        whole = asyncio.create_task(generate_all(session.engine, Prompt(prompt(0)), sampling, session=str(pause)))
        for _ in range(8):
            await asyncio.wait([whole], timeout=pause)
            session.engine.abort(str(pause))
        return await whole

    # A short pause may end before any token was sampled, and a long one after all of them.
    completions = [session.run(interrupted(0.02 * 1.7**number)) for number in range(8)]
    assert {(len(each.token_ids), each.stop) for each in completions} == {(400, "length")}
    assert max(len(each.versions) for each in completions) > 1
    assert max(session.off([each]) for each in completions) < TOLERANCE


@pytest.mark.parametrize(
    "changes",
    [[], ["lora.rank=4"], ["trainer.mode=async", "trainer.max_staleness=1"]],
    ids=["all weights", "adapters", "asynchronous"],
)
def test_a_training_run_samples_from_the_weights_it_trains(
    changes: list[str], session: Session, directory: Path, cli: Cli, cache: None, tmp_path: Path
) -> None:
    urls = ",".join(server.url for server in session.engine._servers)
    start = ["sft.demos=null", "trainer.steps=3", f"engine.urls=[{urls}]", *changes]
    ended = cli("train", MINI, *settings(directory, *start), "--run", tmp_path / "run")
    assert ended.code == 0, ended.err
    metrics = RunReader(tmp_path / "run").read_metrics("train")
    assert [record["step"] for record in metrics] == [1, 2, 3]
    assert all(record["grad_norm"] > 0 for record in metrics)
    # After the first step of an asynchronous run, some tokens are from older weights.
    current = metrics[:1] if "trainer.mode=async" in changes else metrics
    assert max(record["mismatch_max"] for record in current) < TOLERANCE
    session.load()  # the run has replaced the weights


def test_adapters_are_sent_without_their_base(directory: Path, cli: Cli, cache: None, tmp_path: Path) -> None:
    start = [f"engine.python={PYTHON}", "engine.args=[--enforce-eager]", "engine.send_adapters=true"]
    lora = ["lora.rank=3", "learner.lr=0.05", "sft.demos=null", "trainer.steps=3"]
    ended = cli("train", MINI, *settings(directory, *start, *lora), "--run", tmp_path / "run")
    assert ended.code == 0, ended.err
    metrics = RunReader(tmp_path / "run").read_metrics("train")
    assert max(record["mismatch_max"] for record in metrics) < TOLERANCE
    [saved] = (tmp_path / "run" / "checkpoints").glob("step_*3")
    base, merged = (load_file(path / "model.safetensors") for path in (directory, saved))
    name = "model.layers.0.mlp.up_proj.weight"
    assert (base[name] - merged[name]).abs().max() > 0.02  # without the adapters, log-probs would differ


def test_weights_reach_a_server_without_a_file(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "uses_ipc", lambda *_: True)
    monkeypatch.setattr(gpu_weights, "share", cpu_ipc.Buffers().share)
    monkeypatch.setattr(gpu_weights, "BUCKET_BYTES", 100_000)  # parts of a fused matrix come in different buckets
    monkeypatch.setenv("PYTHONPATH", str(Path(cpu_ipc.__file__).parent))
    start = [f"engine.python={PYTHON}", "engine.args=[--enforce-eager, --worker-extension-cls, cpu_ipc.Reader]"]
    config = load_config(MINI, settings(directory, *start))
    session = Session(config, load_model(config, directory), tmp_path / "logs")
    try:
        sampling = Sampling(max_tokens=24)
        session.engine._sleeps = True  # the setting is refused on a CPU, where vLLM answers and frees nothing
        for seed in range(3):
            assert session.off(session.run(session.sample(8, sampling))) < TOLERANCE, seed
            session.run(session.engine.sleep())
            session.change_weights(seed)
        assert session.off(session.run(session.sample(8, sampling))) < TOLERANCE
        assert not list(session.engine._weights.path.glob("*.safetensors"))
    finally:
        session.close()


def test_another_model_on_the_server_is_refused(session: Session, directory: Path, tmp_path: Path) -> None:
    other = shutil.copytree(directory, tmp_path / "other")
    text = (other / "config.json").read_text(encoding="utf-8")
    changed = text.replace('"rope_theta": 10000.0', '"rope_theta": 100.0')  # same shapes, other positions
    assert changed != text
    (other / "config.json").write_text(changed, encoding="utf-8")
    config = load_config(MINI, settings(other, f"engine.urls=[{session.engine._servers[0].url}]"))
    model = load_model(config, other)
    with pytest.raises(ConfigError, match=r"another distribution.*log-probs differ by"):
        build_engine(config, model)
    session.load()  # the server has read the other model's weights


def test_a_server_killed_mid_batch_loses_nothing_and_comes_back(session: Session) -> None:
    sampling = Sampling(max_tokens=400)
    expected = session.run(session.sample(16, sampling))
    first = session.engine._servers[0]
    assert first.process is not None
    assert first.process._process is not None
    guardian = str(first.process._process.pid)
    children = subprocess.run(["pgrep", "-P", guardian], capture_output=True, text=True, check=True).stdout
    victim = int(children.split()[0])

    async def killed() -> list[Completion]:
        batch = asyncio.create_task(session.sample(16, sampling))
        while not any(call.server is first for call in session.engine._calls.values()):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)  # a fast machine samples all tokens in less than half a second
        os.kill(victim, signal.SIGKILL)
        return await batch

    completions = session.run(killed())
    assert not first.alive
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    assert session.off(completions) < TOLERANCE
    session.change_weights(seed=2)  # while one server is down

    async def back() -> None:
        while not first.alive:
            assert first in session.engine._reviving
            await asyncio.sleep(0.5)

    session.run(back())
    session.engine._servers[1].alive = False  # so that the restarted one answers
    after = session.run(session.sample(4, sampling))
    session.engine._servers[1].alive = True
    assert session.off(after) < TOLERANCE
    assert {c.versions for c in after} == {((session.version, 400),)}

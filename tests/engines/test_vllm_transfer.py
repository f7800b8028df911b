"""Weights that reach a vLLM server without a file: what is sent, in which order, when it is chosen, and what fails."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_r1.config import load_config
from agent_r1.engines.vllm import gpu_weights
from agent_r1.engines.vllm.answers import read_completion
from agent_r1.engines.vllm.assemble import check_servers, gpu_number, uses_ipc
from agent_r1.engines.vllm.gpu_weights import GpuWeights
from agent_r1.engines.vllm.vllm_engine import VLLMEngine
from agent_r1.errors import ConfigError, RolloutError
from tests.engines import cpu_ipc
from tests.engines.fake_vllm import FakeVLLM, answer, fakes
from tests.engines.test_vllm_failures import FOUR, ask, make_engine, run, until
from tests.engines.tiny_models import tiny

START = ["/pause", "/init_weight_transfer_engine", "/start_weight_update"]
END = ["/finish_weight_update", "/reset_prefix_cache", "/resume"]


@pytest.fixture
def fake() -> Iterator[FakeVLLM]:
    with fakes(1) as [server]:
        yield server


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_weights, "share", cpu_ipc.Buffers().share)
    monkeypatch.setattr(gpu_weights, "BUCKET_BYTES", 10_000)


def weights(folder: Path) -> GpuWeights:
    return GpuWeights(str(folder), model=tiny("llama_tied"), dtype=torch.bfloat16, device=torch.device("cpu"))


def engine_of(fake: FakeVLLM, folder: Path, **changes: Any) -> VLLMEngine:
    (own := folder / "own").mkdir()
    engine = make_engine([fake], folder, weights=weights(own), **changes)
    fake.updates.clear()
    return engine


def contents(message: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Read a bucket as vLLM's `packed_ipc_consumer` does."""
    [place] = pickle.loads(base64.b64decode(message["ipc_handles_pickled"])).values()
    packed = cpu_ipc.rebuild(*place)[: sum(message["tensor_sizes"])]
    parts = packed.split(message["tensor_sizes"])
    for name, kind, shape, part in zip(message["names"], message["dtype_names"], message["shapes"], parts, strict=True):
        yield name, part.clone().view(getattr(torch, kind)).view(*shape)


def test_buckets_hold_every_weight_once_and_tied_ones_under_both_names(tmp_path: Path) -> None:
    model = tiny("llama_tied")
    received: dict[str, Tensor] = {}
    sizes = []
    source = ((name, 2 * tensor) for name, tensor in model.named_parameters())
    for message in weights(tmp_path)._buckets(source):
        sizes.append(message["tensor_sizes"])
        for name, tensor in contents(message):  # before the next bucket is filled
            assert name not in received
            received[name] = tensor
    assert received.keys() == model.state_dict().keys()
    assert all(torch.equal(received[name], (2 * tensor).bfloat16()) for name, tensor in model.state_dict().items())
    assert len(sizes) > 3
    assert all(sum(bucket) <= 10_000 or len(bucket) == 1 for bucket in sizes)


def test_a_tensor_larger_than_a_bucket_travels_alone(tmp_path: Path) -> None:
    model = tiny("llama_tied")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    own = GpuWeights(str(tmp_path), model=model, dtype=torch.float32, device=torch.device("cpu"))
    source = {"a": torch.ones(10), "b": torch.arange(5000.0), "c": torch.zeros(2, 3)}
    messages = []
    for message in own._buckets(source.items()):
        messages.append(message["names"])
        assert all(torch.equal(tensor, source[name]) for name, tensor in contents(message))
    assert messages == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0"])
def test_an_update_is_announced_sent_in_buckets_and_used_by_new_requests(
    version: str, fake: FakeVLLM, tmp_path: Path
) -> None:
    fake.version = version
    engine = engine_of(fake, tmp_path)
    received: list[str] = []

    async def play() -> None:
        await engine.load_weights(tiny("llama_tied").named_parameters(), 1)
        assert (await ask(engine, 1, "a")).versions == ((1, 4),)

    run(engine, play)
    start, *updates = fake.updates
    assert fake.calls == [*START, *["/update_weights"] * len(updates), *END]
    for body in updates:
        received += body["update_info"]["names"]
    assert sorted(received) == sorted(tiny("llama_tied").state_dict())
    at_start, with_bucket = start["init_info"].get("packed"), {body["update_info"].get("packed") for body in updates}
    assert (at_start, with_bucket) == ((None, {True}) if version == "0.26.0" else (True, {None}))


@pytest.mark.parametrize("refused", ["", "/update_weights"], ids=["between updates", "while it reads"])
def test_a_server_that_dies_ends_the_run_with_the_way_out(fake: FakeVLLM, tmp_path: Path, refused: str) -> None:
    engine = engine_of(fake, tmp_path)

    async def play() -> None:
        fake.healthy, fake.drop = False, lambda path: path.endswith(refused)
        with pytest.raises(RolloutError, match=r"no vLLM server is left.*With engine\.transfer=file, servers are rest"):
            await engine.load_weights(tiny("llama_tied").named_parameters(), 1)
        with pytest.raises(RolloutError):
            await ask(engine, 1, "a")

    run(engine, play)


def test_a_server_that_cannot_read_the_memory_is_an_error_at_the_start(fake: FakeVLLM, tmp_path: Path) -> None:
    answers = fake.post

    def refuse(path: str, **given: Any) -> tuple[int, Any] | None:
        if path == "/update_weights":
            return 500, {"error": "IPC handle not found for GPU UUID 1"}
        return answers(path, **given)

    fake.post = refuse  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="IPC handle not found for GPU UUID 1"):
        engine_of(fake, tmp_path)
    assert list((tmp_path / "own").iterdir()) == []


def test_a_server_that_restarts_while_the_others_sleep_sleeps_too(tmp_path: Path) -> None:
    with fakes(2) as two:
        engine = make_engine(two, tmp_path, sleeps=True, start_seconds=30.0)
        lost = engine._servers[0]

        async def play() -> None:
            two[0].healthy, two[0].drop = False, lambda path: True
            await engine.sleep()
            assert not lost.alive
            two[0].healthy, two[0].drop = True, lambda path: False
            await until(lambda: lost.alive)

        run(engine, play)
        assert two[0].calls[-1] == "/sleep"


@pytest.mark.parametrize(
    ("servers", "learner", "message"),
    [
        ([[1]], 0, r"the learner's is 0 and the servers' are \[\[1\]\]"),
        ([[0, 1]], 0, "one vLLM server"),  # tensor parallel
        ([[0], [1]], 0, "one vLLM server"),  # two servers for one learner
        ([[0]], None, "the learner's is not known"),
    ],
)
def test_ipc_needs_one_server_on_the_learners_gpu(servers: list[list[int]], learner: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        uses_ipc("ipc", servers, learner)
    assert uses_ipc("ipc", [[3]], 3)
    assert not uses_ipc("file", servers, learner)


@pytest.mark.parametrize(
    ("index", "visible", "number"),
    [(2, None, 2), (0, "5", 5), (1, "4, 6", 6), (0, "GPU-3f2a", None), (1, "4", None)],
)
def test_the_learners_gpu_is_counted_as_nvidia_smi_does(index: int, visible: str | None, number: int | None) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_number(torch.device("cuda", index), environment) == number
    assert gpu_number(torch.device("cpu"), environment) is None


@pytest.mark.parametrize(
    "change",
    [
        {"gpus": [], "python": None, "urls": ["http://a:1"]},
        {"on_gpu": False},
        {"tensor_parallel": 2, "gpus": [0, 1]},
        {"send_adapters": True},
    ],
    ids=["running servers", "on a CPU", "tensor parallel", "adapters"],
)
def test_settings_that_cannot_share_memory_are_refused_before_a_model_is_loaded(change: dict[str, Any]) -> None:
    config = load_config("quickstart", ["engine.kind=vllm", "engine.python=python3", "engine.gpus=[0]"])
    settings = {"on_gpu": True, **config.engine.model_dump(), "transfer": "ipc"} | change
    with pytest.raises(ConfigError, match=r"engine\.transfer=ipc needs servers .* one GPU each, and sends all weights"):
        check_servers(**settings)


def test_an_unknown_way_of_sending_weights_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"engine\.transfer.*nccl"):
        load_config("quickstart", ["engine.kind=vllm", "engine.python=python3", "engine.transfer=nccl"])


def test_answers_of_older_servers_name_ids_as_text() -> None:
    content = answer([7, 8])
    for entry in content["choices"][0]["logprobs"]["content"]:
        entry["token"] = f"token_id:{entry.pop('token_id')}"
        entry["top_logprobs"] = [{"token": entry["token"], "logprob": -1.0}]
    completion = read_completion(content, FOUR, version=0, server="x")
    assert (completion.token_ids, completion.logprobs) == ([7, 8], [-1.0, -1.0])

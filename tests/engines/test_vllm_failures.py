"""What the vLLM engine does when a server fails, hangs, answers nonsense or is the wrong one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agent_r1.engines.base import Completion, Prompt, Sampling, generate_all
from agent_r1.engines.vllm import guardian, server_process, shared_weights, vllm_engine
from agent_r1.engines.vllm.answers import read_completion
from agent_r1.engines.vllm.assemble import own_share
from agent_r1.engines.vllm.server_process import ServerProcess, installed_version, read_version
from agent_r1.engines.vllm.shared_weights import AdapterShape, SharedAdapters, SharedWeights
from agent_r1.engines.vllm.vllm_engine import VLLMEngine
from agent_r1.engines.vllm.vllm_server import Server, Wanted
from agent_r1.errors import ConfigError, DataError, DiskError, RolloutError
from tests.engines.fake_vllm import FakeVLLM, answer, fakes
from tests.engines.tiny_models import VOCAB, tiny

WANTED = Wanted(max_context_tokens=64, top_k=20, tied=True, vocabulary_size=VOCAB)
FOUR = Sampling(max_tokens=4)
UPDATE = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]


@pytest.fixture
def two() -> Iterator[list[FakeVLLM]]:
    with fakes(2) as servers:
        yield servers


def make_engine(servers: list[FakeVLLM], folder: Path, **changes: Any) -> VLLMEngine:
    settings: dict[str, Any] = {
        "weights": SharedWeights(str(folder), model=tiny("llama_tied"), dtype=torch.float32),
        "wanted": WANTED,
        "score": lambda prompt, response: [-1.0] * len(response),
        "tolerance": 1e-3,
        "seed": 0,
        "start_seconds": 0.2,
    }
    engine = VLLMEngine([Server(url=server.url) for server in servers], **(settings | changes))
    for server in servers:
        server.calls.clear()
        server.bodies.clear()
    return engine


@pytest.fixture
def engine(two: list[FakeVLLM], tmp_path: Path) -> VLLMEngine:
    return make_engine(two, tmp_path)


def run(engine: VLLMEngine, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def whole() -> Any:
        try:
            return await work()
        finally:
            await engine.close()

    return asyncio.run(whole())


async def ask(engine: VLLMEngine, start: int, session: str) -> Completion:
    return await engine.generate(Prompt([start]), FOUR, session=session)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_sessions_are_spread_and_stay_on_their_server(two: list[FakeVLLM], tmp_path: Path) -> None:
    engine = make_engine(two, tmp_path)

    async def play() -> None:
        for step in range(3):
            for session in range(6):
                assert (await ask(engine, 10 * session, str(session))).token_ids[0] == 10 * session + 1, step

    run(engine, play)
    seen = [{body["token_ids"][0] for body in server.bodies} for server in two]
    assert [len(sessions) for sessions in seen] == [3, 3]
    assert not seen[0] & seen[1]
    assert list(tmp_path.iterdir()) == []  # `close` removes the weights


def test_requests_of_a_dead_server_are_repeated_on_another(
    two: list[FakeVLLM], engine: VLLMEngine, caplog: pytest.LogCaptureFixture
) -> None:
    two[0].release.clear()

    async def play() -> list[Completion]:
        batch = asyncio.gather(*(ask(engine, i, str(i)) for i in range(8)))
        await until(lambda: len(two[0].bodies) == 4)
        two[0].healthy = False  # and it drops its connections
        return await batch

    completions = run(engine, play)
    assert [c.token_ids for c in completions] == [list(range(i + 1, i + 5)) for i in range(8)]
    assert sorted(body["token_ids"][0] for body in two[1].bodies) == list(range(8))
    seeds = {body["token_ids"][0]: body["sampling_params"]["seed"] for body in two[1].bodies}
    assert all(seeds[b["token_ids"][0]] == b["sampling_params"]["seed"] for b in two[0].bodies)  # the same noise
    assert f"{two[0].url} failed" in caplog.text
    assert "servers left: 1 of 2" in caplog.text


def test_a_server_that_comes_back_gets_the_current_weights_first(two: list[FakeVLLM], tmp_path: Path) -> None:
    engine = make_engine(two, tmp_path, start_seconds=30.0)
    lost = engine._servers[0]

    async def play() -> None:
        two[0].healthy, two[0].drop = False, lambda path: True
        await asyncio.gather(*(ask(engine, i, str(i)) for i in range(2)))
        assert not lost.alive
        await engine.load_weights(tiny("llama_tied").named_parameters(), 1)
        assert two[0].calls == []
        two[0].healthy, two[0].drop = True, lambda path: False
        await until(lambda: lost.alive)
        assert two[0].calls == UPDATE
        assert (await ask(engine, 3, "new")).versions == ((1, 4),)

    run(engine, play)


def test_a_run_without_any_server_ends_with_the_reason(
    two: list[FakeVLLM], engine: VLLMEngine, caplog: pytest.LogCaptureFixture
) -> None:
    for server in two:
        server.healthy, server.drop = False, lambda path: True
    with pytest.raises(RolloutError, match="no vLLM server is left"):
        run(engine, lambda: ask(engine, 1, "a"))
    assert "is given up after 2 attempts" in caplog.text


def test_a_server_that_hangs_is_found_by_its_health(
    two: list[FakeVLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "CHECK_SECONDS", 0.01)
    engine = make_engine(two, tmp_path)
    two[0].release.clear()  # connections stay open

    async def play() -> list[Completion]:
        batch = asyncio.gather(*(ask(engine, i, str(i)) for i in range(4)))
        await until(lambda: len(two[0].bodies) == 2)
        monkeypatch.setattr(two[0], "get", lambda path: (500, {}))
        return await batch

    assert len(run(engine, play)) == 4
    two[0].release.set()


def test_weights_wait_for_running_requests_and_new_ones_for_weights(two: list[FakeVLLM], engine: VLLMEngine) -> None:
    for server in two:
        server.release.clear()

    async def play() -> None:
        old = asyncio.create_task(ask(engine, 1, "old"))
        await until(lambda: bool(two[0].bodies or two[1].bodies))
        loading = asyncio.create_task(engine.load_weights(tiny("llama_tied").named_parameters(), 5))
        await asyncio.sleep(0.05)
        new = asyncio.create_task(ask(engine, 2, "new"))
        await asyncio.sleep(0.05)
        assert [server.calls for server in two] == [[], []]
        for server in two:
            server.release.set()
        assert (await old).versions == ((0, 4),)
        await loading
        assert (await new).versions == ((5, 4),)
        assert [server.calls for server in two] == [UPDATE, UPDATE]
        salts = [body["cache_salt"] for server in two for body in server.bodies]
        assert len(set(salts)) == 2

    run(engine, play)


def test_a_server_that_dies_during_an_update_does_not_stop_the_run(two: list[FakeVLLM], engine: VLLMEngine) -> None:

    async def play() -> Completion:
        two[0].healthy, two[0].drop = False, lambda path: path == "/collective_rpc"
        await engine.load_weights(tiny("llama_tied").named_parameters(), 1)
        assert [server.alive for server in engine._servers] == [False, True]
        return await ask(engine, 1, "a")

    assert run(engine, play).versions == ((1, 4),)


def test_after_a_failed_write_requests_are_refused_until_the_next(two: list[FakeVLLM], engine: VLLMEngine) -> None:

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        raise OSError("disk full")
        yield

    async def play() -> Completion:
        with pytest.raises(DiskError, match="disk full"):
            await engine.load_weights(broken(), 1)
        with pytest.raises(RolloutError, match="incomplete weights"):
            await ask(engine, 1, "a")
        await engine.load_weights(tiny("llama_tied").named_parameters(), 2)
        return await ask(engine, 1, "a")

    assert run(engine, play).versions == ((2, 4),)


def test_no_weights_are_written_while_a_server_starts_from_them(two: list[FakeVLLM], engine: VLLMEngine) -> None:
    lost = engine._servers[0]
    written: list[bool] = []

    class Process:
        ended = False

        def start(self) -> None:
            folder, end = engine._weights.path, time.monotonic() + 0.3
            before = folder.stat().st_mtime_ns
            while folder.stat().st_mtime_ns == before and time.monotonic() < end:  # the engine wants to write meanwhile
                time.sleep(0.01)
            written.append(folder.stat().st_mtime_ns != before)
            two[0].healthy, two[0].drop = True, lambda path: False

        def stop(self, *, wait: bool = True) -> None:
            pass

    lost.process = Process()  # type: ignore[assignment]

    async def play() -> None:
        two[0].healthy, two[0].drop = False, lambda path: True
        await ask(engine, 1, "a")
        await engine.load_weights(tiny("llama_tied").named_parameters(), 1)
        await until(lambda: lost.alive)

    run(engine, play)
    assert written == [False]


def test_a_server_that_hangs_during_an_update_is_given_up(
    two: list[FakeVLLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_r1.engines.vllm.vllm_server.UPDATE_SECONDS", 0.5)
    engine = make_engine(two, tmp_path)
    answers, released = two[0].post, threading.Event()

    def hang(path: str, **given: Any) -> tuple[int, Any] | None:
        if path == "/collective_rpc":
            released.wait(30)
        return answers(path, **given)

    two[0].post = hang  # type: ignore[method-assign]

    async def play() -> list[Completion]:
        async with asyncio.timeout(20):
            await engine.load_weights(tiny("llama_tied").named_parameters(), 1)
            return await asyncio.gather(*(ask(engine, i, str(i)) for i in range(4)))

    completions = run(engine, play)
    released.set()
    assert [c.versions for c in completions] == [((1, 4),)] * 4
    assert (len(two[0].bodies), len(two[1].bodies)) == (0, 4)


def test_a_response_aborted_on_a_dying_server_keeps_its_support(two: list[FakeVLLM], engine: VLLMEngine) -> None:
    sampling = Sampling(max_tokens=4, top_k=2, keep_support=True)
    two[0].release.clear()

    async def play() -> Completion:
        asked = asyncio.create_task(generate_all(engine, Prompt([1]), sampling, session="a"))
        await until(lambda: bool(two[0].bodies))
        engine.abort()
        two[0].healthy = False  # and it drops its connections
        return await asked

    completion = run(engine, play)
    assert completion.token_ids == [2, 3, 4, 5]
    assert completion.support is not None
    assert completion.support.per_token() == [[2], [3], [4], [5]]


def test_abort_returns_the_tokens_so_far(two: list[FakeVLLM], engine: VLLMEngine) -> None:
    for server in two:
        server.release.clear()

    async def play() -> tuple[Completion, Completion]:
        first, second = (asyncio.create_task(ask(engine, i, str(i))) for i in range(2))
        await until(lambda: len(two[0].bodies) + len(two[1].bodies) == 2)
        engine.abort("0")
        aborted = await first
        for server in two:
            server.release.set()
        return aborted, await second

    aborted, other = run(engine, play)
    assert (aborted.token_ids, aborted.stop) == ([1, 2], "abort")
    assert (len(other.token_ids), other.stop) == (4, "length")


def test_a_sleeping_engine_has_no_weights_until_it_gets_new_ones(two: list[FakeVLLM], tmp_path: Path) -> None:
    engine = make_engine(two, tmp_path, sleeps=True)

    async def play() -> None:
        await engine.sleep()
        await engine.load_weights(tiny("llama_tied").named_parameters(), 1)
        await ask(engine, 1, "a")
        await engine.sleep()
        with pytest.raises(RolloutError, match="incomplete weights: it slept"):
            await ask(engine, 1, "a")

    run(engine, play)
    assert two[0].calls == ["/sleep", "/wake_up", *UPDATE, "/sleep"]
    assert two[0].levels == ["2", "2"]  # the weights are dropped, too: they will be sent again


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        {"choices": []},
        answer([1, 2], token_ids=[1]),
        answer([1, 2], token_ids=None),
        answer([1], logprobs=None),
        answer([1], finish_reason="error"),
    ],
    ids=lambda content: str(content)[:40],
)
def test_answers_that_cannot_be_read_fail_the_episode_and_name_the_server(content: Any) -> None:
    with pytest.raises(RolloutError, match="the server gave an answer that cannot be read"):
        read_completion(content, FOUR, version=0, server="the server")


def test_logits_that_are_not_finite_fail_the_episode() -> None:
    content = answer([1])
    content["choices"][0]["logprobs"]["content"][0]["logprob"] = -9999.0  # what vLLM sends for NaN
    with pytest.raises(RolloutError, match="not finite"):
        read_completion(content, FOUR, version=0, server="the server")


@pytest.mark.parametrize(("code", "content"), [(200, b"<html>"), (400, {"error": "bad"}), (500, {"error": "x"})])
def test_a_healthy_server_that_refuses_a_request_is_not_lost(
    code: int, content: Any, two: list[FakeVLLM], engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for server in two:
        monkeypatch.setattr(server, "post", lambda path, **_: (code, content))
    with pytest.raises(RolloutError, match=r"the vLLM server http\S+ (answered|refused) /inference"):
        run(engine, lambda: ask(engine, 1, "a"))
    assert all(server.alive for server in engine._servers)


@pytest.mark.parametrize("ids", [[], [VOCAB], [-1], [True], [1.0]])
def test_ids_that_would_end_a_server_are_not_sent(ids: list[Any], two: list[FakeVLLM], engine: VLLMEngine) -> None:
    with pytest.raises(DataError, match="the prompt contains"):
        run(engine, lambda: engine.generate(Prompt(ids), FOUR, session="a"))
    assert two[0].bodies == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "0.31.0"}, r"has vLLM 0\.31\.0, but 0\.26 or at least 0\.32"),
        ({"dev_mode": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"model_config": {"max_model_len": 32}}, "--max-model-len 64"),
        ({"model_config": {"logprobs_mode": "raw_logprobs"}}, "--logprobs-mode processed_logprobs"),
        ({"model_config": {"max_logprobs": 20}}, "--max-logprobs 28"),
        ({"model_config": {"hf_overrides": {}}}, r"--hf-overrides '\{\"tie_word_embeddings\": false\}'"),
        ({"healthy": False}, "cannot be reached .*not healthy"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_wrong_server_is_refused_before_the_first_step(
    change: dict[str, Any], message: str, two: list[FakeVLLM], tmp_path: Path
) -> None:
    for name, value in change.items():
        setattr(two[1], name, two[1].model_config | value if name == "model_config" else value)
    with pytest.raises(ConfigError, match=message):
        make_engine(two, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_server_with_a_model_of_another_shape_is_refused(two: list[FakeVLLM], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    two[0].model_config["model"] = str(tmp_path)
    wanted = replace(WANTED, shape={"vocab_size": VOCAB, "hidden_size": 32})
    with pytest.raises(ConfigError, match=r"hidden_size is 64, .* 32"):
        make_engine(two, tmp_path, wanted=wanted)
    assert two[0].calls == []  # no weights were sent


def test_an_unreachable_server_and_another_distribution_are_refused(two: list[FakeVLLM], tmp_path: Path) -> None:
    two[1].stop()
    with pytest.raises(ConfigError, match=r"cannot be reached .*correct engine\.urls"):
        make_engine(two, tmp_path)
    with pytest.raises(ConfigError, match=r"differ by 0\.5 on average, the limit is 0\.001"):
        make_engine(two[:1], tmp_path, score=lambda prompt, response: [-1.5] * len(response))


def test_an_environment_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no vLLM: make an environment with"):
        installed_version(sys.executable)
    with pytest.raises(ConfigError, match="cannot be run as a Python interpreter"):
        installed_version(str(tmp_path / "python"))
    found = [read_version(version, "x") for version in ("0.26.0", "0.32.1+cpu", "0.33.0", "1.0")]
    assert found == [(0, 26), (0, 32), (0, 33), (1, 0)]


def test_a_server_that_ends_while_it_starts_is_explained_from_its_log(tmp_path: Path) -> None:
    process = ServerProcess(python=sys.executable, arguments=[], port=1, gpus=[], log=tmp_path / "logs" / "a.log")
    process.start()
    with pytest.raises(ConfigError, match=r"ended while it started: ModuleNotFoundError: No module named 'vllm'"):
        Server(url="http://127.0.0.1:1", process=process).wait_until_ready(60.0)
    errors = ["ValueError: Head size 40 is not supported", "RuntimeError: Engine core initialization failed. See above"]
    process.log.write_text("\n".join(errors))
    assert process.cause().startswith("ValueError: Head size 40")


def test_a_server_does_not_think_that_it_is_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "True")
    given: dict[str, str] = {}
    monkeypatch.setattr("subprocess.Popen", lambda _, env, **__: given.update(env))
    ServerProcess(python=sys.executable, arguments=[], port=1, gpus=[3], log=tmp_path / "a.log").start()
    assert not given.keys() & server_process.RANK_VARIABLES
    assert (given["CUDA_VISIBLE_DEVICES"], given["PATH"]) == ("3", os.environ["PATH"])


def test_weights_are_written_in_shards_with_tied_names_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_weights, "SHARD_BYTES", 10_000)
    model = tiny("llama_tied")
    weights = SharedWeights(str(tmp_path), model=model, dtype=torch.bfloat16)
    weights.write((name, 2 * tensor) for name, tensor in model.named_parameters())
    files = sorted(weights.path.glob("*.safetensors"))
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 2
    assert written.keys() == model.state_dict().keys()
    assert all(torch.equal(written[name], (2 * t).bfloat16()) for name, t in model.state_dict().items())
    weights.remove()


def shared_adapters(folder: Path, rank: int = 2) -> SharedAdapters:
    shape = AdapterShape(rank=rank, alpha=4.0, layers=["model.layers.0.self_attn.q_proj"])
    return SharedAdapters(str(folder), model=tiny("llama_tied"), dtype=torch.float32, shape=shape)


def test_adapters_replace_each_other_and_reach_a_server_that_comes_back(two: list[FakeVLLM], tmp_path: Path) -> None:
    for server in two:
        server.max_lora_rank = 8
    weights = shared_adapters(tmp_path)
    engine = make_engine(two, tmp_path, weights=weights, wanted=replace(WANTED, lora_rank=2), start_seconds=30.0)
    lost, layer = engine._servers[0], "model.layers.0.self_attn.q_proj"
    tensors = {f"{layer}.lora_A": torch.ones(2, 32), f"{layer}.lora_B": torch.full((32, 2), 3.0)}

    async def play() -> None:
        await engine.load_weights(tensors.items(), 1)
        for fake, server in zip(two, engine._servers, strict=True):
            [(name, folder)] = fake.adapters.items()  # the one before is unloaded
            assert name == server.adapter
            written = load_file(Path(folder) / "adapter_model.safetensors")
            assert written.keys() == {f"base_model.model.{name}.weight" for name in tensors}
            assert torch.equal(written[f"base_model.model.{layer}.lora_B.weight"], tensors[f"{layer}.lora_B"])
        await ask(engine, 1, "a")
        assert [body["model"] for body in two[0].bodies + two[1].bodies] == [engine._homes["a"].adapter]
        two[0].healthy, two[0].drop = False, lambda path: True
        await asyncio.gather(*(ask(engine, i, str(i)) for i in range(4)))
        await engine.load_weights(tensors.items(), 2)
        two[0].healthy, two[0].drop, two[0].adapters = True, lambda path: False, {}
        await until(lambda: lost.alive)
        assert list(two[0].adapters.values()) == list(two[1].adapters.values())  # the same folder
        assert [path.name for path in weights.path.glob("adapter-*")] == ["adapter-2"]

    run(engine, play)


def test_servers_that_take_no_adapters_are_refused(two: list[FakeVLLM], tmp_path: Path) -> None:
    folder, wanted = tmp_path / "adapters", replace(WANTED, lora_rank=9)
    folder.mkdir()
    with pytest.raises(ConfigError, match="--enable-lora --max-lora-rank 16"):
        make_engine(two, tmp_path, weights=shared_adapters(folder, rank=9), wanted=wanted)
    for server in two:
        server.max_lora_rank = 16
    two[1].refuses_adapters = True
    with pytest.raises(ConfigError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        make_engine(two, tmp_path, weights=shared_adapters(folder, rank=9), wanted=wanted)
    assert list(folder.iterdir()) == []
    with pytest.raises(ConfigError, match=r"lora\.rank=513"):
        replace(WANTED, lora_rank=513).arguments((0, 32))


SRUN = {
    **{"SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"},
    **{"SLURM_STEP_NODELIST": "gpu[1-2]", "SLURM_STEP_TASKS_PER_NODE": "4,3"},
}
TORCHRUN = {
    **{"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"},
    **{"MASTER_ADDR": "gpu1", "MASTER_PORT": "1"},
}


@pytest.mark.parametrize("variables", [SRUN, TORCHRUN], ids=["srun", "torchrun"])
def test_ranks_divide_the_servers(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    assert own_share("abcde", per_host=False) == list("abcde")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert own_share("abcdefghijklm", per_host=False) == ["f", "m"]  # the sixth of seven ranks
    assert own_share("abcde", per_host=True) == ["b", "e"]  # the second of three on its host
    with pytest.raises(ConfigError, match="3 ranks need at least 3 vLLM servers, one each, but there are 1"):
        own_share("a", per_host=True)


def test_weights_of_killed_processes_are_removed(tmp_path: Path) -> None:
    gone, mine = (tmp_path / f"{shared_weights.PREFIX}{pid}-x" for pid in (2**30, os.getpid()))
    for folder in (gone, mine):
        folder.mkdir()
    SharedWeights(str(tmp_path), model=tiny("llama"), dtype=torch.float32).remove()
    assert list(tmp_path.iterdir()) == [mine]


def test_a_server_ends_with_its_children_when_our_process_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    server = f"sleep 600 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"
    code = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-I', {guardian.__file__!r}, 'sh', '-c', {server!r}], "
        "stdin=subprocess.PIPE, start_new_session=True)\n"
        "time.sleep(600)"
    )
    ours = subprocess.Popen([sys.executable, "-c", code])
    try:
        while not pids.exists():
            time.sleep(0.01)
        running = [Path(f"/proc/{pid}") for pid in pids.read_text().split()]
        assert [path.exists() for path in running] == [True, True]
        ours.send_signal(signal.SIGKILL)
        while any(path.exists() and b"Z" not in (path / "stat").read_bytes().split()[2] for path in running):
            time.sleep(0.01)
    finally:
        ours.kill()
        ours.wait()


def test_servers_take_the_settings_that_the_engine_checks() -> None:
    common = (
        "--max-model-len 64 --logprobs-mode processed_logprobs --max-logprobs 28 "
        '--hf-overrides {"tie_word_embeddings": false}'
    )
    assert " ".join(WANTED.arguments((0, 32))) == f"--enable-scale-out {common}"
    assert " ".join(WANTED.arguments((0, 26))) == common

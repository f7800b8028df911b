"""How weights reach a vLLM server on the learner's GPU: whether they arrive exactly, how long it takes by file and
without one, and what sleeping frees. For one GPU, with random weights.

    python3 -m benchmarks.speed.vllm_transfer --out DIR

Needs vLLM on PYTHONPATH, or `--python` of an environment that has it. Every server is started and ended here. Each
result is printed and written to DIR/vllm_transfer.json as soon as it is known; the logs of the servers are in DIR/logs.
The exit status is 0 if all results are right, 1 if one is wrong or a part failed, and 3 if the time limit was reached.

vLLM imports this file into its worker for `Checksums`, so it imports agent-r1 only where it is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import faulthandler
import json
import os
import platform
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
GIB = 2**30
DTYPE = torch.bfloat16
SHAPES: dict[str, dict[str, Any]] = {  # sizes of SmolLM2-135M, and of Qwen2.5-1.5B with a head of its own
    "tiny": {"hidden": 128, "mlp": 256, "layers": 8, "heads": 2, "kv": 1, "vocabulary": 512, "tied": True},
    "135m": {"hidden": 576, "mlp": 1536, "layers": 30, "heads": 9, "kv": 3, "vocabulary": 49152, "tied": True},
    "1.5b": {"hidden": 1536, "mlp": 8960, "layers": 28, "heads": 12, "kv": 2, "vocabulary": 151936, "tied": False},
}
PARTS = ["135m:ipc", "1.5b:ipc", "1.5b:file", "135m:file"]
EXTENSION = "benchmarks.speed.vllm_transfer.Checksums"
GRAPHS = '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}'
UPDATES = 5
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 48, 32
MAX_OFF = 0.2  # mean difference of log-probs: bfloat16 rounds in every layer; that of other weights is above 1
PART_SECONDS = 50.0  # no part starts with less time left


class Checksums:
    """What vLLM adds to its worker."""

    model_runner: Any

    def weight_checksums(self) -> dict[str, int]:
        return {name: checksum(tensor) for name, tensor in self.model_runner.get_model().named_parameters()}


def checksum(tensor: Tensor) -> int:
    """Depends on every bit and on its place."""
    bits, total = tensor.detach().to(DTYPE).contiguous().view(-1).view(torch.int16), 0
    for start in range(0, bits.numel(), 2**24):
        part = bits[start : start + 2**24].long()
        places = torch.arange(start, start + part.numel(), device=part.device) % 65_521 + 1
        total += int((part * places).sum())
    return total


def fused_checksums(network: Any) -> dict[str, int]:
    """The checksums that vLLM's copy of a Llama must have, in which some matrices lie below each other."""
    state: Mapping[str, Tensor] = network.state_dict()
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    expected = {}
    for name, tensor in state.items():
        for whole, (first, *others) in fused.items():
            if f".{first}." in name:
                parts = [tensor, *(state[name.replace(first, other)] for other in others)]
                expected[name.replace(first, whole)] = checksum(torch.cat(parts))
                break
        else:
            if not any(f".{other}." in name for _, *others in fused.values() for other in others):
                expected[name] = checksum(tensor)
    return expected


class Report:
    """Prints and stores results at once, so that a run that ends early still tells what it found."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self.began, self.wrong = folder / "vllm_transfer.json", time.monotonic(), 0
        self.logs = folder / "logs"
        self._content: dict[str, Any] = {}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)

    def add(self, part: str, name: str, value: Any, *, right: bool = True) -> None:
        self.wrong += not right
        self.say(f"{part}  {name}: {value}{'' if right else '   <-- WRONG'}")
        self._content.setdefault(part, {})[name] = {"value": value, "right": right}
        self._file.write_text(json.dumps(self._content, indent=1) + "\n", encoding="utf-8")

    def fail(self, part: str, problem: str) -> None:
        self.add(part, "failed", problem, right=False)
        for log in sorted(self.logs.glob("*.log"), key=lambda file: file.stat().st_mtime)[-1:]:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            notable = [line for line in lines if "Error" in line or "error:" in line][-15:]
            self.say("\n".join([f"errors in {log}:", *notable, "its last lines:", *lines[-40:]]))


class Trial:
    """One engine with one server, and the learner's network. `python` starts the server."""

    def __init__(self, shape: str, transfer: str, report: Report, options: argparse.Namespace, seconds: float) -> None:
        self.part, self._report, self._seconds = f"{shape}:{transfer}", report, seconds
        self._add = partial(report.add, self.part)
        self.device = torch.device("cuda:0" if options.device == "cuda" else "cpu")
        self.network = make_network(SHAPES[shape], self.device)
        self._loop, self._version, self._sleeps = asyncio.Runner(), 0, options.device == "cuda"
        self._add("free GPU memory before the server starts (GiB)", self.free())
        self.engine = self._start(transfer, options)

    def _start(self, transfer: str, options: argparse.Namespace) -> Any:
        from agent_r1.engines.vllm.assemble import assemble_engine, gpu_number

        gpus = [] if self.device.type == "cpu" else [gpu_number(self.device, os.environ) or 0]
        on_gpu = ["--gpu-memory-utilization", str(options.memory_share), "--max-num-seqs", "16"] if gpus else []
        graphs = ["--compilation-config", GRAPHS] if gpus and not options.eager else ["--enforce-eager"]
        return assemble_engine(
            self.network,
            dtype=DTYPE,
            device=self.device,
            seed=0,
            max_context_tokens=128,
            top_k=0,
            logs=self._report.logs,
            adapters=None,
            python=options.python,
            urls=[],
            gpus=gpus,
            tensor_parallel=1,
            servers=None,
            args=["--worker-extension-cls", EXTENSION, *on_gpu, *graphs],
            transfer=transfer,  # type: ignore[arg-type]
            weights_dir=weights_dir(),
            start_seconds=min(150.0, self._seconds),
            tolerance=0.5,  # measured more exactly below
            sleep=self._sleeps,
        )

    def run(self) -> None:
        add = self._add
        add("start (s)", round(self.engine.startup_seconds, 1))
        self.check("at the start", None)
        before = rounded(self.network)
        seconds, extra = [], 0.0
        for number in range(UPDATES):
            change(self.network, seed=number)
            self._peak()
            seconds.append(self._timed(self._load(), 60))
            extra = max(extra, self._peak())
        size = sum(parameter.numel() for parameter in self.network.parameters()) * DTYPE.itemsize / GIB
        add("updates (s)", seconds)
        add("weights (GiB)", round(size, 2))
        add("GPU memory that the learner needs for an update (GiB)", extra)
        self.check(f"after {UPDATES} updates", before)
        if self._sleeps:
            self._sleep_and_wake()

    def _sleep_and_wake(self) -> None:
        free = []
        for cycle in (1, 2):
            before, awake = rounded(self.network), self.free()
            slept = self._timed(self.engine.sleep(), 60)
            asleep = self.free()
            self._add(f"sleep {cycle} (s)", slept)
            self._add(f"GPU memory freed by sleep {cycle} (GiB)", round(asleep - awake, 2), right=asleep > awake + 1)
            change(self.network, seed=100 + cycle)
            self._add(f"wake {cycle} (s)", self._timed(self.engine._wake(), 60))
            self._add(f"update after wake {cycle} (s)", self._timed(self._load(), 60))
            self.check(f"after sleep {cycle}", before)
            del before
            torch.cuda.empty_cache()
            free.append(self.free())
        lost = round(free[0] - free[1], 2)  # such as buffers that are never given back
        self._add("GPU memory lost in a cycle (GiB)", lost, right=lost < 1)

    def check(self, when: str, before: Any | None) -> None:
        """Compare the server's weights bit by bit, and what it samples with a plain forward pass."""
        [found] = self._wait(self._call("weight_checksums"), 60)
        expected = fused_checksums(self.network)
        different = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        told = f"{len(found)} matrices are equal" if not different else f"{len(different)} differ: {different[:4]}"
        self._add(f"weights {when}", told, right=not different)
        completions = self._wait(self._sample(), 60)
        off = differences(rounded(self.network), completions)
        self._add(f"log-probs {when}, mean and largest difference", off, right=off[0] < MAX_OFF)
        if before is not None:
            stale = differences(before, completions)
            self._add(f"log-probs {when}, from the weights before", stale, right=stale[0] > 3 * max(off[0], 0.01))

    async def _sample(self) -> list[Any]:
        from agent_r1.engines.base import Prompt, Sampling

        vocabulary = self.network.config.vocab_size
        prompts = [[(31 * i + 7 * k * k) % vocabulary for k in range(PROMPT_TOKENS)] for i in range(PROMPTS)]
        sampling = Sampling(max_tokens=NEW_TOKENS)
        asked = [self.engine.generate(Prompt(ids), sampling, session=str(i)) for i, ids in enumerate(prompts)]
        return [(ids, completion) for ids, completion in zip(prompts, await asyncio.gather(*asked), strict=True)]

    async def _load(self) -> None:
        self._version += 1
        copies = self.engine._weights._copies
        source = ((name, tensor) for name, tensor in self.network.state_dict().items() if name not in copies)
        await self.engine.load_weights(source, self._version)

    async def _call(self, method: str) -> list[Any]:
        answer = await self.engine._servers[0]._post(
            self.engine._client, "/collective_rpc", json={"method": method, "timeout": 60}
        )
        results: list[Any] = answer["results"]
        return results

    def _timed(self, work: Coroutine[Any, Any, Any], limit: float) -> float:
        if self._sleeps:
            torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        self._wait(work, limit)
        return round(time.perf_counter() - began, 3)

    def _wait(self, work: Coroutine[Any, Any, Result], limit: float) -> Result:
        async def limited() -> Result:
            return await asyncio.wait_for(work, limit)

        return self._loop.run(limited())

    def free(self) -> float:
        return round(torch.cuda.mem_get_info(self.device)[0] / GIB, 2) if self.device.type == "cuda" else 0.0

    def _peak(self) -> float:
        """Return the most GPU memory that this process had since the last call, above what it has now, in GiB."""
        if self.device.type == "cpu":
            return 0.0
        extra = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return round(extra / GIB, 2)

    def close(self) -> None:
        self._wait(self.engine.close(), 30)
        self._loop.close()


def make_network(sizes: dict[str, Any], device: torch.device) -> Any:
    """A Llama in float32, as the learner holds it, whose log-probs are other ones as soon as its weights are."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["mlp"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv"],
        max_position_embeddings=2048,
        tie_word_embeddings=sizes["tied"],
        initializer_range=sizes["hidden"] ** -0.5,  # layers must outweigh a tied embedding, or the last token repeats
    )
    torch.manual_seed(0)
    with torch.device(device):
        network = LlamaForCausalLM(config).eval()
        torch.nn.init.normal_(network.lm_head.weight, std=1.2 * sizes["hidden"] ** -0.5)
    return network


def change(network: Any, *, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            size = float(parameter.std()) if parameter.ndim > 1 else 0.2
            parameter.mul_(0.9).add_(torch.randn_like(parameter), alpha=0.4 * size)


def rounded(network: Any) -> Any:
    """A copy whose weights are those that the server gets, for an exact forward pass."""
    return copy.deepcopy(network).to(DTYPE).float()


def differences(network: Any, sampled: list[Any]) -> list[float]:
    """The mean and the largest difference between sampled log-probs and those of a forward pass in float32."""
    from agent_r1.engines.vllm.assemble import score_response

    scores = [score_response(network, ids, completion.token_ids) for ids, completion in sampled]
    off = (torch.tensor(scores) - torch.tensor([completion.logprobs for _, completion in sampled])).abs()
    return [round(float(off.mean()), 4), round(float(off.max()), 4)]


def weights_dir() -> str:
    free = os.statvfs("/dev/shm")
    return "/dev/shm" if free.f_bavail * free.f_frsize > 8 * GIB else tempfile.gettempdir()


@contextmanager
def time_limit(report: Report, seconds: float) -> Iterator[None]:
    """End this process after a time, whatever it waits for. Its servers end with it."""

    def end() -> None:
        report.fail("time limit", f"not done after {seconds:g} s; where it waited is printed below")
        faulthandler.dump_traceback(file=sys.stdout, all_threads=True)
        sys.stdout.flush()
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def provide_ray(folder: Path) -> None:
    """vLLM 0.26 imports ray where it reads memory, and does not use it there: an empty module will do."""
    (stubs := folder / "stubs").mkdir(parents=True, exist_ok=True)
    (stubs / "ray.py").write_text('"""Stands in for ray."""\n', encoding="utf-8")
    path = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2]), str(stubs.resolve())]  # a real one first
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))


def describe(report: Report, options: argparse.Namespace) -> None:
    import transformers

    from agent_r1.engines.vllm.server_process import installed_version

    cuda = torch.cuda.is_available()
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "vllm": installed_version(options.python),
        "gpu": torch.cuda.get_device_name(0) if cuda else None,
        "free and total GiB": [round(part / GIB, 1) for part in torch.cuda.mem_get_info(0)] if cuda else None,
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "weights_dir": weights_dir(),
        "command": sys.argv,
    }
    for name, value in facts.items():
        report.add("machine", name, value)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--parts", default=",".join(PARTS), help="SHAPE:TRANSFER,...")
    parser.add_argument("--limit", type=float, default=230.0, help="seconds for everything")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with vLLM")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--memory-share", type=float, default=0.3, help="of the GPU, for a server")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    options = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    provide_ray(options.out)
    report = Report(options.out)
    with time_limit(report, options.limit):
        try:
            describe(report, options)
        except Exception as error:  # noqa: BLE001  such as a package that is missing: the parts would fail alike
            report.fail("start", f"{type(error).__name__}: {error}")
            return 1
        for part in options.parts.split(","):
            left = options.limit - (time.monotonic() - report.began)
            if left < PART_SECONDS:
                report.say(f"{part} is left out: {left:.0f} s left. Run it alone with --parts {part}")
                continue
            run_part(part, report, options, left - 10)
    report.say(f"done, {report.wrong} wrong")
    return int(report.wrong > 0)


def run_part(part: str, report: Report, options: argparse.Namespace, seconds: float) -> None:
    trial = None
    try:
        shape, transfer = part.split(":")
        trial = Trial(shape, transfer, report, options, seconds)
        trial.run()
    except Exception as error:  # noqa: BLE001  the other parts may still tell something
        traceback.print_exc(file=sys.stdout)
        report.fail(part, f"{type(error).__name__}: {error}")
    finally:
        if trial is not None:
            trial.close()
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())

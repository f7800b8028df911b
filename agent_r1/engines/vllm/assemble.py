"""Make the engine from a model and plain settings: which servers there are, what they must be able to do.

The modules that need torch are imported when an engine is made: `check_servers` is part of a quick check of a run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from agent_r1.engines.vllm.server_process import NEW, ServerProcess, free_ports, installed_version, read_version
from agent_r1.engines.vllm.vllm_server import Server, Wanted
from agent_r1.errors import ConfigError
from agent_r1.ranks.rank_env import place_of_rank

if TYPE_CHECKING:
    import torch

    from agent_r1.engines.vllm.shared_weights import AdapterShape, SentWeights
    from agent_r1.engines.vllm.vllm_engine import VLLMEngine

SHAPE = {"architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # on mean log-probs; another model is off by about 1 or more
Item = TypeVar("Item")


def check_servers(
    *,
    on_gpu: bool,
    python: str | None,
    urls: Sequence[str],
    gpus: Sequence[int],
    tensor_parallel: int,
    transfer: str,
    send_adapters: bool,
    **_: Any,
) -> None:
    """Check the settings of engine.kind=vllm, and the servers, before a model is loaded.

    on_gpu: whether the learner is.
    """
    if python is not None and not gpus and on_gpu:
        raise ConfigError("engine.gpus is empty: name the GPUs for vLLM, for example engine.gpus=[1]")
    if transfer == "ipc" and (not gpus or not on_gpu or tensor_parallel > 1 or send_adapters):
        raise ConfigError(
            "engine.transfer=ipc needs servers that the run starts on the learner's GPUs (engine.gpus), one GPU each, "
            "and sends all weights, not adapters: leave it out to send files"
        )
    find_servers(python=python, urls=urls)


def find_servers(*, python: str | None, urls: Sequence[str]) -> tuple[int, int]:
    """Check that servers can be started or reached. Returns the version that is started."""
    for url in urls:
        Server(url=url.rstrip("/")).wait_until_ready(0.0)
    if python is None:
        return NEW
    return read_version(installed_version(os.path.expanduser(python)), f"engine.python={python!r}")


def assemble_engine(  # noqa: PLR0913 (the settings of engine.kind=vllm, by their names)
    network: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    max_context_tokens: int,
    top_k: int,
    logs: Path | None,
    adapters: AdapterShape | None,
    python: str | None,
    urls: Sequence[str],
    gpus: Sequence[int],
    tensor_parallel: int,
    servers: int | None,
    args: Sequence[str],
    transfer: Literal["file", "ipc"],
    weights_dir: str,
    start_seconds: float,
    tolerance: float | None,
    sleep: bool,
) -> VLLMEngine:
    """device: where the learner computes.
    logs: the folder for the logs of servers that are started; None: a temporary one.
    adapters: send these alone after each step; None: send all weights.
    """
    from agent_r1.engines.vllm.shared_weights import tied_names
    from agent_r1.engines.vllm.vllm_engine import VLLMEngine

    version = find_servers(python=python, urls=urls)
    wanted = Wanted(
        max_context_tokens=max_context_tokens,
        top_k=top_k,
        tied=bool(tied_names(network)),
        vocabulary_size=network.get_input_embeddings().num_embeddings,
        lora_rank=adapters.rank if adapters is not None else 0,
        shape={name: value for name, value in network.config.to_dict().items() if name in SHAPE},
    )
    format_name = str(dtype).removeprefix("torch.")
    starting = [gpus[start : start + tensor_parallel] for start in range(0, len(gpus), tensor_parallel)]
    starting = own_share(starting, per_host=True) if gpus else [()] * (servers or 1)
    urls = own_share(urls, per_host=False) if urls else ()
    gpu = device if uses_ipc(transfer, starting, gpu_number(device, os.environ)) else None
    weights = make_weights(weights_dir, model=network, dtype=dtype, adapters=adapters, gpu=gpu)
    arguments = [
        *("--model", str(weights.path), "--skip-tokenizer-init", "--generation-config", "vllm"),
        *("--dtype", format_name, "--seed", str(seed), "--tensor-parallel-size", str(tensor_parallel)),
        *("--disable-uvicorn-access-log", *(["--enable-sleep-mode"] if sleep else [])),
        *weights.arguments,
        *wanted.arguments(version),
        *args,  # last, so that they take precedence
    ]
    key = os.environ.get("VLLM_API_KEY")  # the variable that vLLM's servers read, too
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    made = [Server(url=url.rstrip("/"), headers=headers) for url in urls]
    if python is not None:
        process = {"python": os.path.expanduser(python), "arguments": arguments, "variables": weights.variables}
        made += own_servers(starting, logs or Path(tempfile.mkdtemp(prefix="agent-r1-vllm-")), headers, **process)
    return VLLMEngine(
        made,
        weights=weights,
        wanted=wanted,
        score=lambda prompt, response: score_response(network, prompt, response),
        tolerance=tolerance or TOLERANCE[format_name],
        seed=seed,
        start_seconds=start_seconds,
        sleeps=sleep,
    )


def own_servers(
    starting: Sequence[Sequence[int]], logs: Path, headers: dict[str, str], **process: Any
) -> Iterator[Server]:
    """Return servers that are not started yet, one for each group of GPUs."""
    for gpus, port in zip(starting, free_ports(len(starting)), strict=True):
        one = ServerProcess(port=port, gpus=gpus, log=logs / f"vllm_{port}.log", **process)
        yield Server(url=f"http://127.0.0.1:{port}", headers=headers, process=one)


def make_weights(
    folder: str, *, model: Any, dtype: torch.dtype, adapters: AdapterShape | None, gpu: torch.device | None
) -> SentWeights:
    """Choose how weights are sent. gpu: the one that the learner shares with its server; None: they travel as files."""
    from agent_r1.engines.vllm.gpu_weights import GpuWeights
    from agent_r1.engines.vllm.shared_weights import SharedAdapters, SharedWeights

    if adapters is not None:
        return SharedAdapters(folder, model=model, dtype=dtype, shape=adapters)
    if gpu is not None:
        return GpuWeights(folder, model=model, dtype=dtype, device=gpu)
    return SharedWeights(folder, model=model, dtype=dtype)


def own_share(items: Sequence[Item], *, per_host: bool) -> list[Item]:
    """Return this rank's part of the servers, which are divided among all ranks, or among the ranks of each host. A
    rank sends the weights to its own servers."""
    place = place_of_rank(os.environ)
    if place is None:
        return list(items)
    rank, ranks = (place.local_rank, place.local_size) if per_host else (place.rank, place.size)
    if len(items) < ranks:
        raise ConfigError(f"{ranks} ranks need at least {ranks} vLLM servers, one each, but there are {len(items)}")
    return list(items[rank::ranks])


def gpu_number(device: torch.device, environment: Mapping[str, str]) -> int | None:
    """Return the number of this process's GPU as `nvidia-smi` counts; None if it has none or it cannot be told."""
    import torch

    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return index
    names = visible.split(",")
    return int(names[index]) if index < len(names) and names[index].strip().isdigit() else None


def uses_ipc(transfer: str, servers: Sequence[Sequence[int]], learner: int | None) -> bool:
    """Whether a rank sends weights without a file: it needs one server, on one GPU, which is its learner's."""
    if transfer == "ipc" and (learner is None or [list(gpus) for gpus in servers] != [[learner]]):
        raise ConfigError(
            f"engine.transfer=ipc needs one vLLM server on each learner's GPU alone; here the learner's is "
            f"{'not known' if learner is None else learner} and the servers' are {servers}: set engine.gpus to the "
            "learners' GPUs, or leave engine.transfer out"
        )
    return transfer == "ipc"


def score_response(network: Any, prompt: list[int], response: list[int]) -> list[float]:
    """Return the log-probs of a response under the learner's weights."""
    import torch

    ids = torch.tensor([prompt + response], device=network.device)
    with torch.no_grad():
        logits = network(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen: list[float] = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()
    return chosen

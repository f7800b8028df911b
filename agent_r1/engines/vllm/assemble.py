"""Make the engine from a model and plain settings: which servers there are, what they must be able to do.

The modules that need torch are imported when an engine is made: `check_servers` is part of a quick check of a run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agent_r1.engines.vllm.server_process import ServerProcess, check_version, free_ports, installed_version
from agent_r1.engines.vllm.vllm_server import Server, Wanted
from agent_r1.errors import ConfigError
from agent_r1.ranks.rank_env import place_of_rank

if TYPE_CHECKING:
    import torch

    from agent_r1.engines.vllm.shared_weights import AdapterShape
    from agent_r1.engines.vllm.vllm_engine import VLLMEngine

SHAPE = {"architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}  # of mean log-probs; those of another model are off by about 1 or more
Item = TypeVar("Item")


def check_servers(*, python: str | None, urls: Sequence[str]) -> None:
    """Check that servers can be started or reached, before a model is loaded."""
    if python is not None:
        check_version(installed_version(os.path.expanduser(python)), f"engine.python={python!r}")
    for url in urls:
        Server(url=url.rstrip("/")).wait_until_ready(0.0)


def assemble_engine(  # noqa: PLR0913 (the settings of engine.kind=vllm, by their names)
    network: Any,
    *,
    dtype: torch.dtype,
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
    weights_dir: str,
    start_seconds: float,
    tolerance: float | None,
    sleep: bool,
) -> VLLMEngine:
    """logs: the folder for the logs of servers that are started; None: a temporary one.
    adapters: send these alone after each step; None: send all weights.
    """
    from agent_r1.engines.vllm.shared_weights import SharedAdapters, SharedWeights, tied_names
    from agent_r1.engines.vllm.vllm_engine import VLLMEngine

    check_servers(python=python, urls=urls)
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
    own: dict[str, Any] = {"model": network, "dtype": dtype}
    weights = SharedAdapters(weights_dir, shape=adapters, **own) if adapters else SharedWeights(weights_dir, **own)
    arguments = [
        *("--model", str(weights.path), "--skip-tokenizer-init", "--generation-config", "vllm"),
        *("--dtype", format_name, "--seed", str(seed), "--tensor-parallel-size", str(tensor_parallel)),
        *("--disable-uvicorn-access-log", *(["--enable-sleep-mode"] if sleep else [])),
        *wanted.arguments(),
        *args,  # last, so that they take precedence
    ]
    key = os.environ.get("VLLM_API_KEY")  # the variable that vLLM's servers read, too
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    made = [Server(url=url.rstrip("/"), headers=headers) for url in urls]
    if python is not None:
        logs = logs or Path(tempfile.mkdtemp(prefix="agent-r1-vllm-"))
        for on_gpus, port in zip(starting, free_ports(len(starting)), strict=True):
            log = logs / f"vllm_{port}.log"
            process = ServerProcess(
                python=os.path.expanduser(python), arguments=arguments, port=port, gpus=on_gpus, log=log
            )
            made.append(Server(url=f"http://127.0.0.1:{port}", headers=headers, process=process))
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


def own_share(items: Sequence[Item], *, per_host: bool) -> list[Item]:
    """Return this rank's servers: of those that all ranks share, or that the ranks of each host do. Every rank has its
    own, to which it sends the weights."""
    place = place_of_rank(os.environ)
    if place is None:
        return list(items)
    rank, ranks = (place.local_rank, place.local_size) if per_host else (place.rank, place.size)
    if len(items) < ranks:
        raise ConfigError(f"{ranks} ranks need at least {ranks} vLLM servers, one each, but there are {len(items)}")
    return list(items[rank::ranks])


def score_response(network: Any, prompt: list[int], response: list[int]) -> list[float]:
    """Return the log-probs of a response under the learner's weights."""
    import torch

    ids = torch.tensor([prompt + response], device=network.device)
    with torch.no_grad():
        logits = network(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen: list[float] = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()
    return chosen

"""Time and memory of a training step on several GPUs, for each way to run it.

A rank is a GPU with its own engine; the learner is sharded over all of them. Pure arithmetic over `formulas.py`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from agent_r1.learn.sizes import moment_bytes
from agent_r1.plan import formulas
from agent_r1.plan.formulas import Batch, Gpu, Method, activation_bytes, bytes_per_token, causal_pairs
from agent_r1.plan.shapes import Shape

PACK_TOKENS = 131_072
CACHE_SHARE = 0.3  # of free memory, like engine.gpu_memory_share
NODE = 8  # GPUs that are connected by fast links
SEQUENCES = 1024  # decoded together at most
MLP_CHUNK = 4096  # tokens; smaller chunks spend a notable share of their time on adding up gradients of weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The work of one training step. Counts of an episode are means."""

    episodes: int
    group_size: int
    steps: float  # model calls of an episode
    prompt_tokens: float  # of the first call, shared by a group
    response_tokens: float  # sampled in an episode
    episode_tokens: float  # the last prompt and response
    longest: int  # tokens that an episode may have
    at_once: int  # episodes played at the same time, over all GPUs
    tool_seconds: float = 0.0  # of a step
    epochs: int = 1
    forwards: int = 0  # passes without a gradient: old log-probs, reference, values
    critics: int = 0  # models that are trained beside the policy
    references: int = 0  # frozen copies of the model


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Memory and time of one step, per GPU."""

    method: Method
    memory: dict[str, float]  # bytes by purpose
    fits: bool
    pack_tokens: int
    sequences: int  # decoded together by one engine
    collect: float  # seconds
    update: float
    sync: float
    overlapped: float  # seconds of a step whose collection and update overlap
    network_bound: bool  # GPUs wait for each other's weights and gradients

    @property
    def total_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def step(self) -> float:
        return self.collect + self.update + self.sync

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"step": self.step, "total_bytes": self.total_bytes}


def fixed_memory(shape: Shape, method: Method, load: Load, gpus: int) -> dict[str, float]:
    """Bytes on each GPU that are there in every step. On one GPU, `lora.share_base` is assumed."""
    rank, full, copies = method.adapter_rank, shape.parameters, 1 + load.critics
    trained = shape.trained_parameters(rank)
    # Gathered: a layer and the next one in bf16, embeddings and head in fp32; and fp32 gradients of what is trained.
    gathered = (4 if rank is not None else 8) * (shape.layer_parameters + full - shape.body_parameters)
    base = 0 if rank is None or gpus == 1 else 4 * full  # several GPUs shard a copy of their own
    return {
        "engine": 2 * full / method.split,
        "weights": (base + 4 * trained * copies) / gpus,
        "gradients": 4 * trained * copies / gpus,
        "optimizer": 0.0 if method.offload else state_bytes(shape, method) * copies / gpus,
        "reference": 4 * full * load.references / gpus if rank is None else 0.0,
        "gathered layers": gathered if gpus > 1 else 0.0,
    }


def state_bytes(shape: Shape, method: Method) -> int:
    """AdamW's moments of one model, on all GPUs together."""
    sizes = shape.trained_matrices(method.adapter_rank)
    return sum(moment_bytes(rows, columns, eight_bit=method.eight_bit) for rows, columns in sizes)


def estimate(shape: Shape, gpu: Gpu, load: Load, method: Method, *, gpus: int) -> Estimate:
    memory = fixed_memory(shape, method, load, gpus)
    engines = max(1, gpus // method.split)
    playing = max(1, min(SEQUENCES, math.ceil(min(load.at_once, load.episodes) / engines)))
    free = gpu.usable_bytes - sum(memory.values())
    shared = gpus == 1
    one_cache = load.episode_tokens * shape.kv_bytes / method.split
    cache = max(load.longest * shape.kv_bytes / method.split, min(playing * one_cache, CACHE_SHARE * free))
    per_token = bytes_per_token(shape, method, shared_base=shared)
    fixed = activation_bytes(shape, load.longest, method, shared_base=shared) - load.longest * per_token
    fitting = (free - cache - fixed) / per_token
    tokens = load.episodes * load.episode_tokens / gpus
    pack = int(max(load.longest, min(PACK_TOKENS, fitting, tokens)))
    memory |= {"cache": cache, "activations": activation_bytes(shape, pack, method, shared_base=shared)}
    sequences = max(1, min(playing, int(cache / one_cache)))
    work, chain = _collect_seconds(shape, gpu, load, method, engines=engines, sequences=sequences)
    episodes, room = load.episodes / engines, max(sequences, min(SEQUENCES, load.at_once // engines))
    waiting = math.ceil(episodes / sequences) * chain
    update = _update_seconds(shape, gpu, load, method) / gpus
    moving = _moving_seconds(shape, method, tokens / pack, gpus)
    sync = 0.0 if method.adapter_rank is not None else 2 * shape.parameters / _link(gpus)
    update = max(update, moving) + _offload_seconds(shape, load, method, gpus)
    return Estimate(
        method=method,
        memory=memory,
        fits=fitting >= load.longest,
        pack_tokens=pack,
        sequences=sequences,
        collect=max(work, waiting),
        update=update,
        sync=sync,
        overlapped=max(work + update, episodes / room * chain) + sync,  # the next episodes start before the last end
        network_bound=moving >= update > 0,
    )


def _collect_seconds(
    shape: Shape, gpu: Gpu, load: Load, method: Method, *, engines: int, sequences: int
) -> tuple[float, float]:
    """(seconds of work of an engine and its host, seconds that one episode takes at least)."""
    episodes = load.episodes / engines
    context = (load.prompt_tokens + load.episode_tokens) / 2
    one_pass = formulas.decode_pass_seconds(shape, gpu, sequences=sequences, context=context, split=method.split)
    decoding = episodes * load.response_tokens / sequences * one_pass
    # The last token of a response is computed with the observation that follows it.
    observed = load.episode_tokens - load.prompt_tokens - load.response_tokens + load.steps - 1
    new_tokens = episodes * (load.prompt_tokens / load.group_size + observed)
    prompts = formulas.prefill_seconds(shape, gpu, tokens=new_tokens, context=context / 2) / method.split
    chain = load.steps * load.tool_seconds + load.response_tokens * one_pass
    hosting = episodes * load.steps * formulas.measured("call_seconds")  # rendering, parsing, scheduling
    return decoding + prompts + hosting, chain


def _update_seconds(shape: Shape, gpu: Gpu, load: Load, method: Method) -> float:
    """All passes over a batch, on one GPU. Attempts of a group share their prompt, and the attention inside it."""
    prompt, own = load.prompt_tokens, load.episode_tokens - load.prompt_tokens
    pairs = own * prompt + causal_pairs(own) + causal_pairs(prompt) / load.group_size
    batch = Batch(
        tokens=load.episodes * (own + prompt / load.group_size),
        pairs=load.episodes * pairs,
        trained=load.episodes * load.response_tokens,
    )
    training = formulas.update_seconds(shape, gpu, batch, method)
    return load.epochs * (1 + load.critics) * training + load.forwards * formulas.forward_seconds(shape, gpu, batch)


def _link(gpus: int) -> float:
    """Bytes per second at which weights move: inside a GPU, inside a node, between nodes."""
    name = "copy_bytes" if gpus == 1 else "link_bytes" if gpus <= NODE else "network_bytes"
    return formulas.measured(name)


def _moving_seconds(shape: Shape, method: Method, packs: float, gpus: int) -> float:
    """Gather all weights in bf16 forward and backward, and reduce fp32 gradients of what is trained, for every pack;
    overlaps with computing."""
    if gpus == 1:
        return 0.0
    trained = shape.trained_parameters(method.adapter_rank)
    moved = (4.0 * shape.parameters + 4.0 * trained) * math.ceil(packs)
    return moved * (gpus - 1) / gpus / _link(gpus)


def _offload_seconds(shape: Shape, load: Load, method: Method, gpus: int) -> float:
    """AdamW's moments come from the host and go back."""
    moved = 2 * state_bytes(shape, method) * (1 + load.critics) * load.epochs / gpus
    return moved / formulas.measured("host_bytes") if method.offload else 0.0


def methods(*, gpus: int, adapter_rank: int | None) -> list[Method]:
    """The ways to try, simplest first. Adapters are tried last, unless the recipe has them."""
    checkpointing = "learner.activation_checkpointing=true"
    plain = Method(name="plain", adapter_rank=adapter_rank)
    saving = replace(plain, name="checkpoint", settings=checkpointing, checkpointing=True)
    small, host = "learner.optimizer_state=8bit", "learner.offload_optimizer=true"
    chunks = f"{checkpointing} learner.mlp_chunk_tokens={MLP_CHUNK}"
    cut = replace(saving, name="chunks", settings=chunks, mlp_chunk=MLP_CHUNK)
    tried = [plain, saving, cut, replace(cut, name="8 bit", settings=f"{chunks} {small}", eight_bit=True)]
    tried.append(replace(cut, name="offload", settings=f"{chunks} {host}", offload=True))
    for split in (each for each in (2, 4, 8) if gpus % each == 0):
        settings = f"engine.kind=vllm engine.tensor_parallel={split} {checkpointing}"
        tried.append(replace(saving, name=f"vLLM x{split}", settings=settings, split=split))
    if adapter_rank is None:
        words = "lora.rank=16 learner.lr=1e-4" + (" lora.share_base=true" if gpus == 1 else "")
        lora = Method(name="lora", settings=words, adapter_rank=16)
        tried += [lora, replace(lora, name="lora+checkpoint", settings=f"{words} {checkpointing}", checkpointing=True)]
    return tried

"""What engines and learner do with each architecture, found by running them against transformers' eager forward pass.

`python -m tests.models.architecture_table` writes the table of docs/models.md.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from agent_r1.engines.base import Completion, Engine, Prompt, Sampling
from agent_r1.engines.transformers_engine import TransformersEngine
from agent_r1.errors import UnsupportedModelError
from agent_r1.learn.batch.packs import merge_steps, pack
from agent_r1.learn.batch.tree import PrefixSharing
from agent_r1.learn.model.policy import PolicyModel
from tests.engines.engine_sides import CPU, GPU, make_engine
from tests.learn.builders import step, trajectory
from tests.models.architectures import ARCHITECTURES, VOCABULARY, WINDOW, Architecture

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- architectures: begin -->\n", "<!-- architectures: end -->\n"
HEADER = """\
| architecture | tested with | `engine.kind=local` | `engine.kind=transformers` | learner |
|---|---|---|---|---|
"""
REGENERATE = "python -m tests.models.architecture_table"
TOLERANCE = 1e-4  # of log-probs in fp32
TEMPERATURE = 0.7


def find_row(architecture: Architecture) -> str:
    """One row of the table. Raises AssertionError if something runs and is not exact."""
    model = architecture.make()
    model.set_attn_implementation("eager")
    sides = [_verdict(lambda side=side: _check_engine(model, _local(model, side))) for side in (CPU, GPU)]  # type: ignore[misc]
    assert sides[0] == sides[1], f"{architecture.name} on a CPU and on a GPU: {sides}"
    other = _verdict(lambda: _check_engine(model, _transformers(model)))
    learner = _verdict(lambda: _check_learner(model))
    return f"| {architecture.name} | {architecture.features} | {sides[0]} | {other} | {learner} |"


def _verdict(check: Callable[[], str]) -> str:
    try:
        return check()
    except UnsupportedModelError as error:
        return f"refused: {error}"


def _local(model: Any, side: dict[str, Any]) -> Engine:
    return make_engine(model, **side, max_running=3, max_batch_tokens=16)


def _transformers(model: Any) -> Engine:
    return TransformersEngine(copy.deepcopy(model), seed=0, max_running=3, max_cached_tokens=512, threads=1)


def _check_engine(model: Any, engine: Engine) -> str:
    """Two steps of five episodes, of which three run at once and two begin alike; most are longer than the window."""

    async def episode(index: int, ids: list[int]) -> list[tuple[list[int], Completion]]:
        first = await engine.generate(Prompt(ids), _sampling(index), session=str(index))
        longer = ids + first.token_ids + _ids(3 + index, seed=index)
        second = await engine.generate(Prompt(longer), _sampling(index + 9), session=str(index))
        return [(ids, first), (longer, second)]

    async def play() -> list[list[tuple[list[int], Completion]]]:
        prompts = [_ids(length) for length in (1, WINDOW + 3, WINDOW + 3, 14, 20)]
        episodes = await asyncio.gather(*(episode(index, ids) for index, ids in enumerate(prompts)))
        await engine.close()
        return list(episodes)

    for steps in asyncio.run(play()):
        for ids, completion in steps:
            expected = _logprobs(model, ids + completion.token_ids)[len(ids) - 1 :]
            error = (torch.tensor(completion.logprobs) - expected).abs().max().item()
            assert error <= TOLERANCE, f"sampled log-probs are off by {error:.2g}"
    return "exact"


def _sampling(seed: int) -> Sampling:
    return Sampling(max_tokens=4 + seed % 3, temperature=TEMPERATURE, seed=seed)


def _check_learner(model: Any) -> str:
    """Log-probs and gradients of a pack with a shared prompt, longer than the window, and two other segments."""
    start = _ids(2 * WINDOW)
    sequences = [start + _ids(9, seed=1), start + _ids(5, seed=2), _ids(20, seed=3), _ids(7, seed=4)]
    policy = PolicyModel(copy.deepcopy(model))
    sharing: PrefixSharing = "on" if policy.packs else "off"
    (packed,) = pack(merge_steps(trajectory(step(ids[:2], ids[2:])) for ids in sequences), 999, prefix_sharing=sharing)
    got, _ = policy.logprobs(packed, temperature=TEMPERATURE)
    plain = copy.deepcopy(model)
    expected = torch.cat([_logprobs(plain, ids)[1:] for ids in sequences])[packed.columns_T]
    error = (got - expected).abs().max().item()
    assert error <= TOLERANCE, f"packed log-probs are off by {error:.2g}"
    got.sum().backward()
    expected.sum().backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in policy.model.named_parameters():
        if parameter.grad is not None:
            scale = theirs[name].grad.abs().max().item()
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-3 * scale + 1e-5)
    return "packed" if policy.packs else "one segment at a time"


def _logprobs(model: Any, ids: list[int]) -> Tensor:
    """Of each id but the first, by transformers' eager forward pass."""
    logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return (logits / TEMPERATURE).log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def _ids(length: int, *, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def committed_rows() -> tuple[str, dict[str, str]]:
    """The version of transformers that the committed table was generated with, and its rows by architecture."""
    table = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    version = table.partition("Generated with transformers ")[2].partition(":")[0]
    return version, {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def write_table() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    rows = "".join(find_row(architecture) + "\n" for architecture in ARCHITECTURES)
    version = f"Generated with transformers {transformers.__version__}: `{REGENERATE}`.\n"
    PAGE.write_text(f"{before}{BEGIN}{HEADER}{rows}\n{version}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    write_table()

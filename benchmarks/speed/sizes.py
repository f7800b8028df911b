"""What training costs by size, method and context: memory, tokens per second and MFU of optimizer steps.

python -m benchmarks.speed sizes
python -m benchmarks.speed sizes --only 8b
python -m benchmarks.speed sizes --only 1.5b-ways

Weights are random, of the shapes of `agent-r1 plan --model`. Each case tries the ways to save memory in turn (none;
activation checkpointing; MLPs in chunks of tokens too; with both, the optimizer's moments in 8 bits, or on the host)
and stores the first that fits. The group `1.5b-ways` stores each of them. Beside the peak there is what the learner's
estimate before the first step and `agent-r1 plan` expect. The engine and its cache are not there: its weights add 2
bytes per parameter to full fine-tuning, and nothing to adapters, whose base it shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from agent_r1.bench.learner_speed import PROMPT_SHARE, make_learner
from agent_r1.bench.measure import GIB, Cost, free_memory, matmul_flops, measure
from agent_r1.bench.models import BenchModel, LlamaShape
from agent_r1.bench.results import Figures, Row
from agent_r1.bench.synthetic import SyntheticTrajectories
from agent_r1.errors import ConfigError
from agent_r1.learn.learner import Learner
from agent_r1.learn.memory import fixed_bytes, least_room
from agent_r1.learn.model.lora import LoRA
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.plan.formulas import Method, activation_bytes, training_flops
from agent_r1.plan.layouts import MLP_CHUNK, Load, fixed_memory
from agent_r1.plan.shapes import read_shape
from agent_r1.types import CreditedTrajectory

RANK = 16
PACKS = 2  # of a step
HOPELESS = 1.0  # planned memory over that of the device, above which a way is not tried


def savings(chunk: int) -> tuple[Method, ...]:
    """The ways to save memory, in the order in which they are tried. chunk: tokens of a chunk of an MLP."""
    both = Method(name="chunks", checkpointing=True, mlp_chunk=chunk)
    return (
        Method(name="plain"),
        Method(name="checkpointing", checkpointing=True),
        both,
        replace(both, name="8 bit", eight_bit=True),
        replace(both, name="offload", offload=True),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    cases: tuple[tuple[str, bool], ...]  # (shape, whether only adapters are trained)
    contexts: tuple[int, ...]
    tokens: int  # of a pack; a step has two, so that gradients are there when the second one is computed
    chunk: int  # tokens of an MLP that are computed together, where chunks save memory
    every_way: tuple[str, ...]  # shapes for which all ways to save memory are measured, at the longest context


FULL = Grid(
    cases=(("1.5b", False), ("1.5b", True), ("4b", False), ("4b", True), ("8b", False), ("8b", True), ("14b", True)),
    contexts=(4096, 32_768),
    tokens=32_768,
    chunk=MLP_CHUNK,
    every_way=("1.5b",),
)
QUICK = Grid(cases=(("tiny", False), ("tiny", True)), contexts=(32, 64), tokens=64, chunk=16, every_way=("tiny",))


@dataclass(kw_only=True)
class SizesBench:
    grid: Grid
    device: torch.device
    repeats: int

    @property
    def groups(self) -> dict[str, Callable[[], Iterator[Row]]]:
        names = dict.fromkeys(name for name, _ in self.grid.cases)
        ways = {f"{name}-ways": partial(self.ways, name) for name in self.grid.every_way}
        return {**{name: partial(self.rows, name) for name in names}, **ways}

    def close(self) -> None:
        free_memory(self.device)

    def rows(self, name: str) -> Iterator[Row]:
        """The first way that fits, for each method and context."""
        for adapters in (adapters for shape, adapters in self.grid.cases if shape == name):
            method = "lora" if adapters else "full"
            names = {context: f"{name}/{method}, {context} tokens" for context in self.grid.contexts}
            yield from self.measure(name, names, adapters, self._savings)

    def ways(self, name: str) -> Iterator[Row]:
        """Each way at the longest context, whether it fits or not."""
        for adapters in (adapters for shape, adapters in self.grid.cases if shape == name):
            for saving in self._savings:
                row = f"{name}-ways/{'lora' if adapters else 'full'}, {saving.name}"
                yield from self.measure(name, {max(self.grid.contexts): row}, adapters, (saving,))

    @property
    def _savings(self) -> tuple[Method, ...]:
        """Offloading has no effect on a CPU."""
        return tuple(each for each in savings(self.grid.chunk) if not each.offload or self.device.type == "cuda")

    def measure(self, shape: str, names: Mapping[int, str], adapters: bool, ways: Sequence[Method]) -> Iterator[Row]:
        """A row for each context, by its name. One learner serves all of them: a step has the same number of tokens."""
        model = LlamaShape.named(shape).model()
        peak_flops = matmul_flops(self.device, torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        batches = {context: [context] * (PACKS * max(1, self.grid.tokens // context)) for context in names}
        found: dict[int, list[tuple[Cost, float]]] = {}
        expected: Figures = {}
        for saving in ways:
            planned = self._planned_bytes(model, adapters, saving, self.grid.tokens)
            if self._hopeless(planned):
                continue
            try:
                found, expected = self._try(model, adapters, saving, batches)
                break
            except (torch.cuda.OutOfMemoryError, ConfigError):  # ConfigError: the estimate refuses the pack
                pass
            free_memory(self.device)  # outside of the handler, whose traceback holds the tensors
        for context, lengths in batches.items():
            trained = sum(length - max(1, round(PROMPT_SHARE * length)) for length in lengths)
            flops = training_flops(
                lengths,
                trained=trained,
                body_parameters=model.body_parameters,
                head_parameters=model.head_parameters,
                attention_width=model.attention_width,
                per_weight=4.0 if adapters else 6.0,
            )
            repeats: list[Figures] = [
                {
                    "seconds": cost.seconds,
                    "tokens_per_second": sum(lengths) / cost.seconds,
                    "mfu": flops / peak_flops / cost.seconds,
                    "peak_gib": peak / GIB,
                }
                for cost, peak in found.get(context, [])
            ]
            once = {"fits": float(bool(repeats)), "planned_gib": planned / GIB, "matmul_tflops": peak_flops / 1e12}
            settings = {"context": context, "adapters": adapters, "tokens": sum(lengths), "saving": saving.name}
            yield Row(
                name=names[context],
                settings={**model.settings, **settings},
                headline="tokens_per_second" if repeats else "fits",
                repeats=repeats,
                once=expected | once,
            )

    def _hopeless(self, planned: float) -> bool:
        """Whether a way is planned to take far more memory than there is, so that trying it would only take time."""
        if self.device.type != "cuda":
            return False
        return planned > HOPELESS * torch.cuda.get_device_properties(self.device).total_memory

    def _planned_bytes(self, model: BenchModel, adapters: bool, saving: Method, tokens: int) -> float:
        shape = read_shape("bench", model.config)
        method = replace(saving, adapter_rank=RANK if adapters else None)
        counted = fixed_memory(shape, method, _NO_LOAD, gpus=1)
        if not adapters:  # there is no engine here; with adapters, this is the base
            counted.pop("engine")
        packs = activation_bytes(shape, tokens, method, shared_base=True)
        return sum(counted.values()) + packs

    def _try(
        self, model: BenchModel, adapters: bool, saving: Method, batches: Mapping[int, list[int]]
    ) -> tuple[dict[int, list[tuple[Cost, float]]], Figures]:
        learner, expected = self._learner(model, adapters, saving)
        return {context: self._steps(learner, model, lengths) for context, lengths in batches.items()}, expected

    def _learner(self, model: BenchModel, adapters: bool, saving: Method) -> tuple[Learner, Figures]:
        """A learner, and its own estimate of its memory. Raises if its packs do not fit."""
        gpu = self.device.type == "cuda"
        dtype = torch.bfloat16 if gpu and adapters else torch.float32
        lora = LoRA(rank=RANK, alpha=2.0 * RANK, target_modules=None, seed=0, share_base=True) if adapters else None
        policy = PolicyModel(
            model.network(dtype=dtype, device=self.device),
            autocast_dtype=torch.bfloat16 if gpu else None,
            lora=lora,
            compiled=gpu,
            checkpoint_activations=saving.checkpointing,
            mlp_chunk_tokens=saving.mlp_chunk,
        )
        learner = make_learner(
            policy,
            tokens_per_pack=self.grid.tokens,
            offload_optimizer=saving.offload,
            eight_bit_optimizer=saving.eight_bit,
        )
        expected: Figures = {"counted_gib": sum(fixed_bytes(learner).values()) / GIB}
        if gpu:
            measured = least_room(learner)
            assert measured is not None
            if measured.tokens_that_fit < self.grid.tokens:  # training would refuse it, too
                raise ConfigError(f"packs of {self.grid.tokens} tokens do not fit")
            packs = measured.bytes_once + self.grid.tokens * measured.bytes_per_token
            expected["estimated_gib"] = expected["counted_gib"] + max(measured.bytes_in_step, packs) / GIB
        return learner, expected

    def _steps(self, learner: Learner, model: BenchModel, lengths: list[int]) -> list[tuple[Cost, float]]:
        """(time and added memory, peak memory) of each step after one that warms up."""
        batch = _batch(model, lengths)
        learner.update(_batch(model, [min(64, length) for length in lengths]))  # compiles with dynamic sizes
        for _ in range(2):  # the allocator settles
            learner.update(batch)
        results = []
        for _ in range(self.repeats):
            learner.zero_grad()
            cost = measure(partial(learner.update, batch), self.device)
            peak = float(torch.cuda.max_memory_allocated(self.device)) if self.device.type == "cuda" else 0.0
            results.append((cost, peak))
        return results


def _batch(model: BenchModel, lengths: list[int]) -> list[CreditedTrajectory]:
    synthetic = SyntheticTrajectories(model.vocabulary)
    prompts = [max(1, round(PROMPT_SHARE * length)) for length in lengths]
    return [synthetic.single(synthetic.ids(p), n - p) for p, n in zip(prompts, lengths, strict=True)]


_ANY: dict[str, Any] = dict.fromkeys(("episodes", "group_size", "steps", "longest", "at_once"), 1)
_NO_LOAD = Load(**_ANY, prompt_tokens=1, response_tokens=1, episode_tokens=2)

"""Host time per model call of multi-step recipes, without a GPU.

    python -m benchmarks.host_time --data FOLDER                  # alfworld, webshop and gsm8k_tool
    python -m benchmarks.host_time --data FOLDER --only alfworld --profile 40
    python -m benchmarks.host_time --histories 5,10,30            # synthetic, no data
    python -m benchmarks.host_time --data FOLDER --gpu            # in real time, on a GPU

FOLDER holds the released files as `data.path` takes them, in folders alfworld, webshop and gsm8k.

Everything but the model is real: the recipe's rows, environment, tools and limits, the collector, the flow, rendering,
and the GPU engine's scheduler and bookkeeping, with its tensors on the CPU. Instead of running a pass, the device
hands out the next tokens of a script: demonstrations of the recipe, with a harmless extra action now and then, so that
the attempts of a group differ.

`cpu ms per call` is CPU time of the process over model calls. `simulated seconds` adds the time that the event loop
would have waited for a device with the pass times of an H200 and a model of 135 million parameters. Those of 32, 256
and 1,024 decoding sequences are measured (`results/bench_engine.nvidia-h200.json`), the others are assumed. Time is CPU
time plus waiting. A busy machine makes CPU time longer too, so compare only figures that took turns
(`benchmarks.host_time_against`).

With `--gpu`, the passes of a model of 135 million parameters with random weights run on the GPU, and the script
replaces what they sampled. `seconds` are real then, and the first repeat warms the engine up.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import random
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agent_r1.bench.models import SMOLLM2_135M, LlamaShape
from agent_r1.build.collectors import train_collector
from agent_r1.build.engine import GPU_BURST, GPU_RUNNING
from agent_r1.build.recipe import recipe_path
from agent_r1.build.task import build_task
from agent_r1.config import load_config
from agent_r1.data.rows import Demo
from agent_r1.engines.base import Sampling
from agent_r1.engines.local import local_engine
from agent_r1.engines.local.gpu import torch_kernels
from agent_r1.engines.local.gpu.gpu_runner import GpuRunner, Width
from agent_r1.engines.local.gpu.gpu_state import in_order, put
from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.engines.local.request import Chunk, ReadDraws, Request
from agent_r1.envs.text_env import Reply, TextEnv
from agent_r1.flows.budgets import Limits
from agent_r1.flows.flow import AgentEnvLoop
from agent_r1.recipes.alfworld import task as alfworld
from agent_r1.recipes.gsm8k_tool import task as gsm8k_tool
from agent_r1.recipes.webshop import task as webshop
from agent_r1.rollout.collect import Collector
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tokens.rendering import Renderer
from agent_r1.train.garbage import freeze_parts
from agent_r1.types import Group, TaskRow

SHAPE = LlamaShape(layers=1, hidden=16, intermediate=16, heads=1, kv_heads=1, vocabulary=8_192, positions=8_192)
EXTRA = 0.3  # share of actions before which an attempt does something else first
PASS_ROWS, PASS_MS = (1, 32, 256, 512, 1024), (1.2, 1.26, 2.0, 3.1, 5.2)  # one token for each of several sequences
FIRST_MS, TOKEN_US = 1.3, 2.6  # a pass over prompts, and each of its tokens
RECIPES: dict[str, tuple[str, Callable[..., list[Demo]], str, list[str]]] = {
    "alfworld": ("alfworld/explorer", alfworld.explorer_demos, "alfworld", ["look", "inventory", "go to shelf 9"]),
    "webshop": ("webshop", webshop.demos, "webshop", ["click[features]", "click[the red one]", "search"]),
    "gsm8k_tool": (
        "gsm8k_tool",
        gsm8k_tool.demos,
        "gsm8k",
        [FORMATS["hermes"].write_call("calculator", {"expression": f"{n} * {n} + 1"}) for n in range(30, 40)],
    ),
}


class IdleSelector(selectors.DefaultSelector):
    """Does not wait: counts the seconds that the event loop would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = 0.0
        self.now = time.process_time()

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            return super().select(0.01)  # a thread will wake the loop
        if not ready:
            self.idle += max(0.0, timeout or 0.0)
        self.now = time.process_time() + self.idle
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is CPU time and simulated waiting. It is read once a turn: reading it takes long."""

    def __init__(self) -> None:
        self.selector = IdleSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now

    def exact_time(self) -> float:
        return time.process_time() + self.selector.idle


class Script:
    """What each episode says: its n-th request is answered with its n-th text."""

    def __init__(self, said: dict[str, list[list[int]]]) -> None:
        self._said = said  # by row and attempt
        self._steps: dict[str, int] = {}
        self._responses: dict[Request, list[int]] = {}

    def tokens(self, chunk: Chunk) -> list[int]:
        request = chunk.request
        if request not in self._responses:
            step = self._steps.get(request.session, 0)
            self._steps[request.session] = step + 1
            texts = self._said[request.session.partition("@")[0]]
            self._responses[request] = texts[min(step, len(texts) - 1)]
        return self._responses[request][chunk.drawn : chunk.drawn + chunk.count]


class ScriptedRunner(GpuRunner):
    """Loads every step as on a GPU, and takes its tokens from the script."""

    script: Script
    clock: Callable[[], float]
    turn: Callable[[], float]  # the time when the turn of the event loop began
    free_at = 0.0  # when the device will have done what was launched
    passes = 0

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk]) -> ReadDraws:
        ordered = self._load(chunks)
        drawing = [chunk for chunk in ordered if chunk.count]
        self._cache.copy([pair for chunk in chunks for pair in chunk.copies])
        rows, most = len(drawing), max((chunk.count for chunk in drawing), default=0)
        seconds, later = 0.0, most
        if rows < len(chunks) or any(chunk.length > 1 for chunk in chunks):
            seconds, later = FIRST_MS / 1e3 + self._lay_out(ordered)[0] * TOKEN_US / 1e6, max(0, most - 1)
        seconds += later * float(np.interp(rows, PASS_ROWS, PASS_MS)) / 1e3
        drawn_CR = self._state.drawn_CR.numpy()
        for row, chunk in enumerate(drawing):
            tokens = self.script.tokens(chunk)
            drawn_CR[: len(tokens), row] = tokens
        ScriptedRunner.passes += most
        ScriptedRunner.free_at = done = max(self.clock(), self.free_at) + seconds
        read = self._reader(rows, None)
        return lambda: read() if self.turn() >= done else None


class ScriptedGpuRunner(GpuRunner):
    """Runs every pass on the GPU, then replaces what random weights sampled by the script."""

    script: Script

    def launch(self, chunks: Sequence[Chunk]) -> ReadDraws:
        drawing = [chunk for chunk in in_order(chunks) if chunk.count]
        self._said = [(self.script.tokens(chunk), chunk) for chunk in drawing]
        return super().launch(chunks)

    def _load(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        ordered = super()._load(chunks)
        self._state.stop_RE.fill_(-1)  # a stop token that the script does not have would leave a gap in the cache
        return ordered

    @torch.inference_mode()
    def _reader(self, rows: int, width: Width) -> ReadDraws:
        drawn_CR = np.full((self._burst, rows), -1)
        for row, (tokens, _) in enumerate(self._said):
            drawn_CR[: len(tokens), row] = tokens
        last_R = [tokens[-1] if tokens else 0 for tokens, _ in self._said]
        ended_R = [not tokens or tokens[-1] in chunk.request.sampling.stop_ids for tokens, chunk in self._said]
        if rows:
            put(self._state.drawn_CR[:, :rows], drawn_CR)
            put(self._state.token_R[:rows], np.array(last_R))
            put(self._state.ended_R[:rows], np.array(ended_R))
        return super()._reader(rows, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """Rows, and how to play them."""

    rows: list[TaskRow]
    collector: Callable[[LocalEngine], Collector]
    said: dict[str, list[list[int]]]  # by row and attempt


def make_tokenizer(texts: Sequence[str], template: str | None) -> Any:
    """Trained on the recipe's own texts, with about as many tokens per word as a real one."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4_096,
        special_tokens=[AddedToken(token, special=True) for token in control],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bare.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )


def recipe_play(name: str, data: Path, *, rows: int | None) -> Play:
    recipe, demos, folder, extra = RECIPES[name]
    config = load_config(recipe, [f"data.path={data / folder}"])
    count, size = rows or config.rollout.rows_per_step, config.rollout.group_size
    shown = demos(count, 0, path=str(data / folder))
    assert config.model.chat_template is not None
    template = recipe_path(config.model.chat_template, recipe=config.recipe).read_text("utf-8")
    prompts = [str(message["content"]) for row, _ in shown for message in row.prompt]
    renderer = Renderer(make_tokenizer([*prompts, *(text for _, texts in shown for text in texts)], template))
    task, said = build_task(config), {}
    for row, texts in shown:
        for attempt in range(size):
            draw = random.Random(f"{row.row_id}:{attempt}")
            mixed = [
                each for text in texts for each in ([draw.choice(extra)] if draw.random() < EXTRA else []) + [text]
            ]
            said[f"{row.row_id}#{attempt}"] = [renderer.encode_response(text) for text in mixed]
    return Play(
        rows=[row for row, _ in shown],
        collector=lambda engine: train_collector(config, task, renderer, engine),
        said=said,
    )


class Corridor(TextEnv):
    """Answers a short action with a short text, a given number of times."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def begin(self, row: TaskRow) -> str:
        return str(row.prompt[0]["content"])

    def reply(self, said: str) -> Reply:
        self._left -= 1
        text = f"You do that: {said}. You see a shelf {self._left}, a drawer {self._left + 3}, and on it nothing."
        return Reply(text=text, done=not self._left, info={"won": not self._left})


def synthetic_play(steps: int, *, rows: int, size: int) -> Play:
    """Episodes of the same number of steps, eight tokens each or so."""
    asked = [
        TaskRow(
            prompt=[
                {
                    "role": "user",
                    "content": f"You are in room {n}. Looking around, you see a cabinet {n}, a drawer."
                    f" Your task is to: put a clean mug {n} on the shelf.",
                }
            ],
            row_id=f"room-{n}",
        )
        for n in range(rows)
    ]
    config = load_config("alfworld/explorer")
    assert config.model.chat_template is not None
    template = recipe_path(config.model.chat_template, recipe=config.recipe).read_text("utf-8")
    renderer = Renderer(make_tokenizer([str(row.prompt[0]["content"]) for row in asked], template))
    said = {
        f"{row.row_id}#{attempt}": [
            renderer.encode_response(f"go to drawer {(7 * n + attempt) % 10}") for n in range(steps)
        ]
        for row in asked
        for attempt in range(size)
    }

    def collector(engine: LocalEngine) -> Collector:
        return Collector(
            make_flow=lambda row: AgentEnvLoop(lambda row: Corridor(steps)),
            sampler=engine,
            renderer=renderer,
            sampling=Sampling(max_tokens=24, stop_ids=renderer.stop_ids),
            limits=Limits(max_steps=steps, max_response_tokens=24, max_context_tokens=8_000, episode_seconds=1e6),
            group_size=size,
        )

    return Play(rows=asked, collector=collector, said=said)


def counts_of(groups: Sequence[Group]) -> dict[str, float]:
    played = [trajectory for group in groups for trajectory in group.trajectories]
    failed = [trajectory.error for trajectory in played if trajectory.error]
    assert not failed, failed[0]
    calls = sum(len(trajectory.steps) for trajectory in played)
    return {
        "episodes": len(played),
        "calls": calls,
        "longest": max(len(trajectory.steps) for trajectory in played),
        "tokens per call": sum(trajectory.num_response_tokens for trajectory in played) / calls,
    }


@dataclass(kw_only=True)
class Bench:
    play: Play
    profile: int = 0  # lines to print
    figures: list[dict[str, float]] = field(default_factory=list)

    def __call__(self, seed: int) -> dict[str, float]:
        loop = SimulatedLoop()
        ScriptedRunner.script = Script(self.play.said)
        ScriptedRunner.clock, ScriptedRunner.turn = staticmethod(loop.exact_time), staticmethod(loop.time)
        ScriptedRunner.free_at = ScriptedRunner.passes = 0
        vars(local_engine)["GpuRunner"] = ScriptedRunner
        engine = LocalEngine(
            SHAPE.model().network(dtype=torch.float32, device=torch.device("cpu")),
            seed=0,
            max_running=GPU_RUNNING,
            max_batch_tokens=16_384,
            max_cached_tokens=1_048_576,
            burst=GPU_BURST,
            kernels=torch_kernels,
        )
        collect = self.play.collector(engine)
        freeze_parts()  # as a run does
        profiler = cProfile.Profile()
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            began, cpu = loop.exact_time(), time.process_time()
            if self.profile:
                profiler.enable()
            groups = list[Group]()

            async def play() -> None:  # returns nothing: a runner prints what its task returns, to be thrown away
                groups.extend(await collect(self.play.rows, seed=seed))

            runner.run(play())
            profiler.disable()
            cpu, seconds = time.process_time() - cpu, loop.exact_time() - began
            steps = engine.stats.steps
            runner.run(engine.close())
        if self.profile:
            pstats.Stats(profiler).sort_stats("tottime").print_stats(self.profile)
        figures = counts_of(groups)
        return {
            **figures,
            "cpu ms per call": 1e3 * cpu / figures["calls"],
            "simulated seconds": seconds,
            "episodes per simulated second": figures["episodes"] / seconds,
            "steps of the engine": steps,
            "passes": ScriptedRunner.passes,
        }


@dataclass(kw_only=True)
class GpuBench:
    """Plays on a GPU, in real time."""

    engine: LocalEngine
    runner: asyncio.Runner

    @classmethod
    def make(cls) -> GpuBench:
        vars(local_engine)["GpuRunner"] = ScriptedGpuRunner
        engine = LocalEngine(
            SMOLLM2_135M.model().network(dtype=torch.bfloat16, device=torch.device("cuda")),
            seed=0,
            max_running=GPU_RUNNING,
            max_batch_tokens=16_384,
            max_cached_tokens=1_048_576,
            burst=GPU_BURST,
        )
        return cls(engine=engine, runner=asyncio.Runner())

    def __call__(self, play: Play, seed: int) -> dict[str, float]:
        ScriptedGpuRunner.script = Script(play.said)
        collect = play.collector(self.engine)
        freeze_parts()  # as a run does
        groups = list[Group]()

        async def run() -> None:  # returns nothing: a runner prints what its task returns, to be thrown away
            groups.extend(await collect(play.rows, seed=seed))

        steps = self.engine.stats.steps
        torch.cuda.synchronize()
        began, cpu = time.perf_counter(), time.process_time()
        self.runner.run(run())
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - began
        figures = counts_of(groups)
        return {
            **figures,
            "cpu ms per call": 1e3 * cpu / figures["calls"],
            "seconds": seconds,
            "episodes per second": figures["episodes"] / seconds,
            "steps of the engine": self.engine.stats.steps - steps,
        }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time")
    parser.add_argument("--data", type=Path, help="folder with the released files of the recipes")
    parser.add_argument("--only", help="recipes to measure, separated by commas")
    parser.add_argument("--histories", help="steps of synthetic episodes, separated by commas")
    parser.add_argument("--rows", type=int, help="rows instead of the recipe's rows_per_step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", type=int, default=0, help="print this many lines of a profile")
    parser.add_argument("--json", action="store_true", help="print every repeat as a line of JSON")
    parser.add_argument("--gpu", action="store_true", help="run the passes of a model of 135M parameters, in real time")
    given = parser.parse_args()
    torch.set_num_threads(1)
    plays: dict[str, Play] = {}
    for steps in map(int, given.histories.split(",") if given.histories else ()):
        plays[f"{steps} steps"] = synthetic_play(steps, rows=given.rows or 16, size=16)
    if given.data is not None:
        for name in given.only.split(",") if given.only else RECIPES:
            plays[name] = recipe_play(name, given.data, rows=given.rows)
    gpu = GpuBench.make() if given.gpu else None
    for name, play in plays.items():
        bench: Callable[[int], dict[str, float]] = (
            Bench(play=play, profile=given.profile) if gpu is None else partial(gpu, play)
        )
        repeats = [bench(seed) for seed in range(given.repeats)]
        if given.json:
            for repeat in repeats:
                print(json.dumps({"name": name, **repeat}))
        else:
            print(name, {key: round(median(repeat[key] for repeat in repeats), 4) for key in repeats[0]})


if __name__ == "__main__":
    main()

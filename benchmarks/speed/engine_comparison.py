"""The engine's published tables: what `agent-r1 bench engine` measures, and beside it

decode     transformers' `model.generate`
append     the cost of step t of a growing episode: only its new tokens should be computed
soak       thousands of short episodes with tool errors and cancelled requests: nothing may grow or get lost
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch

from agent_r1.bench.engine_speed import Decoding, EngineBench
from agent_r1.bench.measure import measure
from agent_r1.bench.results import Figures, Row
from benchmarks.speed.append import Append
from benchmarks.speed.soak import Soak

FULL_APPEND = Append(episodes=32, steps=20, prompt_tokens=256, response_tokens=64, observation_tokens=32)
QUICK_APPEND = Append(episodes=2, steps=6, prompt_tokens=32, response_tokens=4, observation_tokens=8)
FULL_SOAK = Soak(rounds=8, episodes=512, impatient=64, at_once=256)
QUICK_SOAK = Soak(rounds=4, episodes=50, impatient=6, at_once=50, response_tokens=2)


@dataclass(kw_only=True)
class EngineComparison(EngineBench):
    append_sizes: Append
    soak_sizes: Soak
    _rival: Any = field(default=None, init=False)

    @property
    def groups(self) -> dict[str, Callable[[], Iterator[Row]]]:
        groups = super().groups
        last = {"actions": groups.pop("actions")}  # it replaces the engine
        return groups | {"append": self.append, "soak": self.soak} | last

    def decoders(self, decoding: Decoding) -> dict[str, Callable[[], float]]:
        if self._rival is None:
            self._rival = self.model.network(dtype=self.dtype, device=self.device).eval()
            self._rival.set_attn_implementation("sdpa")
        generate_tokens_per_second(self._rival, replace(decoding, new_tokens=4))  # warm up, as the engine is
        return super().decoders(decoding) | {"generate": partial(generate_tokens_per_second, self._rival, decoding)}

    def decode_figures(self, speed: Figures) -> Figures:
        return super().decode_figures(speed) | {
            "generate_tokens_per_second": speed["generate"],
            "speed_ratio": speed["engine"] / speed["generate"],
        }

    def append(self) -> Iterator[Row]:
        """A row per step, and one that compares the last steps with the first that have a cache."""
        engine, append = self.engine(), self.append_sizes
        append.play(engine, self.model.vocabulary)
        runs = [append.play(engine, self.model.vocabulary) for _ in range(self.repeats)]
        settings = {**self.model.settings, **asdict(append)}
        for index in range(append.steps):
            yield Row(
                name=f"append/step {index + 1}",
                settings=settings,
                headline="seconds",
                repeats=[run[index] for run in runs],
            )
        few = max(1, append.steps // 4)
        yield Row(
            name=f"append/last {few} steps over the {few} after the first",
            settings=settings,
            headline="seconds_ratio",
            repeats=[{"seconds_ratio": _mean_seconds(run[-few:]) / _mean_seconds(run[1 : 1 + few])} for run in runs],
        )

    def soak(self) -> Iterator[Row]:
        engine, began = self.engine(), time.perf_counter()
        figures = self.soak_sizes.run(engine, self.model.vocabulary, self.device)
        seconds = time.perf_counter() - began
        yield Row(
            name="soak/all rounds",
            settings={**self.model.settings, **asdict(self.soak_sizes)},
            headline="seconds",
            repeats=[],
            once={"seconds": seconds, **figures},
        )


def generate_tokens_per_second(model: Any, decoding: Decoding) -> float:
    """With transformers' `model.generate`, less the time for the prompts and one token."""
    ids_BP = torch.tensor(decoding.prompts(), device=model.device)
    ask: dict[str, Any] = {"attention_mask": torch.ones_like(ids_BP), "do_sample": True, "temperature": 1.0}
    ask |= {"top_k": 0, "top_p": 1.0, "use_cache": True, "pad_token_id": 0}

    def seconds(new_tokens: int) -> float:
        return measure(lambda: model.generate(ids_BP, max_new_tokens=new_tokens, **ask), model.device).seconds

    return decoding.sequences * decoding.new_tokens / (seconds(1 + decoding.new_tokens) - seconds(1))


def _mean_seconds(steps: list[Figures]) -> float:
    return fmean(step["seconds"] for step in steps)

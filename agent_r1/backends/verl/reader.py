"""Tokenizer and chat template of a model without its weights, which only verl's workers load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, GenerationConfig

from agent_r1.build.models.load import load_tokenizer, make_renderer, without_hub
from agent_r1.build.models.source import as_directory
from agent_r1.config import RunConfig
from agent_r1.errors import ConfigError
from agent_r1.tokens.rendering import Renderer
from agent_r1.tokens.template_check import TemplateReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    directory: str
    tokenizer: Any
    renderer: Renderer
    template: TemplateReport


def load_reader(config: RunConfig, model: str) -> Reader:
    directory = as_directory(model)
    tokenizer = load_tokenizer(config, directory)
    network = AutoConfig.from_pretrained(directory, local_files_only=without_hub(directory))
    renderer, report = make_renderer(config, directory, tokenizer, network, _generation(directory, network))
    if renderer.pictures is not None:
        raise ConfigError(
            f"backend=verl trains on text only, and {model} takes pictures: leave it out, or choose another model.path"
        )
    return Reader(directory=directory, tokenizer=tokenizer, renderer=renderer, template=report)


def _generation(directory: str, network: Any) -> Any:
    """Read the generation config as transformers does: from its file, or else from the model's config."""
    try:
        return GenerationConfig.from_pretrained(directory, local_files_only=without_hub(directory))
    except OSError:
        return GenerationConfig.from_model_config(network)

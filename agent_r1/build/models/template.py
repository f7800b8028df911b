"""Find out how the chat template of a run writes tool calls, before the model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from agent_r1.build.models.source import is_source
from agent_r1.build.recipe import recipe_path
from agent_r1.config import RunConfig
from agent_r1.tokens.formats.infer import TOOL, TemplateFormat, infer_format, template_format
from agent_r1.tokens.rendering import REFUSALS, Renderer
from agent_r1.types import Message


def known_template(config: RunConfig, directory: str | None) -> TemplateFormat | None:
    """Return how the run's chat template writes calls; None if that needs a model that is not here yet."""
    override = config.model.chat_template
    text = None if override is None else recipe_path(override, recipe=config.recipe).read_text("utf-8")
    if directory is None or is_source(directory) or not Path(directory).is_dir():
        return None if text is None else _infer_from_text(text, config.model.template_kwargs)
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except Exception:  # noqa: BLE001 (a damaged model is reported when it is loaded)
        return None
    if text is None and tokenizer.chat_template is None:
        return None
    return template_format(Renderer(tokenizer, chat_template=text, template_kwargs=config.model.template_kwargs))


def _infer_from_text(template: str, settings: dict[str, Any]) -> TemplateFormat:
    def show(messages: list[Message], with_tools: bool) -> str:
        try:
            texts, _ = render_jinja_template(
                conversations=[messages],
                tools=[TOOL] if with_tools else None,
                chat_template=template,
                add_generation_prompt=True,
                **{"bos_token": "", "eos_token": "", **settings},
            )
        except REFUSALS:
            return ""
        return str(texts[0])

    return infer_format(show)

"""Find out how the chat template of a run writes tool calls, before the model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agent_r1.build.models.source import is_source
from agent_r1.build.recipe import recipe_path
from agent_r1.config import RunConfig
from agent_r1.tokens.formats.infer import TemplateFormat, template_format
from agent_r1.tokens.rendering import Renderer


def known_template(config: RunConfig, directory: str | None) -> TemplateFormat | None:
    """Return how the run's chat template writes calls; None if that needs a model that is not here yet."""
    override = config.model.chat_template
    text = None if override is None else recipe_path(override, recipe=config.recipe).read_text("utf-8")
    tokenizer = _byte_tokenizer()
    if directory is not None and not is_source(directory) and Path(directory).is_dir():
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory)
        except Exception:  # noqa: BLE001 (a damaged model is reported when it is loaded)
            return None
    if text is None and tokenizer.chat_template is None:
        return None
    return template_format(Renderer(tokenizer, chat_template=text, template_kwargs=config.model.template_kwargs))


def _byte_tokenizer() -> Any:
    """Stands in for the model's own: how a template writes calls does not depend on the vocabulary."""
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")

"""Small byte-level BPE tokenizers, trained here, with the control tokens and chat templates of known model families."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Message

TEMPLATES = Path(__file__).parent / "templates"

# Splits as the big vocabularies do: newlines may merge with each other and with the punctuation before them.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS = ["user\n\nassistant\n\n\nsystem tool hello world   the answer is 42.\n\n{}<|im_end|> <tool_call>\n"] * 20 + [
    "é ü 你好 Привет 🙂 <|eot_id|>\n</tool_response>\n\n  ok!\n\tfunction name arguments <|start|> <|message|> ><"
] * 10

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What sets one model family apart, as far as rendering is concerned."""

    name: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()  # added tokens that are not special
    eos: str
    bos: str | None = None
    tool_role: bool = True  # a tool may answer a plain reply
    nfc: bool = False
    in_vocabulary: bool = False  # the special tokens are the first entries of the model's own vocabulary

    @property
    def template(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text(encoding="utf-8")


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_ADDED = ("<tool_call>", "</tool_call>", "<|fim_prefix|>")
FAMILIES = {
    family.name: family
    for family in (
        Family(name="qwen2_5", special=CHATML, added=QWEN_ADDED, eos="<|im_end|>", nfc=True),
        Family(
            name="qwen3",
            special=CHATML,
            added=(*QWEN_ADDED, "<tool_response>", "</tool_response>", "<think>", "</think>"),
            eos="<|im_end|>",
            nfc=True,
        ),
        Family(name="smollm2", special=(*CHATML, "<filename>"), eos="<|im_end|>", in_vocabulary=True),
        Family(
            name="llama3",
            special=(
                "<|begin_of_text|>",
                "<|end_of_text|>",
                "<|start_header_id|>",
                "<|end_header_id|>",
                "<|eom_id|>",
                "<|eot_id|>",
                "<|python_tag|>",
            ),
            eos="<|eot_id|>",
            bos="<|begin_of_text|>",
        ),
        Family(
            name="harmony",
            special=(
                "<|startoftext|>",
                "<|endoftext|>",
                "<|return|>",
                "<|constrain|>",
                "<|channel|>",
                "<|start|>",
                "<|end|>",
                "<|message|>",
                "<|call|>",
            ),
            eos="<|return|>",
            tool_role=False,
        ),
    )
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    family = FAMILIES[name]
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC() if family.nfc else None
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(family.special) if family.in_vocabulary else [],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in family.special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in family.added])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=family.eos, bos_token=family.bos, chat_template=family.template
    )


@cache
def renderer_of(name: str) -> Renderer:
    return Renderer(tokenizer_of(name))


def template_text(tokenizer: Any, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
    """What the tokenizer's own machinery makes of the messages."""
    text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str)
    return text


def template_ids(tokenizer: Any, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> list[int]:
    ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    assert isinstance(ids, list)
    return ids

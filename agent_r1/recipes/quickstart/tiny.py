"""Create a 1M-parameter language model with its own tokenizer in seconds: no hub, no download.

The result is an ordinary Hugging Face directory: a Llama with random weights, and a byte-level BPE tokenizer trained on
the text of a task. Any text is encoded and decoded exactly, while its frequent parts (the frame of a call, a name) are
one token each: episodes stay below a hundred tokens, and copying a name means copying two.

transformers is imported when a model is created, so that a dry run is quick.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from agent_r1.data.rows import Demo
from agent_r1.recipes.quickstart import task
from agent_r1.tools.base import BaseTool

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
PAD, TURN_START, TURN_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
CALL_TAGS = ("<tool_call>", "</tool_call>")  # tokens, but not special ones: the text of a call keeps them

# Text that never merges with its neighbours. Pairs of digits and names: a number or a name has the same tokens wherever
# it occurs, and copying a number below 100 is copying one token (digit by digit, some seeds never copy the second one).
# The header of a turn: the prompt ends with it, so what follows must start a new token.
ROLES = "system|user|assistant|tool"
PIECES = Regex(f"[0-9]{{1,2}}|[A-Z][a-z]*|(?:{ROLES})\\n")
MAX_VOCABULARY = 1000  # an upper bound; training ends when nothing is left to merge
TEXT_ROWS = 2000  # demonstrations the tokenizer learns from: every name and number occurs often

MAX_POSITIONS = 1024
INITIALIZER_RANGE = 0.08  # about 1 / sqrt(hidden size); at the usual 0.02 so small a model takes far longer to copy


def make_tiny_model(
    directory: str | Path, seed: int, *, demos: Sequence[Demo] | None = None, tools: Sequence[BaseTool] | None = None
) -> None:
    """Write config, random weights (a function of `seed`) and tokenizer to `directory`.

    The tokenizer is trained on `demos` and the schemas of `tools`; by default on those of this recipe.
    """
    tokenizer = make_tokenizer(demos, tools)
    tokenizer.save_pretrained(directory)
    make_network(tokenizer, seed).save_pretrained(directory)


def make_network(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=160,
        intermediate_size=480,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # leave the caller's random state unchanged
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def make_tokenizer(
    demos: Sequence[Demo] | None = None,
    tools: Sequence[BaseTool] | None = None,
    *,
    template: Path = CHAT_TEMPLATE,
    special: Sequence[str] = (),  # further special tokens, which the template writes
    pieces: Regex = PIECES,
) -> PreTrainedTokenizerFast:
    """A tokenizer for the text of a task; the same arguments give the same tokenizer."""
    demos = task.demos(TEXT_ROWS, seed=0) if demos is None else demos
    tools = [task.lookup, task.calculate] if tools is None else tools
    bare = Tokenizer(models.BPE())
    special = (PAD, TURN_START, TURN_END, *special)
    text = list(_task_text(_with_template(bare, template, special), demos, tools))
    bare.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bare.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all bytes, so every text can be encoded
        show_progress=False,
    )
    bare.train_from_iterator(text, trainer)
    bare.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in CALL_TAGS])
    return _with_template(bare, template, special)


def whole(*texts: str) -> Regex:
    """Pieces for other tasks: these texts, words, names and pairs of digits never merge with their neighbours."""
    return Regex(f"{'|'.join(map(re.escape, texts))}|(?:{ROLES})\\n|[0-9]{{1,2}}|[A-Z][a-z]+| ?[a-z_]+")


def _with_template(tokenizer: Tokenizer, template: Path, special: Sequence[str]) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        model_max_length=MAX_POSITIONS,
        additional_special_tokens=[token for token in special if token not in (PAD, TURN_END)],
        clean_up_tokenization_spaces=False,
        chat_template=template.read_text(encoding="utf-8"),
    )


def _task_text(template: PreTrainedTokenizerFast, demos: Sequence[Demo], tools: Sequence[BaseTool]) -> Iterator[str]:
    """Episodes as the chat template writes them, split at the added tokens, as encoding will split them."""
    schemas = [each.schema for each in tools]
    cuts = re.compile("|".join(map(re.escape, (*template.all_special_tokens, *CALL_TAGS))))
    for index, (row, texts) in enumerate(demos):
        said = [{"role": "assistant", "content": text} for text in texts]
        messages = [*row.prompt, *said, {"role": "tool", "content": str(10 + index % 90)}]
        rendered = template.apply_chat_template(messages, tools=schemas, tokenize=False)
        yield from filter(None, cuts.split(rendered))

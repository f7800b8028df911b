"""Create a vision-language model of 1.6M parameters with its own tokenizer in seconds: no hub, no download.

The result is an ordinary Hugging Face directory: a Qwen3-VL with random weights, a byte-level BPE tokenizer trained on
the text of the task, and the preprocessor config that says how pictures become patches. A board takes 9 tokens, a card
4; a cell or a number is one token wherever it occurs.

transformers is imported when a model is created, so that a dry run is quick.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from agent_r1.data.rows import Demo
from agent_r1.recipes.quickstart.tiny import CALL_TAGS, PAD, TURN_END, TURN_START
from agent_r1.recipes.vision_quickstart import task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3VLForConditionalGeneration

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
VISION_START, VISION_END, PICTURE = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
SPECIAL = (PAD, TURN_START, TURN_END, VISION_START, VISION_END, PICTURE)

# Text that never merges with its neighbours: cells, numbers, and the header of a turn, with which a prompt ends.
PIECES = Regex("[a-c][1-3]|[0-9]{1,2}|(?:system|user|assistant|tool)\\n")
MAX_VOCABULARY = 1000  # an upper bound; training ends when nothing is left to merge
TEXT_ROWS = 500  # examples the tokenizer learns from: every cell and number occurs often

MAX_POSITIONS = 1024
WIDTH, LAYERS, HEADS = 160, 3, 4
VISION_WIDTH, VISION_LAYERS, VISION_HEADS = 96, 2, 4
INITIALIZER_RANGE = 0.08  # about 1 / sqrt(hidden size); at the usual 0.02 so small a model takes far longer to copy
PATCH, MERGE, FRAMES = 8, 2, 1  # pixels on a side of a patch, patches on a side of a token, copies of a picture
PATCHES_PER_SIDE = 6  # of the largest picture, the board: the tower has a learned embedding for each place
PREPROCESSOR = {
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": FRAMES,
    "min_pixels": 32 * 32,
    "max_pixels": 1024 * 1024,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def make_tiny_model(directory: str | Path, seed: int) -> None:
    """Write config, random weights (a function of `seed`), tokenizer and preprocessor config to `directory`."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    make_network(tokenizer, seed).save_pretrained(directory)
    write_preprocessor(directory)


def write_preprocessor(directory: str | Path) -> None:
    text = json.dumps(PREPROCESSOR, indent=2) + "\n"
    Path(directory, "preprocessor_config.json").write_text(text, encoding="utf-8")


def make_network(
    tokenizer: PreTrainedTokenizerFast, seed: int, patches_per_side: int = PATCHES_PER_SIDE
) -> Qwen3VLForConditionalGeneration:
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    head = WIDTH // HEADS
    along = head // 2 * 3 // 8  # pairs of head dimensions that the row rotates; as many are rotated by the column
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [head // 2 - 2 * along, along, along],
        "mrope_interleaved": True,
    }
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 3 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": head,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": rope,
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": True,
        **ends,
    }
    vision = {
        "depth": VISION_LAYERS,
        "hidden_size": VISION_WIDTH,
        "intermediate_size": 3 * VISION_WIDTH,
        "num_heads": VISION_HEADS,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES,
        "num_position_embeddings": patches_per_side**2,
        "out_hidden_size": WIDTH,
        "deepstack_visual_indexes": [0],
        "initializer_range": INITIALIZER_RANGE,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids(PICTURE),
        vision_start_token_id=tokenizer.convert_tokens_to_ids(VISION_START),
        vision_end_token_id=tokenizer.convert_tokens_to_ids(VISION_END),
        video_token_id=tokenizer.pad_token_id,  # there are no videos
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):  # leave the caller's random state unchanged
        torch.manual_seed(seed)
        network = Qwen3VLForConditionalGeneration(config)
    network.generation_config.update(**ends)
    return network


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for the text of the task, always the same one."""
    bare = Tokenizer(models.BPE())
    text = list(_task_text(_with_template(bare), task.demos(TEXT_ROWS, seed=0)))
    bare.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bare.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all bytes, so every text can be encoded
        show_progress=False,
    )
    bare.train_from_iterator(text, trainer)
    bare.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in CALL_TAGS])
    return _with_template(bare)


def _with_template(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        model_max_length=MAX_POSITIONS,
        additional_special_tokens=[token for token in SPECIAL if token not in (PAD, TURN_END)],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE.read_text(encoding="utf-8"),
    )


def _task_text(template: PreTrainedTokenizerFast, demos: Sequence[Demo]) -> Iterator[str]:
    """Episodes as the chat template writes them, split at the added tokens, as encoding will split them."""
    cuts = re.compile("|".join(map(re.escape, (*SPECIAL, *CALL_TAGS))))
    card = {"role": "tool", "content": [{"type": "image"}]}
    for row, texts in demos:
        said = [{"role": "assistant", "content": text} for text in texts]
        rendered = template.apply_chat_template([*row.prompt, *said, card], tools=[task.peek.schema], tokenize=False)
        yield from filter(None, cuts.split(str(rendered)))

"""Vision-language models with random weights, small enough for a unit test, and what their own forward pass takes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from agent_r1.vision.picture_format import IDEFICS, PictureFormat, read_format
from agent_r1.vision.pictures import Picture
from tests.chatml import tokenizer as plain_tokenizer
from tests.vision.seeing_envs import picture as picture

KINDS = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3")
WIDTH, HEADS = 32, 4
VISION = {"qwen": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>"), "idefics": ("<image>",)}

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}PLACE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(kind: str) -> Any:
    tokenizer = deepcopy(plain_tokenizer())
    tokens = VISION["idefics" if kind in IDEFICS else "qwen"]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *tokens]})
    place = "<image>" if kind in IDEFICS else "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer.chat_template = TEMPLATE.replace("PLACE", place)
    return tokenizer


def make_model(kind: str, tokenizer: Any, seed: int = 0) -> tuple[Any, PictureFormat]:
    torch.manual_seed(seed)
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 3,
        "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "initializer_range": 0.2, "pad_token_id": 0, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    model = _idefics(kind, tokenizer, text) if kind in IDEFICS else _qwen(kind, tokenizer, text)
    return model.eval(), read_format(model.config, None, tokenizer.get_vocab(), max_pixels=None)


def _idefics(kind: str, tokenizer: Any, text: dict[str, Any]) -> Any:
    import transformers

    name = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[kind]
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 32, "patch_size": 8, "initializer_range": 0.2}  # fmt: skip
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision,
        text_config=LlamaConfig(**text),
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def _qwen(kind: str, tokenizer: Any, text: dict[str, Any]) -> Any:
    import transformers

    name = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[kind]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    vision: dict[str, Any] = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4,
                              "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": WIDTH,
                              "initializer_range": 0.2}  # fmt: skip
    if kind == "qwen3_vl":
        vision |= {"num_position_embeddings": 36, "deepstack_visual_indexes": [0]}
        rope["mrope_interleaved"], text["head_dim"] = True, WIDTH // HEADS
    else:
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    marks = {"image": "<|image_pad|>", "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    ids = {f"{key}_token_id": tokenizer.convert_tokens_to_ids(token) for key, token in marks.items()}
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision,
        text_config=text | {"rope_parameters": rope},
        tie_word_embeddings=True,
        video_token_id=0,
        **ids,
    )
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def own_logits(model: Any, form: PictureFormat, ids: list[int], pictures: list[Picture]) -> Tensor:
    """The logits of the whole model as transformers computes them, [L, V]. `pictures` in the order of the ids.

    transformers takes every placeholder for a picture, sampled ones too, so an id that does not occur stands for them.
    """
    shown = torch.tensor([[token < 0 for token in ids]])
    unused = next(token for token in range(len(ids) + 1) if token not in ids)
    model.config.image_token_id = unused
    if hasattr(model.model, "image_token_id"):
        model.model.image_token_id = unused
    given: dict[str, Any] = {
        "input_ids": torch.tensor([ids]).masked_fill(shown, unused),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
    }
    values = [torch.from_numpy(form.values(each)) for each in pictures]
    if pictures and form.kind in IDEFICS:
        given["pixel_values"] = torch.stack(values)[None]
    elif pictures:
        merge = model.config.vision_config.spatial_merge_size
        grid = [[1, rows * merge, columns * merge] for rows, columns in map(form.shape, pictures)]
        given |= {"pixel_values": torch.cat(values), "image_grid_thw": torch.tensor(grid)}
        given["mm_token_type_ids"] = shown.int()
    with torch.no_grad():
        logits: Tensor = model(**given, use_cache=False).logits[0]
    return logits

"""What a tower reads, and how many tokens a picture takes, are those of transformers' own processors, bit for bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agent_r1.errors import ConfigError
from agent_r1.vision.picture_format import IDEFICS, PictureFormat, read_format
from agent_r1.vision.pictures import Picture, by_key
from tests.vision.tiny_models import KINDS, make_model, make_tokenizer, picture

SIZES = [(64, 24), (40, 96), (16, 16), (17, 31), (448, 448), (50, 300), (300, 41), (5, 7), (333, 500), (1, 100)]


def qwen_processor(**settings: Any) -> Any:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    return module.Qwen2VLImageProcessorPil(**settings)


def idefics_processor(kind: str, **settings: Any) -> Any:
    name = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[kind]
    module = pytest.importorskip(f"transformers.models.{kind}.image_processing_pil_{kind}")
    return getattr(module, f"{name}ImageProcessorPil")(do_image_splitting=False, **settings)


# As published: Qwen2.5-VL, Qwen3-VL, and limits that matter for small pictures.
QWEN_SETTINGS: list[dict[str, Any]] = [
    {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136, "max_pixels": 12_845_056,
     "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]},
    {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": {"shortest_edge": 65_536,
     "longest_edge": 16_777_216}, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 40,
     "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
]  # fmt: skip


def qwen_format(settings: dict[str, Any], tmp_path: Path, **limits: int) -> PictureFormat:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    vision = SimpleNamespace(
        patch_size=settings["patch_size"], spatial_merge_size=2, temporal_patch_size=settings["temporal_patch_size"]
    )
    return read_format(SimpleNamespace(model_type="qwen3_vl", vision_config=vision), tmp_path, [], **limits)


@pytest.mark.parametrize("settings", QWEN_SETTINGS, ids=["qwen2.5-vl", "qwen3-vl", "small limits"])
def test_qwens_patches_and_grids(settings: dict[str, Any], tmp_path: Any) -> None:
    form, processor = qwen_format(settings, tmp_path), qwen_processor(**settings)
    rng = random.Random(0)
    sizes = SIZES + [(rng.randint(8, 400), rng.randint(8, 400)) for _ in range(6)]
    for index, (height, width) in enumerate(sizes):
        shown = picture(index, height, width)
        theirs = processor(images=[shown.image()], return_tensors="np")
        grid = np.asarray(theirs["image_grid_thw"])[0].tolist()
        rows, columns = form.shape(shown)
        assert grid == [1, 2 * rows, 2 * columns], (height, width)
        np.testing.assert_allclose(form.values(shown), np.asarray(theirs["pixel_values"]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", IDEFICS)
@pytest.mark.parametrize(("longest", "side"), [(512, 512), (364, 364), (1024, 512)])
def test_idefics_squares(kind: str, longest: int, side: int, tmp_path: Any) -> None:
    settings: dict[str, Any] = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}
    processor = idefics_processor(kind, **settings)
    model, _ = make_model(kind, make_tokenizer(kind))
    stored = settings | {"image_mean": list(processor.image_mean), "image_std": list(processor.image_std)}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(stored))
    form = read_format(model.config, tmp_path, ["<image>"])
    for index, (height, width) in enumerate(SIZES[:8]):
        shown = picture(index, height, width)
        theirs = np.asarray(processor(images=[[shown.image()]], return_tensors="np")["pixel_values"])
        assert theirs.shape[:2] == (1, 1)
        np.testing.assert_allclose(form.values(shown), theirs[0, 0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in IDEFICS])
def test_qwens_positions_of_many_layouts(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    model, form = make_model(kind, tokenizer)
    rng = random.Random(1)
    start = tokenizer.convert_tokens_to_ids("<|vision_start|>")
    for trial in range(25):
        shown: list[Picture] = [picture(trial * 10 + n, rng.randint(8, 90), rng.randint(8, 90)) for n in range(3)]
        order, ids = [rng.choice(shown) for _ in range(rng.randint(0, 4))], list[int]()
        for each in order:
            ids += [*(rng.randint(0, 200) for _ in range(rng.randint(0, 9))), start, *form.ids(each), start + 1]
        ids += [rng.randint(0, 200) for _ in range(rng.randint(1, 9))]
        seen = torch.tensor([[token < 0 for token in ids]])
        given = torch.tensor([ids]).masked_fill(seen, model.config.image_token_id)
        grid = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in map(form.shape, order)]) if order else None
        theirs, _ = model.model.get_rope_index(given, seen.int(), image_grid_thw=grid)
        assert theirs[:, 0].tolist() == form.positions(np.array(ids), by_key(order)).tolist()


def test_max_pixels_scales_pictures_down_as_the_processors_do(tmp_path: Path) -> None:
    limited = qwen_format(QWEN_SETTINGS[0], tmp_path, max_pixels=28 * 28 * 16)
    processor = qwen_processor(**(QWEN_SETTINGS[0] | {"max_pixels": 28 * 28 * 16}))
    for height, width in ((448, 448), (300, 900)):
        grid = np.asarray(processor(images=[picture(0, height, width).image()], return_tensors="np")["image_grid_thw"])
        assert limited.tokens(picture(0, height, width)) == grid[0].prod() // 4 <= 16


@pytest.mark.parametrize(
    ("kind", "reason"), [("gemma3", "both directions"), ("lfm2_vl", "convolutions"), ("llava", "checked")]
)
def test_other_models_are_refused_by_name_with_the_reason(kind: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{kind}' cannot be trained with pictures: .*{reason}"):
        read_format(SimpleNamespace(model_type=kind, vision_config=SimpleNamespace()), None, [])


def test_a_model_without_a_preprocessor_config_is_refused(tmp_path: Path) -> None:
    """Defaults would be wrong in silence: Qwen2.5-VL, for one, has a mean of its own."""
    tokenizer = make_tokenizer("qwen2_5_vl")
    model, _ = make_model("qwen2_5_vl", tokenizer)
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        read_format(model.config, tmp_path, tokenizer.get_vocab())

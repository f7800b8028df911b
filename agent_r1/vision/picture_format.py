"""How a kind of model takes pictures: their size in tokens, the values its tower reads, the positions of their tokens.

Computed here with numpy and Pillow, from the numbers in the model's preprocessor config, so that neither torchvision
nor a processor class is needed and rollout and training cannot disagree. Knows no torch.

Shape suffixes: L = ids of a sequence, A = numbers of a position (1, or 3 with M-RoPE), H and W = pixels.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from agent_r1.errors import ConfigError, DataError
from agent_r1.vision.pictures import Picture, index_of, key_of, picture_ids

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

QWEN = ("qwen2_5_vl", "qwen3_vl")
IDEFICS = ("idefics3", "smolvlm")
CONFIG_FILES = ("preprocessor_config.json", "processor_config.json")
# Similar kinds that are not supported, with the reason that the error gives.
REFUSED = {
    "gemma3": "its picture tokens attend to each other in both directions",
    "paligemma": "its prompt tokens attend to each other in both directions",
    "lfm2_vl": "its decoder has convolutions",
    "qwen2_vl": "only its successors qwen2_5_vl and qwen3_vl were checked",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureFormat(ABC):
    """The pictures of one model."""

    axes: ClassVar[int]  # how many numbers a position has

    kind: str  # the model type
    placeholder: str  # what the chat template writes for a picture
    before: str = ""  # tokens around a picture that the template does not write
    after: str = ""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    stored: Mapping[str, Any] = field(default_factory=dict)  # the preprocessor config, saved with every checkpoint

    @abstractmethod
    def shape(self, picture: Picture) -> tuple[int, int]:
        """Rows and columns of the picture's tokens."""

    @abstractmethod
    def values(self, picture: Picture) -> FloatArray:
        """The tower's input for the picture."""

    @abstractmethod
    def positions(self, ids_L: IntArray, pictures: Mapping[int, Picture]) -> IntArray:
        """The positions of a sequence's tokens, [A, L]; `pictures` by their keys."""

    def tokens(self, picture: Picture) -> int:
        rows, columns = self.shape(picture)
        return rows * columns

    def ids(self, picture: Picture) -> list[int]:
        return picture_ids(picture, self.tokens(picture))

    def _normalised(self, image: Any) -> FloatArray:
        """Return [H, W, 3], normalised as in the model's training."""
        mean_C, std_C = (np.asarray(numbers, dtype=np.float32) for numbers in (self.mean, self.std))
        pixels_HWC: FloatArray = np.asarray(image, dtype=np.float32)
        normal_HWC: FloatArray = (pixels_HWC / np.float32(255) - mean_C) / std_C
        return normal_HWC

    def spans(self, ids_L: IntArray, pictures: Mapping[int, Picture]) -> list[tuple[int, Picture]]:
        """Where each picture of a sequence begins. Raises if a picture is incomplete."""
        found, place = [], 0
        negative = np.flatnonzero(ids_L < 0)
        while place < len(negative):
            start = int(negative[place])
            token = int(ids_L[start])
            picture = pictures.get(key_of(token))
            if picture is None:
                raise DataError(f"the ids show a picture that is not given: key {key_of(token):012x}")
            count = self.tokens(picture)
            if index_of(token) or ids_L[start : start + count].tolist() != self.ids(picture):
                raise DataError(f"{picture!r} is cut: the ids have only some of its {count} tokens")
            found.append((start, picture))
            place += count
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenPictures(PictureFormat):
    """Qwen2.5-VL and Qwen3-VL: any size, in patches of which `merge` x `merge` are a token; three axes of position."""

    axes = 3

    patch: int
    merge: int
    frames: int  # the tower reads a picture as a video with this many equal frames
    min_pixels: int
    max_pixels: int

    def size(self, picture: Picture) -> tuple[int, int]:
        """Height and width after resizing: multiples of a token's side, about as many pixels as before."""
        unit, height, width = self.patch * self.merge, picture.height, picture.width
        tall, wide = (round(side / unit) * unit for side in (height, width))  # 0 is below any minimum
        if tall * wide > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            tall, wide = (max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width))
        elif tall * wide < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            tall, wide = (math.ceil(side * grow / unit) * unit for side in (height, width))
        return tall, wide

    def shape(self, picture: Picture) -> tuple[int, int]:
        unit, (tall, wide) = self.patch * self.merge, self.size(picture)
        return tall // unit, wide // unit

    def values(self, picture: Picture) -> FloatArray:
        """[patches, channels * frames * patch * patch], the patches of a token one after the other."""
        from PIL import Image

        (tall, wide), patch, merge = self.size(picture), self.patch, self.merge
        image = picture.image()
        if (tall, wide) != (picture.height, picture.width):
            image = image.resize((wide, tall), Image.Resampling.BICUBIC)
        rows, columns = tall // (patch * merge), wide // (patch * merge)
        blocks = self._normalised(image).reshape(rows, merge, patch, columns, merge, patch, 3)
        ordered = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, 1, patch * patch)
        return np.ascontiguousarray(ordered.repeat(self.frames, axis=2).reshape(len(ordered), -1))

    def positions(self, ids_L: IntArray, pictures: Mapping[int, Picture]) -> IntArray:
        """A picture's tokens share a time and stand at (row, column); what follows goes on after its longer side."""
        steps_L = np.ones(len(ids_L), np.int64)  # how far the position advances from each token to the next
        spans = [(start, *self.shape(picture)) for start, picture in self.spans(ids_L, pictures)]
        for start, rows, columns in spans:
            steps_L[start : start + rows * columns] = 0
            steps_L[start + rows * columns - 1] = max(rows, columns)
        along_L = np.concatenate([[0], steps_L.cumsum()[:-1]]) if len(ids_L) else steps_L
        positions_AL = np.tile(along_L, (3, 1))
        for start, rows, columns in spans:
            index = np.arange(rows * columns)
            positions_AL[1, start : start + len(index)] += index // columns
            positions_AL[2, start : start + len(index)] += index % columns
        return positions_AL


@dataclass(frozen=True, slots=True, kw_only=True)
class IdeficsPictures(PictureFormat):
    """Idefics3 and SmolVLM: every picture is one square. Pictures are not split into tiles, which would be 17 whatever
    the size of a picture."""

    axes = 1

    longest: int  # the longer side, after the first of two resizings
    side: int  # side of the square
    patch: int
    scale: int  # patches on a side that become one token

    def shape(self, picture: Picture) -> tuple[int, int]:
        side = self.side // self.patch // self.scale
        return side, side

    def values(self, picture: Picture) -> FloatArray:
        """[3, side, side]"""
        from PIL import Image

        image, (wide, tall) = picture.image(), (picture.width, picture.height)
        if wide >= tall:
            size = self.longest, _even(int(self.longest / (wide / tall)))
        else:
            size = _even(int(self.longest * (wide / tall))), self.longest
        for each in (size, (self.side, self.side)):
            image = image.resize(each, Image.Resampling.LANCZOS) if image.size != each else image
        return np.ascontiguousarray(self._normalised(image).transpose(2, 0, 1))

    def positions(self, ids_L: IntArray, pictures: Mapping[int, Picture]) -> IntArray:
        self.spans(ids_L, pictures)  # checks them
        return np.arange(len(ids_L))[None]


def _even(side: int) -> int:
    return max(side + side % 2, 2)


def sees(config: Any) -> bool:
    """Whether a model config describes a model that takes pictures."""
    return getattr(config, "vision_config", None) is not None


def read_format(
    config: Any, directory: Path | None, vocabulary: Sequence[str] | Mapping[str, int], *, max_pixels: int | None = None
) -> PictureFormat:
    """The format of a model, from its config and the preprocessor config beside it.

    max_pixels: scale larger pictures down; None: the model's own limit.
    """
    kind, vision = config.model_type, config.vision_config
    if kind not in QWEN + IDEFICS:
        reason = REFUSED.get(kind, f"only {', '.join(QWEN + IDEFICS)} were checked")
        raise ConfigError(f"models of type {kind!r} cannot be trained with pictures: {reason}")
    stored = _stored(directory)
    colours: dict[str, Any] = {
        "mean": tuple(stored.get("image_mean", (0.5,) * 3)),
        "std": tuple(stored.get("image_std", (0.5,) * 3)),
    }
    if kind in QWEN:
        size = stored.get("size") or {}
        lowest = stored.get("min_pixels") or size.get("shortest_edge") or 56 * 56
        highest = stored.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
        return QwenPictures(
            kind=kind,
            placeholder="<|image_pad|>",
            patch=vision.patch_size,
            merge=vision.spatial_merge_size,
            frames=vision.temporal_patch_size,
            min_pixels=min(lowest, max_pixels or lowest),
            max_pixels=min(highest, max_pixels or highest),
            stored=stored,
            **colours,
        )
    if max_pixels is not None:
        raise ConfigError(f"model.max_pixels has no effect on a model of type {kind!r}: its pictures have one size")
    known = set(vocabulary)
    edges = {name: (stored.get(name) or {}).get("longest_edge") for name in ("size", "max_image_size")}
    side = edges["max_image_size"] or vision.image_size
    return IdeficsPictures(
        kind=kind,
        placeholder="<image>",
        before="".join(token for token in ("<fake_token_around_image>", "<global-img>") if token in known),
        after="".join(token for token in ("<fake_token_around_image>",) if token in known),
        longest=edges["size"] or side,
        side=side,
        patch=vision.patch_size,
        scale=config.scale_factor,
        stored=stored,
        **colours,
    )


def _stored(directory: Path | None) -> dict[str, Any]:
    """The preprocessor config in a directory; without a directory, empty: the defaults of the model's config."""
    if directory is None:
        return {}
    for name in CONFIG_FILES:
        if (directory / name).is_file():
            read = json.loads((directory / name).read_text(encoding="utf-8"))
            return dict(read.get("image_processor", read))
    raise ConfigError(
        f"{directory} has no {CONFIG_FILES[0]}, which says how the model's pictures are scaled and normalised: copy it "
        "from the original model"
    )

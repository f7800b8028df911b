"""Decode pictures with Pillow. The bytes may be hostile: sizes are limited, and every failure is a DataError."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agent_r1.errors import DataError

MAX_BYTES = 32 * 2**20  # bytes of an encoded picture
MAX_PIXELS = 50_000_000  # pixels of a decoded picture: a small file can describe a huge one
MAX_SIDE = 16_384
MAX_ASPECT = 200  # longer side over shorter one; models resize thinner pictures to nothing
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # of encoded files; the first picture of an animation is shown
ROTATED = ("JPEG", "WEBP")  # camera formats, which store how the camera was held
TURNED = (5, 6, 7, 8)  # the orientations that swap the sides


def from_base64(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise DataError(f"{what} is not valid base64: {error}") from error


def open_picture(data: bytes, what: str) -> Any:
    from PIL import Image

    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:
        start = f"; its first bytes are {data[:8]!r}" if data else "; it is empty"
        raise DataError(f"{what} is not a readable picture ({', '.join(FORMATS)}){start}") from error


def decode(data: bytes, what: str) -> Any:
    with explained(what):
        return on_white(upright(open_picture(data, what)))


@contextmanager
def explained(what: str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # damaged files make Pillow raise nearly anything
        raise DataError(f"{what} cannot be decoded: {type(error).__name__}: {str(error)[:200]}") from error


def format_of(image: Any) -> str | None:
    """One of `FORMATS`. Phones write JPEG files that hold further pictures, which Pillow calls MPO."""
    return "JPEG" if image.format == "MPO" else image.format


def upright(image: Any) -> Any:
    from PIL import ImageOps

    return ImageOps.exif_transpose(image) if format_of(image) in ROTATED else image


def on_white(image: Any) -> Any:
    """RGB, on white where the picture is transparent."""
    import numpy as np
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
        image = Image.fromarray((np.asarray(image).clip(0, 65535) / 257).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image)
        image = white
    return image.convert("RGB")


def check_size(width: int, height: int, what: str) -> None:
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise DataError(
            f"{what} has {width} x {height} pixels; at most {MAX_PIXELS} pixels and {MAX_SIDE} on a side are accepted"
        )
    if min(width, height) < 1 or max(width, height) > MAX_ASPECT * min(width, height):
        raise DataError(f"{what} has {width} x {height} pixels: one side is more than {MAX_ASPECT} times the other")

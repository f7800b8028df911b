"""Pictures: what an agent may see besides text, and how they stand in a sequence of token ids.

A `Picture` is immutable and named by its content, so it is stored, looked at and cached once however often it is shown.
In messages it is a part `{"type": "image", "image": picture}`; `as_picture` accepts every spelling that users have.

In a sequence, each token of a picture is a negative id made of the picture's key (48 bits of its name) and the place of
the token in the picture. Such an id cannot come from a tokenizer or be sampled, and equal ids mean equal pixels. So
caches, prefixes and trees compare pictures as they compare text, and code that forgets about pictures fails at once.

Needs numpy and Pillow, which are imported on first use; knows no models.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from agent_r1.errors import DataError, brief

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL import Image

MAX_BYTES = 32 * 2**20  # of an encoded picture
MAX_PIXELS = 50_000_000  # of a decoded one: a small file can describe a huge picture
MAX_SIDE = 16_384
MAX_ASPECT = 200  # longer side over shorter one; models resize thinner pictures to nothing
MAX_PER_MESSAGE = 64
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # of encoded pictures; the first picture of an animation is shown
ROTATED = ("JPEG", "WEBP")  # formats of cameras, which store how they were held

INDEX_BITS = 15
MAX_TOKENS = 1 << INDEX_BITS  # of one picture
PICTURE_NAME = re.compile(r"[0-9a-f]{32}")
_DATA_URL = re.compile(r"data:[\w/+.;=-]*;base64,", re.IGNORECASE)


class Picture:
    """An RGB picture, named by its content."""

    __slots__ = ("__dict__", "encoded", "height", "name", "width")

    def __init__(self, *, name: str, width: int, height: int, encoded: bytes) -> None:
        self.name = name
        self.width = width
        self.height = height
        self.encoded = encoded  # a file in one of `FORMATS`

    @classmethod
    def from_bytes(cls, data: bytes, *, what: str = "the picture") -> Picture:
        """Read an encoded picture. Only its header is read now; pixels that cannot be decoded fail in `pixels`."""
        if len(data) > MAX_BYTES:
            raise DataError(f"{what} has {len(data)} bytes; at most {MAX_BYTES} are accepted")
        image = _open(data, what)
        _check_size(image.width, image.height, what)
        turned = image.format in ROTATED and image.getexif().get(0x0112, 1) >= 5  # orientations 5 to 8 swap the sides
        width, height = (image.height, image.width) if turned else (image.width, image.height)
        return cls(name=_digest(data), width=width, height=height, encoded=data)

    @classmethod
    def from_pixels(cls, pixels_HWC: npt.NDArray[np.uint8]) -> Picture:
        """Make a picture from an array of shape [height, width, 3], with values from 0 to 255."""
        import numpy as np
        from PIL import Image

        if pixels_HWC.ndim != 3 or pixels_HWC.shape[2] != 3 or pixels_HWC.dtype != np.uint8:
            raise DataError(
                f"a picture as an array must be uint8 of shape [height, width, 3], got {pixels_HWC.dtype} "
                f"{list(pixels_HWC.shape)}"
            )
        height, width = pixels_HWC.shape[:2]
        _check_size(width, height, "the picture")
        file = io.BytesIO()
        Image.fromarray(pixels_HWC).save(file, "PNG", compress_level=1)
        # Named by its pixels: encoders differ between versions.
        name = _digest(f"{width}x{height}:".encode() + np.ascontiguousarray(pixels_HWC).tobytes())
        made = cls(name=name, width=width, height=height, encoded=file.getvalue())
        pixels = np.ascontiguousarray(pixels_HWC).copy()
        pixels.flags.writeable = False
        made.__dict__["pixels"] = pixels
        return made

    @classmethod
    def stored(cls, path: Path) -> Picture:
        """Read a picture from a file that is named after it, as runs store them."""
        read = _from_file(path, "the picture")
        return cls(name=path.stem, width=read.width, height=read.height, encoded=read.encoded)

    @cached_property
    def pixels(self) -> npt.NDArray[np.uint8]:
        """The pixels as an array [height, width, 3], upright, on white where they are transparent."""
        import numpy as np

        pixels = np.asarray(_upright_rgb(self.encoded, f"picture {self.name}"))
        pixels.flags.writeable = False
        return pixels

    @property
    def key(self) -> int:
        """48 bits of the name, as they stand in token ids."""
        return int(self.name[:12], 16)

    @property
    def suffix(self) -> str:
        """The suffix of a file with the encoded picture."""
        kind = _open(self.encoded, self.name).format or "PNG"
        return f".{kind.lower()}"

    def image(self) -> Image.Image:
        """The picture as a new PIL image."""
        from PIL import Image

        return Image.fromarray(self.pixels)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Picture({self.width}x{self.height}, {self.name[:8]})"

    def __copy__(self) -> Picture:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Picture:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.name, self.width, self.height, self.encoded)


def _unpickled(name: str, width: int, height: int, encoded: bytes) -> Picture:
    return Picture(name=name, width=width, height=height, encoded=encoded)


def as_picture(value: Any, *, what: str = "the picture") -> Picture:
    """Accept a Picture, a PIL image, an array, bytes, a path, a `file:` or `data:` URL, or a record {bytes, path}."""
    if isinstance(value, Picture):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return Picture.from_bytes(bytes(value), what=what)
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):  # as the datasets library stores them
        data = value.get("bytes")
        return Picture.from_bytes(data, what=what) if data is not None else as_picture(value.get("path"), what=what)
    if isinstance(value, Path):
        return _from_file(value, what)
    if isinstance(value, str):
        return _from_text(value, what)
    if hasattr(value, "convert") and hasattr(value, "size"):  # a PIL image
        return _from_image(value, what)
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        import numpy as np

        return Picture.from_pixels(np.asarray(value))
    raise DataError(
        f"{what} is {brief(value)}; give a PIL image, an array, bytes, a path, or a URL that starts with file: or data:"
    )


def image_part(part: Mapping[str, Any], *, what: str) -> dict[str, Any] | None:
    """A part of a content with its picture read: {"type": "image", "image": Picture}; None if it is not a picture.

    OpenAI's spelling is {"type": "image_url", "image_url": {"url": ...}}, Hugging Face's {"type": "image", ...} with
    the picture under image, url, path or base64.
    """
    if part.get("type") == "image_url" or "image_url" in part:
        given = part.get("image_url")
        source = given.get("url") if isinstance(given, Mapping) else given
    elif part.get("type") == "image" or "image" in part:
        source = next((part[key] for key in ("image", "url", "path", "base64") if part.get(key) is not None), None)
        if "base64" in part and source is part["base64"]:
            source = _from_base64(str(source), what)
    else:
        return None
    if source is None:
        raise DataError(f"{what} has the type {part.get('type')!r} but no picture")
    return {"type": "image", "image": as_picture(source, what=what)}


def shown_content(text: str, images: Sequence[Any], *, what: str) -> str | list[dict[str, Any]]:
    """A content with a text and the pictures after it; only the text if there are none. Damaged pictures raise here."""
    if not images:
        return text
    pictures = [as_picture(image, what=f"picture {index} of {what}") for index, image in enumerate(images)]
    for picture in pictures:
        _ = picture.pixels
    words = [{"type": "text", "text": text}] if text else []
    return [*words, *({"type": "image", "image": picture} for picture in pictures)]


def pictures_of(messages: Iterable[Mapping[str, Any]]) -> list[Picture]:
    """The pictures of messages, in the order in which they are shown."""
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            found += [part["image"] for part in content if isinstance(part, Mapping) and is_image(part)]
    return found


def is_image(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("image"), Picture)


def picture_mark(picture: Picture | str) -> str:
    """What stands for a picture where only text can be shown. Of one that is only named, the size is not known."""
    size = f"{picture.width}x{picture.height} " if isinstance(picture, Picture) else ""
    return f"[image {size}{str(picture)[:6]}]"


def text_of(content: Any) -> str:
    """The text of a content for people, with marks for its pictures; also of a content that was stored."""
    if isinstance(content, list | tuple):
        return "\n".join(map(_part_text, content))
    return "" if content is None else str(content)


def _part_text(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    if isinstance(image := part.get("image"), Picture | str):
        return picture_mark(image)
    return str(part.get("text", part))


# ids


def picture_ids(picture: Picture, count: int) -> list[int]:
    """The ids of a picture that takes `count` tokens."""
    if count > MAX_TOKENS:
        raise DataError(f"{picture!r} takes {count} tokens; at most {MAX_TOKENS} are possible. Set model.max_pixels")
    first = -1 - (picture.key << INDEX_BITS)
    return list(range(first, first - count, -1))


def key_of(token: int) -> int:
    """The key of the picture that a negative id belongs to."""
    return (-1 - token) >> INDEX_BITS


def index_of(token: int) -> int:
    """The place of a negative id in its picture."""
    return (-1 - token) & (MAX_TOKENS - 1)


def by_key(pictures: Iterable[Picture]) -> dict[int, Picture]:
    """Pictures by their keys. Raises if two different ones have the same key, which 48 bits make very unlikely."""
    found: dict[int, Picture] = {}
    for picture in pictures:
        if found.setdefault(picture.key, picture) != picture:
            raise DataError(f"pictures {picture.name} and {found[picture.key].name} cannot be told apart by their keys")
    return found


def added_pictures(before: Sequence[int], after: Sequence[int], pictures: Sequence[Picture]) -> list[Picture]:
    """The pictures that the ids `after` show, in order, behind the ids `before`. If they do not continue those, the
    pictures that `before` does not show."""
    known, size = by_key(pictures), len(before)
    if list(after[:size]) == list(before):
        return [known[key_of(token)] for token in after[size:] if token < 0 and index_of(token) == 0]
    seen = {key_of(token) for token in before if token < 0}
    return [picture for picture in pictures if picture.key not in seen]


def without_repeats(pictures: Sequence[Picture]) -> tuple[Picture, ...]:
    return tuple(dict.fromkeys(pictures))


# reading


def _from_text(text: str, what: str) -> Picture:
    if match := _DATA_URL.match(text):
        return Picture.from_bytes(_from_base64(text[match.end() :], what), what=what)
    if PICTURE_NAME.fullmatch(text):
        raise DataError(f"{what} is only named ({text}): its pixels are in the pictures folder of the run")
    url = urlparse(text)
    if url.scheme in ("http", "https"):
        raise DataError(f"{what} is at {text[:200]}: pictures are not fetched from the network. Download it first")
    return _from_file(Path(unquote(url.path) if url.scheme == "file" else text).expanduser(), what)


def _from_file(path: Path, what: str) -> Picture:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{what}: {path} has {path.stat().st_size} bytes; at most {MAX_BYTES} are accepted")
        return Picture.from_bytes(path.read_bytes(), what=f"{what} ({path})")
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{what}: cannot read {str(path)[:200]!r}: {error}") from error


def _from_base64(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise DataError(f"{what} is not valid base64: {error}") from error


def _from_image(image: Any, what: str) -> Picture:
    import numpy as np

    _check_size(image.width, image.height, what)
    try:
        return Picture.from_pixels(np.asarray(_on_white(image)))
    except OSError as error:  # a lazily opened file that is damaged
        raise DataError(f"{what} cannot be decoded: {error}") from error


def _open(data: bytes, what: str) -> Any:
    from PIL import Image

    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        start = f"; its first bytes are {data[:8]!r}" if data else "; it is empty"
        raise DataError(f"{what} is no readable picture ({', '.join(FORMATS)}){start}") from error


def _upright_rgb(data: bytes, what: str) -> Any:
    from PIL import Image, ImageOps

    try:
        image = _open(data, what)
        return _on_white(ImageOps.exif_transpose(image) if image.format in ROTATED else image)
    except DataError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise DataError(f"{what} cannot be decoded: {error}") from error


def _on_white(image: Any) -> Any:
    """RGB, on white where the picture is transparent."""
    from PIL import Image

    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image)
        image = white
    return image.convert("RGB")


def _check_size(width: int, height: int, what: str) -> None:
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise DataError(
            f"{what} has {width} x {height} pixels; at most {MAX_PIXELS} pixels and {MAX_SIDE} on a side are accepted"
        )
    if min(width, height) < 1 or max(width, height) > MAX_ASPECT * min(width, height):
        raise DataError(f"{what} has {width} x {height} pixels: one side is more than {MAX_ASPECT} times the other")


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()

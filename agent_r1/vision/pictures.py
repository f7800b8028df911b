"""Pictures: what an agent may see besides text, and how token ids represent them.

A `Picture` is immutable and named by its content, so it is stored, encoded and cached once, however often it is shown.
In messages it is a part `{"type": "image", "image": picture}`; `as_picture` accepts every spelling that users have.

In a sequence, each token of a picture is a negative id made of the picture's key (48 bits of its name) and the place of
the token in the picture. Such an id cannot come from a tokenizer or be sampled, and equal ids mean equal pixels. So
caches, prefixes and trees compare pictures as they compare text, and code that forgets about pictures fails at once.

Needs numpy and Pillow, which are imported on first use; knows no models.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from agent_r1.errors import DataError, brief
from agent_r1.places import anchored

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL import Image

MAX_BYTES = 32 * 2**20  # bytes of an encoded picture
MAX_PIXELS = 50_000_000  # pixels of a decoded picture: a small file can describe a huge one
MAX_SIDE = 16_384
MAX_ASPECT = 200  # longer side over shorter one; models resize thinner pictures to nothing
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # of encoded files; the first picture of an animation is shown
ROTATED = ("JPEG", "WEBP")  # camera formats, which store how the camera was held
TURNED = (5, 6, 7, 8)  # the orientations that swap the sides

MAX_PER_MESSAGE = 64

INDEX_BITS = 15
MAX_TOKENS = 1 << INDEX_BITS  # tokens of one picture
PICTURE_NAME = re.compile(r"[0-9a-f]{32}")
_DATA_URL = re.compile(r"data:[\w/+.;=-]*;base64,", re.IGNORECASE)


@dataclass(slots=True, kw_only=True, repr=False, unsafe_hash=True)
class Picture:
    """An RGB picture, named by its content. It never changes."""

    name: str
    width: int = field(compare=False)
    height: int = field(compare=False)
    encoded: bytes = field(compare=False)  # a file in one of `FORMATS`
    is_sound: bool = field(default=False, compare=False)  # whether its pixels have been decoded once

    @classmethod
    def from_bytes(cls, data: bytes, *, what: str = "the picture") -> Picture:
        """Read an encoded picture. Only its header is read now; pixels that cannot be decoded fail in `check`."""
        if len(data) > MAX_BYTES:
            raise DataError(f"{what} has {len(data)} bytes; at most {MAX_BYTES} are accepted")
        image = open_picture(data, what)
        check_size(image.width, image.height, what)
        with explained(what):
            turned = format_of(image) in ROTATED and image.getexif().get(0x0112) in TURNED
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
        check_size(width, height, "the picture")
        file = io.BytesIO()
        Image.fromarray(pixels_HWC).save(file, "PNG", compress_level=1)
        # Named by its pixels: encoders differ between versions.
        name = _digest(f"{width}x{height}:".encode() + np.ascontiguousarray(pixels_HWC).tobytes())
        return cls(name=name, width=width, height=height, encoded=file.getvalue(), is_sound=True)

    @classmethod
    def stored(cls, path: Path) -> Picture:
        """Read a picture from a file that is named after it, as runs store them."""
        read = _from_file(path, "the picture")
        return cls(name=path.stem, width=read.width, height=read.height, encoded=read.encoded)

    def image(self) -> Image.Image:
        """Decode the picture: RGB, upright, on white where it is transparent. Not kept: it may be a hundred times as
        large as the file."""
        image: Image.Image = decode(self.encoded, f"picture {self.name}")
        if image.size != (self.width, self.height):
            raise DataError(f"{self!r} decodes to {image.width} x {image.height} pixels")
        self.is_sound = True
        return image

    @property
    def pixels(self) -> npt.NDArray[np.uint8]:
        """The decoded pixels as an array [height, width, 3]."""
        import numpy as np

        return np.array(self.image())

    def check(self) -> None:
        """Raise DataError if the picture cannot be decoded. Decodes it only the first time."""
        if not self.is_sound:
            self.image()

    @property
    def key(self) -> int:
        """48 bits of the name, which token ids contain."""
        return int(self.name[:12], 16)

    @property
    def suffix(self) -> str:
        """The suffix of a file with the encoded picture."""
        kind = format_of(open_picture(self.encoded, self.name)) or "PNG"
        return f".{kind.lower()}"

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Picture({self.width}x{self.height}, {self.name[:12]})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Picture:
        return self  # so that episodes which copy their row do not decode it again


def as_picture(value: Any, *, what: str = "the picture", folder: Path | None = None) -> Picture:
    """Accept a Picture, a PIL image, an array, bytes, a path, a `file:` or `data:` URL, or a record {bytes, path}.

    Relative paths start in the folder, or where the program was started.
    """
    if isinstance(value, Picture):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return Picture.from_bytes(bytes(value), what=what)
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):  # as the datasets library stores them
        given = value.get("path") if value.get("bytes") is None else value["bytes"]
        return as_picture(given, what=what, folder=folder)
    if isinstance(value, Path):
        return _from_file(value, what, folder)
    if isinstance(value, str):
        return _from_text(value, what, folder)
    if hasattr(value, "convert") and hasattr(value, "size"):  # a PIL image
        return _from_image(value, what)
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        import numpy as np

        return Picture.from_pixels(np.asarray(value))
    raise DataError(
        f"{what} is {brief(value)}; give a PIL image, an array, bytes, a path, or a URL that starts with file: or data:"
    )


def image_part(part: Any, *, what: str, folder: Path | None = None) -> dict[str, Any] | None:
    """A part of a content with its picture read: {"type": "image", "image": Picture}; None if it is not a picture.

    OpenAI's spelling is {"type": "image_url", "image_url": {"url": ...}}, Hugging Face's {"type": "image", ...} with
    the picture under image, url, path or base64.
    """
    if not isinstance(part, Mapping):
        return None
    if part.get("type") == "image_url" or "image_url" in part:
        given = part.get("image_url")
        source = given.get("url") if isinstance(given, Mapping) else given
    elif part.get("type") == "image" or "image" in part:
        source = next((part[key] for key in ("image", "url", "path", "base64") if part.get(key) is not None), None)
        if "base64" in part and source is part["base64"]:
            source = from_base64(str(source), what)
    else:
        return None
    if source is None:
        raise DataError(f"{what} has the type {part.get('type')!r} but no picture")
    if isinstance(source, Picture) and part.get("type") == "image" and "image" in part:
        return part if isinstance(part, dict) else dict(part)  # read before
    return {"type": "image", "image": as_picture(source, what=what, folder=folder)}


def pictures_of(messages: Iterable[Mapping[str, Any]]) -> list[Picture]:
    """The pictures of messages, in the order in which they are shown."""
    contents = [content for message in messages if type(content := message.get("content")) is not str]
    lists = [content for content in contents if isinstance(content, list | tuple)]
    return [part["image"] for content in lists for part in content if is_image(part)]


def is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("image"), Picture)


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
    """Return the pictures that `after` adds to the ids `before`, in order; if `after` does not begin with `before`, all
    pictures that `before` does not show."""
    known, size = by_key(pictures), len(before)
    if list(after[:size]) == list(before):
        return [known[key_of(token)] for token in after[size:] if token < 0 and index_of(token) == 0]
    seen = {key_of(token) for token in before if token < 0}
    return [picture for picture in pictures if picture.key not in seen]


def check_all(pictures: Iterable[Picture]) -> None:
    for picture in pictures:
        picture.check()


def without_repeats(pictures: Sequence[Picture]) -> tuple[Picture, ...]:
    return tuple(dict.fromkeys(pictures))


# reading


def _from_text(text: str, what: str, folder: Path | None) -> Picture:
    if match := _DATA_URL.match(text):
        return Picture.from_bytes(from_base64(text[match.end() :], what), what=what)
    if PICTURE_NAME.fullmatch(text):
        raise DataError(f"{what} is only named ({text}): its pixels are in the pictures folder of the run")
    scheme = text.partition(":")[0].lower()
    if scheme in ("http", "https"):
        raise DataError(f"{what} is at {text[:200]}: pictures are not fetched from the network. Download it first")
    return _from_file(Path(unquote(urlparse(text).path) if scheme == "file" else text), what, folder)


def _from_file(path: Path, what: str, folder: Path | None = None) -> Picture:
    try:
        path = anchored(path) if folder is None else folder / path.expanduser()
        if not path.is_file():  # also refuses devices, which may never end
            raise FileNotFoundError("there is no such file")
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{what}: {path} has {path.stat().st_size} bytes; at most {MAX_BYTES} are accepted")
        return Picture.from_bytes(path.read_bytes(), what=f"{what} ({path})")
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{what}: cannot read {str(path)[:200]!r}: {error}") from error


def _from_image(image: Any, what: str) -> Picture:
    import numpy as np

    check_size(image.width, image.height, what)
    with explained(what):  # it may be a lazily opened file that is damaged
        return Picture.from_pixels(np.asarray(on_white(upright(image))))


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


# decoding, with Pillow: the bytes may be hostile, so sizes are limited, and every failure is a DataError


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

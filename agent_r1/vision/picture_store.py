"""The pictures of a run on disk: each once, in a file named by its content. Writers and readers of runs share this.

A run may come from elsewhere, so nothing in its folder is trusted: only names of the right form are looked up, links
are not followed, and sizes are limited.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from agent_r1.disk import write_atomically
from agent_r1.errors import DataError
from agent_r1.vision.pictures import FORMATS, MAX_BYTES, PICTURE_NAME, Picture

PICTURES = "pictures"  # the folder beside the files of trajectories
MEDIA_TYPES = {f".{kind.lower()}": f"image/{kind.lower()}" for kind in FORMATS}


def store_pictures(folder: Path, pictures: Iterable[Picture]) -> None:
    """Store the pictures that the folder does not have yet."""
    for picture in dict.fromkeys(pictures):
        path = folder / f"{picture.name}{picture.suffix}"
        if not path.exists():
            folder.mkdir(exist_ok=True)
            with write_atomically(path) as part:
                part.write_bytes(picture.encoded)


def load_picture(folder: Path | None, name: str) -> Picture:
    path = None if folder is None else find_picture(folder, name)
    if path is None:
        raise DataError(f"the picture {name[:40]!r} is not in {folder}")
    return Picture.stored(path)


def find_picture(folder: Path, name: str) -> Path | None:
    """The file of a picture; None if the name is malformed or no regular file has it."""
    if not PICTURE_NAME.fullmatch(name) or folder.is_symlink():
        return None
    paths = (folder / f"{name}{suffix}" for suffix in MEDIA_TYPES)
    return next((path for path in paths if _is_plain(path)), None)


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_BYTES

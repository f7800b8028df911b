"""What of the host's file system code in a sandbox sees: an interpreter, its standard library, and chosen packages.

Found by asking this interpreter and the metadata of installed packages. Everything is read-only, and nothing else
exists: no /etc, no home, no /proc, not the folder this project lies in.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from agent_r1.errors import ConfigError

PACKAGES = "/sandbox/packages"  # where the libraries are seen
CODE = "/sandbox/code"  # where our own side of it is seen
INSIDE = Path(__file__).with_name("inside")
SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")  # the dynamic loader and shared libraries
OTHERS = ("site-packages", "dist-packages")  # where a standard library has what was installed beside it
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    folders: list[tuple[str, str]]  # of the host (also files and devices), and where they are seen
    links: list[tuple[str, str]]  # target, place
    hidden: list[str]  # folders of those that are seen empty


def interpreter() -> str:
    """The real program, not the link that a virtual environment puts before it."""
    base: str = getattr(sys, "_base_executable", None) or sys.executable
    return os.path.realpath(base)


def make_view(libraries: Sequence[str]) -> View:
    folders: list[tuple[str, str]] = []
    links = [("/tmp", "/dev/shm")]  # semaphores of multiprocessing live there
    for folder in SYSTEM:
        if os.path.islink(folder):
            links.append((os.readlink(folder), folder))
        elif os.path.isdir(folder):
            folders.append((folder, folder))
    own = [interpreter(), *_libpython(), *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}]
    # The standard library as the interpreter without a virtual environment finds it.
    own = [path.replace(sys.prefix, sys.base_prefix, 1) if path.startswith(sys.prefix) else path for path in own]
    folders += [(path, path) for path in own if not path.startswith(tuple(f"{f}/" for f, _ in folders))]
    hidden = [f"{folder}/{name}" for folder in (*own, "/usr/lib/python3") for name in OTHERS]
    folders += [(str(path), f"{PACKAGES}/{path.name}") for path in package_paths(libraries)]
    folders += [(str(INSIDE), f"{CODE}/inside"), *((device, device) for device in DEVICES)]
    return View(folders=folders, links=links, hidden=[path for path in dict.fromkeys(hidden) if os.path.isdir(path)])


def package_paths(libraries: Iterable[str]) -> list[Path]:
    """The files and folders of these distributions and of what they require."""
    found: dict[Path, None] = {}
    seen: set[str] = set()
    waiting = list(libraries)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        distribution = _distribution(name, wanted=name in libraries)
        if distribution is None:
            continue
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not top.endswith((".dist-info", ".egg-info", ".pth")):
                found[Path(str(distribution.locate_file(top)))] = None
        waiting += [_name(line) for line in distribution.requires or () if "extra ==" not in line]
    return sorted(path for path in found if path.exists())


# Parts that a package imports only when they are used: better once than in every run.
LAZY = {"numpy": ("numpy.fft", "numpy.linalg", "numpy.polynomial", "numpy.random")}

# What makes a library do its slow first time. A first `sympy.solve` takes ten times as long as a second one.
WARM_UP = {
    "sympy": """
from sympy import Eq, Matrix, Rational, Symbol, binomial, diff, factorint, integrate, isprime, nsolve, simplify, solve
from sympy import expand, factor, sqrt, symbols
x, y = symbols("x y")
n = Symbol("n", positive=True, integer=True)
solve(x**2 - 5*x + 6, x), solve([Eq(x + y, 3), Eq(x - y, 1)], [x, y]), solve(x**4 - 3*x**2 + 1, x)
simplify((x**2 - 1) / (x - 1)), factor(x**3 - 1), expand((x + y)**3), str(sqrt(8) + Rational(1, 3)), repr(n)
integrate(x**2 + 1, x), diff(x**3, x), factorint(360), isprime(97), binomial(10, 3), Matrix([[1, 2], [3, 4]]).det()
""",
    "math-verify": """
from math_verify import LatexExtractionConfig, parse, verify
read = lambda text: parse(text, [LatexExtractionConfig()], parsing_timeout=None)
verify(read("$\\frac{1}{2}$"), read("$(3, \\pi/2)$"), timeout_seconds=None)
verify(read("$x^2+1$"), read("$1+x^2$"), timeout_seconds=None)
""",
}


def module_names(libraries: Iterable[str]) -> list[str]:
    """What to import of these distributions: the package called like the distribution."""
    return [module for name in libraries for module in (name.replace("-", "_"), *LAZY.get(name, ()))]


def _distribution(name: str, *, wanted: bool) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        if not wanted:
            return None  # a requirement that this platform does without
        raise ConfigError(
            f"the sandbox is to offer {name!r}, which is not installed: pip install {name}, or take it out of libraries"
        ) from None


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return found[0]


def _libpython() -> list[str]:
    """The interpreter's shared library, where it has one."""
    folder, name = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")
    path = os.path.join(folder or "", name or "")
    return [path] if ".so" in path and os.path.exists(path) else []

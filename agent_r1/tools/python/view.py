"""The part of the host's file system that sandboxed code sees: Python, its standard library and chosen packages.

Everything is read-only, and nothing else exists: no /etc, no home, no /proc, no folder of this project.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from agent_r1.errors import ConfigError

PACKAGES = "/sandbox/packages"  # where the chosen libraries are mounted
SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")  # the dynamic loader and shared libraries
INSTALLED = ("site-packages", "dist-packages")  # folders of a standard library with other packages
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    folders: list[tuple[str, str]]  # folders, files and devices of the host, and where they are mounted
    links: list[tuple[str, str]]  # symbolic links: target, place
    hidden: list[str]  # folders that appear empty


def find_interpreter() -> str:
    """Return the real program, not a virtual environment's link to it."""
    base: str = getattr(sys, "_base_executable", None) or sys.executable
    return os.path.realpath(base)


@cache
def make_view(libraries: tuple[str, ...]) -> View:
    folders: list[tuple[str, str]] = []
    links = [("/tmp", "/dev/shm")]  # semaphores of multiprocessing live there
    for folder in SYSTEM:
        if os.path.islink(folder):
            links.append((os.readlink(folder), folder))
        elif os.path.isdir(folder):
            folders.append((folder, folder))
    own = [find_interpreter(), *_find_libpython(), *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}]
    # The standard library lies outside a virtual environment.
    own = [path.replace(sys.prefix, sys.base_prefix, 1) if path.startswith(sys.prefix) else path for path in own]
    folders += [(path, path) for path in own if not path.startswith(tuple(f"{f}/" for f, _ in folders))]
    hidden = [f"{folder}/{name}" for folder in (*own, "/usr/lib/python3") for name in INSTALLED]
    folders += [(str(path), f"{PACKAGES}/{path.name}") for path in find_packages(libraries)]
    folders += [(device, device) for device in DEVICES]
    return View(folders=folders, links=links, hidden=[path for path in dict.fromkeys(hidden) if os.path.isdir(path)])


def find_packages(libraries: Sequence[str]) -> list[Path]:
    """Return the files and folders of these distributions and of their requirements."""
    found: set[Path] = set()
    seen: set[str] = set()
    waiting = list(libraries)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if name in libraries:
                raise ConfigError(
                    f"the sandbox cannot offer {name!r}, which is not installed: pip install {name}, or remove it from "
                    "libraries"
                ) from None
            continue  # required only on other platforms
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not top.endswith((".dist-info", ".egg-info", ".pth")):
                found.add(Path(str(distribution.locate_file(top))))
        waiting += [
            re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in distribution.requires or () if "extra ==" not in line
        ]
    return sorted(path for path in found if path.exists())


# Submodules that a package imports on first use: import them once instead of in every run.
LAZY = {"numpy": ("numpy.fft", "numpy.linalg", "numpy.polynomial", "numpy.random")}

# Programs that warm up a library: the first `sympy.solve` takes ten times as long as the second.
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
    """Return the modules to import: the package named like the distribution, and its lazy submodules."""
    return [module for name in libraries for module in (name.replace("-", "_"), *LAZY.get(name, ()))]


def _find_libpython() -> list[str]:
    """Return the interpreter's shared library, if it has one."""
    folder, name = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")
    path = os.path.join(folder or "", name or "")
    return [path] if ".so" in path and os.path.exists(path) else []

"""Compare two answers: plain numbers directly, everything else with `math-verify` in a separate process.

LaTeX from a policy (`9^{9^{9^9}}`) can keep a computer algebra system busy forever while it holds the interpreter lock,
so a thread with a timeout is not enough: the process is killed, and the answer counts as wrong. It runs our own code,
so it is limited rather than isolated.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from itertools import count

from agent_r1.errors import ConfigError
from agent_r1.tools.python.process import KilledBy, Limits
from agent_r1.tools.python.sandbox import Sandbox

MAX_ANSWER_CHARS = 500  # far longer than any reference answer
PROCESSES = 2
LIMITS = Limits(seconds=5.0, cpu_seconds=3600, memory_mb=1024)

# Only LaTeX is read: reading plain expressions goes through `eval` in sympy.
CHECK = """
from math_verify import LatexExtractionConfig, parse, verify
_read = lambda text: parse("$" + text + "$", [LatexExtractionConfig()], parsing_timeout=None)
print("same" if verify(_read({truth!r}), _read({answer!r}), timeout_seconds=None) else "different")
"""
_NUMBER = re.compile(r"[-+]?\d{1,15}(\.\d{1,9})?")
_THOUSANDS = re.compile(r"(?<![\d,.])\d{1,3}(?:,\d{3})+(?![\d,])")
_THIN_SPACES = re.compile(r"(?<![\d,.])\d{1,3}(?:(?:\\,|\\ |~)\d{3})+(?!\d)")  # not between two numbers
_FULL_STOP = re.compile(r"(?<=\d)\.\Z")
_BRACKET = re.compile(r"[(\[]|\\\{")  # a comma separates inside brackets: (3,125) and \{3,125\} are two numbers
_turn = count()


async def same_answer(truth: str, answer: str) -> bool:
    """`answer` is the content of \\boxed{}."""
    left, right = _without_separators(truth), _without_separators(answer)
    if left == right:
        return True
    if not right or len(right) > MAX_ANSWER_CHARS:
        return False
    if _NUMBER.fullmatch(left) and _NUMBER.fullmatch(right):
        return float(left) == float(right)
    # One process is kept, because the first parse takes far longer than later ones; calls take turns.
    check = CHECK.format(truth=left, answer=right)
    outcome = await _checker().run(check, session=f"checker-{next(_turn) % PROCESSES}")
    if outcome.error is not None and outcome.killed_by is not KilledBy.TIME:
        outcome = await _checker().run(check)  # retry in a new process: the old one may have reached its limits
    return outcome.error is None and outcome.stdout.endswith("same\n")


def _without_separators(text: str) -> str:
    """Write 1,000 and 1,000\\pi as 1000 and 1000\\pi: math-verify would read the second as a set, and 1\\,000 as a
    product."""
    text = _FULL_STOP.sub("", text.strip().strip("$").strip())
    text = _THIN_SPACES.sub(lambda number: re.sub(r"[^\d]", "", number[0]), text)
    return text if _BRACKET.search(text) else _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)


def require_math_verify() -> None:
    """Fail before the first episode if a package is missing."""
    if find_spec("math_verify") is None:
        raise ConfigError("grading these answers needs the 'math-verify' package: pip install 'agent-r1[math]'")


@cache
def _checker() -> Sandbox:
    require_math_verify()
    return Sandbox(level="process", limits=LIMITS, libraries=("math-verify",), slots=PROCESSES)

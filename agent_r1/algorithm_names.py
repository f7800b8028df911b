"""The names of the algorithms, each with the paper it comes from. Imports no torch, so that a misspelt name is reported
at once; `learn/algorithms.py` has the table of what they do.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

from agent_r1.errors import ConfigError, did_you_mean

PAPERS = {
    "grpo": "arXiv:2402.03300",
    "dr_grpo": "arXiv:2503.20783",
    "dapo": "arXiv:2503.14476",
    "gspo": "arXiv:2507.18071",
    "cispo": "arXiv:2506.13585",
    "rloo": "arXiv:2402.14740",
    "remax": "arXiv:2310.10505",
    "reinforce": "10.1007/BF00992696",
    "reinforce++": "arXiv:2501.03262",
    "reinforce++_baseline": "arXiv:2501.03262",
    "ppo": "arXiv:1707.06347",
    "steppo": "arXiv:2604.18401",
    "gigpo": "arXiv:2505.10978",
}


def check_early(name: str) -> None:
    """Check a name unless the table is loaded: then it may have rows that are not ours, and `get_algorithm` checks."""
    if "agent_r1.learn.algorithms" not in sys.modules:
        check_name(name, PAPERS)


def check_name(name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigError(f"unknown algorithm {name!r}.{did_you_mean(name, known)}")

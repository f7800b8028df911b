from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from agent_r1.bench.results import Row

FAST = Row(
    name="decode/8 sequences",
    settings={"prompt": 5},
    headline="tokens_per_second",
    repeats=[{"tokens_per_second": 100.0, "floor_share": 0.5}, {"tokens_per_second": 300.0, "floor_share": 0.7}],
    once={"start_up_seconds": 2.0},
    commit="abc",
)
SLOW = Row(name="soak/all", settings={}, headline="seconds", repeats=[], once={"seconds": 4.0})


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a result file by name, after checking what every file must hold."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert stored["accelerator"]
    assert {"commit", "torch", "processor"} <= stored.keys()
    for row in stored["rows"]:
        assert row["commit"]
        assert row["headline"] in row["figures"]
        assert all(map(math.isfinite, row["figures"].values()))
    return {row["name"]: row for row in stored["rows"]}

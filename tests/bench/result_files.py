from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


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

"""Where the results of this folder are kept, and what goes into every one of them."""

from __future__ import annotations

from pathlib import Path

from agent_r1.bench.machine import machine as machine

RESULTS = Path(__file__).parent / "results"

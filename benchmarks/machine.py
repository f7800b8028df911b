"""The results folder, and the machine description that every result file includes."""

from __future__ import annotations

from pathlib import Path

from agent_r1.bench.machine import machine as machine

RESULTS = Path(__file__).parent / "results"

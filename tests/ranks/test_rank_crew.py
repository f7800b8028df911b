"""Ranks in one process group."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import FileStore  # type: ignore[attr-defined]

from agent_r1.ranks.rank_crew import MEETING_TIMEOUT, Ranks


def test_a_rank_waits_for_another_one_as_long_as_it_takes(tmp_path: Path) -> None:
    """The warm start of rank 0 and the longest episode may take hours; torch's default is half an hour."""
    store = FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=9))
    try:
        ranks = Ranks()
        assert ranks.objects is not None
        backend = ranks.objects._get_backend(torch.device("cpu"))
        assert backend.options._timeout == MEETING_TIMEOUT > timedelta(days=1)
        assert ranks.gather("a") == ["a"]
    finally:
        distributed.destroy_process_group()

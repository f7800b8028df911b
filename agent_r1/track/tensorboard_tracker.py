"""TensorBoard: event files in `RUN/tensorboard`, written by torch's writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from agent_r1.track.base import Start, Table

PACKAGE = "tensorboard"
FOLDER = "tensorboard"


def check() -> None:
    """Nothing to check: event files are local."""


class TensorBoard:
    def __init__(self, start: Start) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.id = FOLDER
        # Steps that are repeated after a kill replace the earlier ones.
        purge = start.step + 1 if start.known is not None else None
        self._writer = SummaryWriter(str(start.folder / FOLDER), purge_step=purge)
        if start.known is None:
            settings = yaml.safe_dump(dict(start.settings), sort_keys=False, allow_unicode=True)
            self._writer.add_text("config", _verbatim(settings), 0)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, step: int, table: Table) -> None:
        self._writer.add_text("eval/table", table.as_markdown(), step)

    def transcripts(self, step: int, texts: Sequence[str]) -> None:
        for number, text in enumerate(texts):
            self._writer.add_text(f"eval/transcript_{number}", _verbatim(text), step)

    def picture(self, step: int, path: Path) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(path) as image:
            self._writer.add_image("curve", np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def finish(self) -> None:
        self._writer.close()


def _verbatim(text: str) -> str:
    """Markdown that shows the text as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())


start = TensorBoard

"""`agent-r1 export` and `agent-r1 push`: a run's policy for others. `share/` does the work, imported when needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agent_r1.cli.completion import complete_run
from agent_r1.cli.terminal import say

RunArg = Annotated[Path, typer.Argument(help="A run directory.", autocompletion=complete_run)]
Merge = Annotated[bool, typer.Option("--merge", help="Merge LoRA adapters into the weights.")]
GGUF = Annotated[
    str | None, typer.Option(help="Also write a GGUF file of this type (f16, q8_0); requires llama.cpp's converter.")
]


def export_command(
    run: RunArg,
    directory: Annotated[Path, typer.Argument(help="The directory to write; it must be new or empty.")],
    merge: Merge = False,
    gguf: GGUF = None,
) -> None:
    """Write a run's newest checkpoint for others: weights, tokenizer, model card with curve and results."""
    from agent_r1.runs.run_dir import RunDir
    from agent_r1.share.folder import export_run, size_of

    written = export_run(RunDir.open(run), directory.expanduser(), report=say, merge=merge, gguf=gguf)
    say(f"{directory}:\n{size_of(written)}")


def push_command(
    run: RunArg,
    hub_id: Annotated[str, typer.Argument(metavar="HUB_ID", help="OWNER/NAME of a model repository.")],
    merge: Merge = False,
    gguf: GGUF = None,
    public: Annotated[bool, typer.Option("--public", help="Create a public repository (default: private).")] = False,
) -> None:
    """Upload what `agent-r1 export` writes to the Hugging Face hub."""
    from agent_r1.runs.run_dir import RunDir
    from agent_r1.share.hub import push_run

    say(push_run(RunDir.open(run), hub_id, report=say, merge=merge, gguf=gguf, public=public))

"""Find the model that a name refers to. Nothing is loaded, downloaded or converted."""

from __future__ import annotations

from agent_r1.build.models.source import check_source, is_source
from agent_r1.errors import ConfigError
from agent_r1.places import anchored
from agent_r1.runs.reader import is_run, list_checkpoints


def find_model(path: str) -> str:
    """Return the newest checkpoint of a run directory; any other directory, hub id or source as it is.

    Raises ConfigError if there is no such model.
    """
    if is_source(path):
        check_source(path)
        return path
    local = anchored(path)
    if is_run(local):
        saved = list_checkpoints(local / "checkpoints")
        if not saved:
            raise ConfigError(f"the run {path} has no checkpoint yet")
        return str(saved[-1][1])
    if local.exists():
        if not (local / "config.json").is_file():
            what = "holds no config.json" if local.is_dir() else "is a file, and not a .gguf"
            raise ConfigError(f"model {path!r} {what}: name a Hugging Face model directory, a run or a GGUF file")
        return str(local)
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ConfigError(f"model {path!r}: there is no such directory, and it is not a hub id (owner/name)")
    return path

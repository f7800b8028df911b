"""A sandbox for untrusted Python, and the tool "python" over it. Levels of isolation: `sandbox.py`."""

"""The Python API: describe a run with Python objects, train, and look at the result. `docs/python-api.md` shows it."""

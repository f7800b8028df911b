"""Environments in worker processes: `pool.py` in this process, `worker.py` in the others."""

"""Servers: what faces out of a run or a machine."""

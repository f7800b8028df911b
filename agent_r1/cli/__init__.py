"""The command line."""

from agent_r1.cli.app import main

__all__ = ["main"]

"""The data of `gsm8k`."""

from agent_r1.recipes.gsm8k.data import FOLDER, prepare

__all__ = ["FOLDER", "prepare"]

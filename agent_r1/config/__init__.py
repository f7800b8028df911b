"""The description of a run: every setting with its default (`schema.py`), and how recipes and overrides are read."""

from agent_r1.config.load import change_config, load_config, parse_config
from agent_r1.config.recipes import PYTHON, RECIPES, bundled_presets, bundled_recipes, recipe_file, recipe_name
from agent_r1.config.schema import RunConfig

__all__ = [
    "PYTHON",
    "RECIPES",
    "RunConfig",
    "bundled_presets",
    "bundled_recipes",
    "change_config",
    "load_config",
    "parse_config",
    "recipe_file",
    "recipe_name",
]

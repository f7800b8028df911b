"""Create a 1M-parameter language model whose tokenizer knows the words of this task: no hub, no download.

The network is the quickstart's. The tokenizer is trained on demonstrations and on results of all tools, so a finding
such as `season strong` is a token or two.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from agent_r1.recipes.forecast import analysis, task
from agent_r1.recipes.forecast.models import MODELS
from agent_r1.recipes.quickstart import tiny as quickstart
from agent_r1.types import TaskRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEXT_ROWS = 500  # demonstrations that the tokenizer learns from


def make_tiny_model(directory: str | Path, seed: int) -> None:
    """Write config, random weights (a function of `seed`) and tokenizer to `directory`."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    quickstart.make_network(tokenizer, seed).save_pretrained(directory)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for the text of the task, always the same one."""
    models = cycle(MODELS)
    seen = [(row, [*texts, *_results(row, next(models))]) for row, texts in task.demos(TEXT_ROWS, seed=0)]
    return quickstart.make_tokenizer(seen, task.TOOLS)


def _results(row: TaskRow, model: str) -> list[str]:
    """Return results of all tools."""
    known = row.env_kwargs["tools_kwargs"]["series"]
    looks = [analysis.description(known["history"]), analysis.decomposition(known["history"], known["season"])]
    return [*looks, analysis.evaluation(model, **known), "submitted"]

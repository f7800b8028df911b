"""Create a 1M-parameter language model whose tokenizer knows the words of the generated tables: no hub, no download.

The network is the quickstart's. A word, a name and two digits are one token each, so that copying a column or a name
from the question into a query means copying one or two tokens. Text that every prompt has is a single token.
"""

from __future__ import annotations

from pathlib import Path

from agent_r1.recipes.quickstart import tiny as quickstart
from agent_r1.recipes.tables import synthetic
from agent_r1.recipes.tables.sql import SqlTool
from agent_r1.recipes.tables.task import INSTRUCTION

TEXT_ROWS = 1500  # demonstrations that the tokenizer learns from
FIXED = (
    f"Tools:\nsql(query): {SqlTool().description}",
    "Table t has ",
    " rows. Its columns, and its first rows:\nrow",
    INSTRUCTION,
    '\n{"name": "sql", "arguments": {"query": "SELECT',
    "<answer>",
    "</answer>",
)


def make_tiny_model(directory: str | Path, seed: int) -> None:
    """Write config, random weights (a function of `seed`) and tokenizer to `directory`."""
    tokenizer = quickstart.make_tokenizer(
        synthetic.demos(TEXT_ROWS, seed=0), [SqlTool()], pieces=quickstart.whole(*FIXED)
    )
    tokenizer.save_pretrained(directory)
    quickstart.make_network(tokenizer, seed).save_pretrained(directory)

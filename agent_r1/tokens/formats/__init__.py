"""How models write tool calls. `table.py` lists the formats, `infer.py` finds the format of a chat template."""

"""The wire formats of tool calls, one module per kind. `tool_calls.py` has them by name."""

"""Exact ids: rendering, conversations, control tokens, tool-call formats. Imports no torch."""

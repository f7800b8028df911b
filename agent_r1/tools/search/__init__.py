"""Search over a corpus: passages, rankers, one index, a tool, and a server with its client."""

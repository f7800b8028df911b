"""Search over a corpus of passages: rankers, an index, a tool, and a server with its client."""

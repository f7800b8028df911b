"""The engine that samples on vLLM servers, which run in a Python environment of their own."""

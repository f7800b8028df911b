"""Find, fetch, convert and load models."""

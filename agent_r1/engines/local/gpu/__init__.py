"""How the local engine computes on a GPU."""

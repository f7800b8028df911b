"""How the local engine computes on a CPU."""

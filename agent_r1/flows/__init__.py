"""What acts: flows, episodes and context policies. Imports no torch."""

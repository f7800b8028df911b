"""Models that see: how each kind turns pictures into tokens, positions and features."""

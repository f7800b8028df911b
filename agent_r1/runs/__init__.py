"""What remains of a run: its directory, records, metrics and comparisons."""

"""Run directories: writing and reading them, records, metrics and comparisons. Imports no torch."""

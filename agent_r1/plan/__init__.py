"""Estimate the needs and cost of a run: sizes of models, formulas with measured constants, advice. Needs no GPU."""

"""What a run would need and cost: sizes of models, formulas with measured constants, advice. Needs no GPU."""

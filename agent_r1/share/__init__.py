"""Models for others: a folder with weights, tokenizer, model card and results, and its way to a hub."""

"""Models for others: a folder with weights, tokenizer, model card and results, and its upload to a hub."""

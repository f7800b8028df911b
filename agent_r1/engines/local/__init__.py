"""The local engine: any Hugging Face causal LM with continuous batching and a paged cache."""

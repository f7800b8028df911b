"""Torch code that engine, learner and vision share: attention scores, FlashAttention over runs, compiled layers."""

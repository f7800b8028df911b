"""agent-r1: train language-model agents end to end with reinforcement learning."""

__version__ = "0.1.0"

"""The loops: reinforcement learning, supervised fine-tuning, evaluation."""

"""Servers for models, agents, runs and search indexes."""

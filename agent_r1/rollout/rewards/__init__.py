"""Rewards that are made of parts, judges and reward models."""

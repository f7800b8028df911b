"""Rewards made of parts, judges and reward models."""

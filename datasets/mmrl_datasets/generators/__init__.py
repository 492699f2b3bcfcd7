"""Generators of verifiable visual tasks, drawn from a seed."""

"""Families of models by how much is tried with them."""

FAST_FAMILIES = ("qwen2_5_vl", "qwen3_5_moe")
"""Families that `make test` runs whole steps and runs with: plain layers, and recurrent ones with experts.

What is combined with every family has one cell for each of the others, in `make test-all`.
"""

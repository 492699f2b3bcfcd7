"""Computes the GPU memory and time that a run will need, without a GPU."""

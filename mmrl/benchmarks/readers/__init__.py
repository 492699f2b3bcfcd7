"""Readers of published benchmark layouts."""

"""Builds a run and trains its stages."""

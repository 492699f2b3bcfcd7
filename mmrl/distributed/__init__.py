"""Ranks: one process or several, and what they share."""

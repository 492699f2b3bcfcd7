"""Datasets that are drawn by a program, with exact answers: scenes, digits, text, puzzles, charts and videos."""

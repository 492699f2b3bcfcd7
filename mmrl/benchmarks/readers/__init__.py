"""Readers of benchmark files: a module for each published format, and the questions that rows become."""

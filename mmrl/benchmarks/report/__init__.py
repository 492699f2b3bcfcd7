"""Accuracy with intervals, comparisons and their pages."""

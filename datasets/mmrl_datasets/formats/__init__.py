"""Formats: what a file holds, row by row; what the rows mean is not their business."""

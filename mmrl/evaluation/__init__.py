"""Evaluation of a model on a benchmark: prompts as in training, graded responses, and every file to audit it by."""

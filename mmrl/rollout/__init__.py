"""Rollouts: prompts become groups of sampled responses."""

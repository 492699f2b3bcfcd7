"""Rewards: pure functions that score one response against one sample. How to add one: rewards/README.md."""

"""Environments that responses act in, and the processes that hold their episodes."""

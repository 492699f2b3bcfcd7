"""Engines that sample responses: transformers, vLLM, and a user's own engine."""

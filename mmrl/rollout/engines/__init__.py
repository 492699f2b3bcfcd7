"""Engines that sample responses: transformers, vLLM, and an engine of the user's own."""

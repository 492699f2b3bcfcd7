"""Benchmarks scored offline: what a response answers, by rule, and whether that is right, strictly and officially.

`strict` is what a careful reader would say; `compat` is the benchmark's own rule, quirks included. No network.
"""

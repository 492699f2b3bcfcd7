"""Benchmarks: read their files, find the answer in each response by rule, and score it. Nothing here needs a network.

Every response gets two verdicts: `strict`, as a careful reader would judge, and `official`, by the benchmark's own
published rule with all its quirks.
"""

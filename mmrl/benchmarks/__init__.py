"""Benchmarks: read their files, find the answer in each response by rule, and score it. Nothing here needs a network.

Every response gets two verdicts: `strict`, that of a careful reader, and `official`, that of the benchmark's own
published rule with all its quirks.
"""

"""Rules that benchmarks publish for scoring a response, each as its authors' code has it, quirks included.

All have one signature, `(item, response, extraction) -> score`, although some read the response and others only the
answer that our rules found in it.
"""

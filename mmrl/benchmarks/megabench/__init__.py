"""MEGA-Bench: the layout of its table, its metrics, and its score. `mmrl.benchmarks.registry` puts them together."""

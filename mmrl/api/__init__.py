"""The Python API: `train`, `evaluate` and `Policy`, for scripts and notebooks. Users import them from `mmrl`."""

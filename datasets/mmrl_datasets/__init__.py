"""Dataset functions: each takes a `DatasetContext` and options, and yields samples."""

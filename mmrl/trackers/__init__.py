"""Trackers that follow a run's metrics.jsonl from a process of their own: TensorBoard, W&B, Trackio and MLflow.

`process.py` is the program of that process, `follower.py` what it does, and one file for each tracker talks to it.
"""

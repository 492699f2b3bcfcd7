"""Trackers that follow a run's metrics.jsonl from processes of their own: TensorBoard, W&B, Trackio and MLflow."""

"""Trackers that follow a run's metrics.jsonl from their own processes: TensorBoard, W&B, Trackio and MLflow."""

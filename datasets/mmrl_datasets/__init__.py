"""Datasets: functions from a place and a split to samples."""

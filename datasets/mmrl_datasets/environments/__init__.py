"""Environments that a program draws, for `rollout_steps: [{kind: environment, fn}]`. Each is a function of its seed."""

"""The steps of a rollout pipeline, one module each."""

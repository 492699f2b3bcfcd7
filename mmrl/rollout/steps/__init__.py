"""The steps that a rollout pipeline is made of."""

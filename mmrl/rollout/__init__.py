"""The rollout room: from prompts to responses."""

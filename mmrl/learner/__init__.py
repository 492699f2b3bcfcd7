"""The learner room: from experiences to new weights."""

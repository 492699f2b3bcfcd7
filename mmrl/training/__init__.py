"""The stages of a run and what they are built from."""

"""Looks at the data of a run before it: what would stop it, what would mislead it, and what the model will see."""

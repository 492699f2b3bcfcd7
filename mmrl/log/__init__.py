"""Everything that a run writes for people: console, metrics, rollouts, and the run directory that holds them."""

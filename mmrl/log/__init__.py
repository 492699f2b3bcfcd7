"""Everything that a run writes for people: console, metrics, rollouts, the run directory that holds them, trackers."""

"""Plans what a run will need of a GPU, without one."""

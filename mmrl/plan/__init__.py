"""What a run will need of a GPU, found without one."""

"""Runs of one process or several: ranks, the exchanges between them, and the launcher."""

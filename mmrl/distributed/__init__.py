"""Runs of one process or several: ranks and their collectives, sharing of ports among ranks, the launcher."""

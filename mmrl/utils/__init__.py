"""Helpers that need no package of their own: files, plug-ins, statistics, threads, CPU-torch compatibility."""

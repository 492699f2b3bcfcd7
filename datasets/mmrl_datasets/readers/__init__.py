"""Readers: dataset functions that turn the rows of files in common layouts into samples."""

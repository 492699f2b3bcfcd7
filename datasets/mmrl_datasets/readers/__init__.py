"""Readers of rows in files, from tables to chat logs."""

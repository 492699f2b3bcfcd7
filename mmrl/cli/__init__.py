"""The `mmrl` command. Nothing heavy is imported before a command needs it."""

from mmrl.cli.main import main

__all__ = ["main"]

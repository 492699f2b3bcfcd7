"""The `mmrl` command. Nothing heavy is imported before a command needs it."""

import sys

try:
    from mmrl.cli.main import main
except KeyboardInterrupt:  # Ctrl-C in the first tenths of a second
    sys.exit(130)

__all__ = ["main"]

"""`python -m mmrl` is `mmrl`."""

import sys

from mmrl.cli import main

if __name__ == "__main__":
    sys.exit(main())

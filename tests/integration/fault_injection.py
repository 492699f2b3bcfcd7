"""Run the `mmrl` command, and kill it or limit its files when a function is called for the Nth time.

python fault_injection.py mmrl.checkpoint.manager:prune_checkpoints 2 SIGKILL train c.yaml    # a signal
python fault_injection.py mmrl.checkpoint.manager:write_part 2 60000 train c.yaml      # no file grows past 60000 bytes
"""

import functools
import importlib
import os
import resource
import signal
import sys
from itertools import count


def main() -> int:
    where, nth, blow, *arguments = sys.argv[1:]
    module, _, path = where.partition(":")
    owner, _, name = path.rpartition(".")
    importlib.import_module(module)
    holder = getattr(sys.modules[module], owner) if owner else sys.modules[module]
    function, calls = getattr(holder, name), count(1)

    @functools.wraps(function)
    def struck(*args, **kwargs):
        if next(calls) == int(nth):
            strike(blow)
        return function(*args, **kwargs)

    setattr(holder, name, struck)
    sys.argv[1:] = arguments
    from mmrl.cli import main as command

    return command()


def strike(blow: str) -> None:
    if blow.isdecimal():
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(blow), resource.RLIM_INFINITY))
    else:
        os.kill(os.getpid(), signal.Signals[blow])


if __name__ == "__main__":
    sys.exit(main())

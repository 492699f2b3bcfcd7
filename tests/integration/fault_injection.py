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
    where, nth, fault, *arguments = sys.argv[1:]
    module, _, path = where.partition(":")
    owner, _, name = path.rpartition(".")
    importlib.import_module(module)
    holder = getattr(sys.modules[module], owner) if owner else sys.modules[module]
    function, calls = getattr(holder, name), count(1)

    @functools.wraps(function)
    def with_fault(*args, **kwargs):
        if next(calls) == int(nth):
            inject(fault)
        return function(*args, **kwargs)

    setattr(holder, name, with_fault)
    sys.argv[1:] = arguments
    from mmrl.cli import main as command

    return command()


def inject(fault: str) -> None:
    if fault.isdecimal():
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(fault), resource.RLIM_INFINITY))
    else:
        os.kill(os.getpid(), signal.Signals[fault])


if __name__ == "__main__":
    sys.exit(main())

"""Signals that reach a run of this process at a given moment."""

import os
import signal
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from harness import Command


def train_until_signal(
    in_process: Command, config: Path, owner: type, name: str, nth: int, *signals: signal.Signals
) -> None:
    """Train in this process, which gets signals at the `nth` call of a method, and check that they end the run."""
    method, calls = getattr(owner, name), count(1)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == nth:
            for which in signals:
                os.kill(os.getpid(), which)
        return method(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, interrupted)
        assert in_process("train", config).code == 128 + signals[0]

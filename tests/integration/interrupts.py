"""Signals that reach a run of this process at a given moment."""

import os
import signal
from itertools import count
from typing import Any

import pytest


def signal_at_call(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, nth: int, *signals: signal.Signals) -> None:
    """Send this process signals at the `nth` call of a method."""
    method, calls = getattr(owner, name), count(1)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == nth:
            for which in signals:
                os.kill(os.getpid(), which)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)

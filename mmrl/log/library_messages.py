"""Warnings of libraries go to the run's log file; their errors go to the terminal too. Imports without torch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

# Libraries whose loggers have their own handlers, and pass nothing on to the root logger.
_LIBRARIES: Final = ("transformers", "huggingface_hub", "DeepSpeed", "vllm")
_MAX_REMEMBERED: Final = 10_000


class _Repetitions(logging.Filter):
    """Drops a message that was logged before: some libraries warn at every call."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True for a message that is new."""
        key = (record.name, record.getMessage())
        if key in self._seen:
            return False
        if len(self._seen) < _MAX_REMEMBERED:
            self._seen.add(key)
        return True


@contextmanager
def log_library_messages(file: Path, *, rank: int = 0) -> Iterator[None]:
    """Append what libraries log inside this block, warnings included, to `file`; the first message creates it.

    Each message is written once. Errors are printed on standard error as well.
    """
    to_file = logging.FileHandler(file, encoding="utf-8", delay=True)
    to_file.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(name)s: %(message)s"))
    to_file.addFilter(_Repetitions())
    to_terminal = logging.StreamHandler(sys.stderr)
    to_terminal.setLevel(logging.ERROR)
    to_terminal.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    handlers: tuple[logging.Handler, ...] = (to_file, to_terminal)
    loggers = [logging.getLogger(), *map(logging.getLogger, _LIBRARIES)]
    before = [(list(logger.handlers), logger.propagate) for logger in loggers]
    for logger in loggers[1:]:
        logger.handlers.clear()
        logger.propagate = False
        # A library that is imported inside this block would add its handler then, and print everything twice.
        logger.addHandler = lambda hdlr: None  # type: ignore[method-assign]
    for logger in loggers:
        logger.handlers.extend(handlers)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, (own_handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers[:] = own_handlers
            logger.propagate = propagate
        for logger in loggers[1:]:
            del logger.addHandler
        for handler in handlers:
            handler.close()

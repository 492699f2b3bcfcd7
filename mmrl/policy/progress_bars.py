"""Whose progress is shown: ours, and that of downloads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
from transformers.utils import logging


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Keep transformers' bars for reading and writing weights off the console."""
    shown, downloads_shown = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    logging.disable_progress_bar()  # this hides downloads too
    if downloads_shown:
        enable_progress_bars()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()

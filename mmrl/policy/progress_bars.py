"""Progress bars of libraries: those of downloads stay, those of reading and writing weights go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Hide transformers' bars for reading and writing weights inside this block; the console has its own display."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    shows_weights, shows_downloads = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    # transformers switches off the bars of huggingface_hub too, which tell of downloads of minutes.
    logging.disable_progress_bar()
    if shows_downloads:
        enable_progress_bars()
    try:
        yield
    finally:
        if shows_weights:
            logging.enable_progress_bar()

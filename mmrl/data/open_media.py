"""Opening of every image and video of a dataset before training, in this process or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from mmrl.log.console import Console
from mmrl.media.checks import MediaError
from mmrl.media.media_workers import start_media_workers
from mmrl.types import ImageRef, Sample, UserError, VideoRef

MediaRefT = TypeVar("MediaRefT", ImageRef, VideoRef)
OpenedT = TypeVar("OpenedT")


def unique_images(samples: Iterable[Sample]) -> tuple[ImageRef, ...]:
    """Return every image of the samples once, in the order of first use."""
    return tuple(dict.fromkeys(ref for sample in samples for ref in sample.images))


def unique_videos(samples: Iterable[Sample]) -> tuple[VideoRef, ...]:
    """Return every video of the samples once, in the order of first use."""
    return tuple(dict.fromkeys(ref for sample in samples for ref in sample.media if isinstance(ref, VideoRef)))


def open_all_media(
    refs: Sequence[MediaRefT], open_one: Callable[[MediaRefT], OpenedT], *, workers: int, console: Console
) -> dict[MediaRefT, OpenedT | MediaError]:
    """Open all media, and return for each what `open_one` returned or the error that it raised.

    A file that kills the process that opens it maps to an error too.

    Args:
        refs: images or videos, each once.
        open_one: picklable if there are workers.
        workers: processes that open media; 0 for this one alone.
        console: shows a progress bar.
    """
    if not refs:
        return {}
    attempt = partial(_open_or_error, open_one)
    if not workers:
        return dict(zip(refs, console.track("opening media", map(attempt, refs), len(refs)), strict=True))
    with closing(start_media_workers(attempt, workers, name=attrgetter("path"))) as pool:
        futures = list(map(pool.submit, refs))
        opened = console.track("opening media", map(_wait_for_media, futures), len(refs))
        return dict(zip(refs, opened, strict=True))


def find_media_problem(sample: Sample, opened: Mapping[Any, object]) -> str | None:
    """Return the first error among a sample's media, or None; media that were not opened count as good."""
    for ref in sample.media:
        outcome = opened.get(ref)
        if isinstance(outcome, MediaError):
            return str(outcome)
    return None


def _wait_for_media(future: Future[OpenedT | MediaError]) -> OpenedT | MediaError:
    try:
        return future.result()
    except UserError as error:
        # `_open_or_error` returns what the decoder raises, so this is the end of the worker's process.
        return MediaError(str(error))


def _open_or_error(open_one: Callable[[MediaRefT], OpenedT], ref: MediaRefT) -> OpenedT | MediaError:
    try:
        return open_one(ref)
    except MediaError as error:
        return error

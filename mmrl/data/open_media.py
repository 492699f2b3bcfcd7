"""Open images and videos, in this process or in workers. A medium that cannot be opened comes with its error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import TypeVar

from mmrl.config.schema import DataConfig
from mmrl.log.console import Console
from mmrl.media.media_workers import start_media_workers
from mmrl.types import ImageRef, MediaError, MediaRef, Sample, UserError, VideoRef

MediaRefT = TypeVar("MediaRefT", ImageRef, VideoRef)
OpenedT = TypeVar("OpenedT")


def unique_images(samples: Iterable[Sample]) -> tuple[ImageRef, ...]:
    """Return every image of the samples once, in the order of first use."""
    return tuple(dict.fromkeys(ref for sample in samples for ref in sample.images))


def unique_videos(samples: Iterable[Sample]) -> tuple[VideoRef, ...]:
    """Return every video of the samples once, in the order of first use."""
    return tuple(dict.fromkeys(ref for sample in samples for ref in sample.media if isinstance(ref, VideoRef)))


def open_media(
    refs: Sequence[MediaRefT], open_one: Callable[[MediaRefT], OpenedT], *, options: DataConfig, console: Console
) -> Iterator[tuple[MediaRefT, OpenedT | MediaError]]:
    """Open images or videos, and yield each with what `open_one` returned or the error that it raised, in order.

    Without `media_workers` in the options, this process opens them. Otherwise `open_one` must be picklable, and a file
    that kills the process that opens it, or takes it too long, comes with an error too.
    """
    if not refs:
        return
    attempt = partial(_open_or_error, open_one)
    if not options.media_workers:
        yield from zip(refs, console.track("opening media", map(attempt, refs), len(refs)), strict=True)
        return
    workers = start_media_workers(
        attempt, options.media_workers, timeout_s=options.media_timeout_s, name=lambda ref: ref.path
    )
    with closing(workers) as pool:
        futures = list(map(pool.submit, refs))
        opened = console.track("opening media", map(_wait_for_media, futures), len(refs))
        yield from zip(refs, opened, strict=True)


def _wait_for_media(future: Future[OpenedT | MediaError]) -> OpenedT | MediaError:
    try:
        return future.result()
    except UserError as error:
        # `_open_or_error` returns a decoder's error as a value, so an exception means that the worker was lost.
        return MediaError(str(error))


def _open_or_error(open_one: Callable[[MediaRefT], OpenedT], ref: MediaRefT) -> OpenedT | MediaError:
    try:
        return open_one(ref)
    except MediaError as error:
        return error


def find_media_errors(samples: Iterable[Sample], errors: Mapping[MediaRef, MediaError]) -> dict[str, str]:
    """Return the first error among a sample's media, by sample id."""
    problems: dict[str, str] = {}
    for sample in samples:
        for ref in sample.media:
            if ref in errors:
                problems.setdefault(sample.id, str(errors[ref]))
    return problems

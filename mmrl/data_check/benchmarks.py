"""Compare the benchmarks that a run evaluates with its training data."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping, Sequence
from functools import partial

from mmrl.benchmarks.readers.questions import BenchmarkQuestions
from mmrl.data.load import find_media_problem, open_all_media, unique_images, unique_videos
from mmrl.data_check.duplicates import DuplicateFinding
from mmrl.data_check.findings import FindingCode
from mmrl.data_check.open_media import OpenedImage, OpenedVideo, inspect_image, inspect_video
from mmrl.data_check.report import BenchmarkReport
from mmrl.log.console import Console
from mmrl.media.cache import MediaCache
from mmrl.media.checks import MediaError
from mmrl.media.video import FrameSampling
from mmrl.types import MediaRef, Sample


def fingerprint_new_media(
    samples: Sequence[Sample],
    fingerprints: MutableMapping[str, bytes],
    cache: MediaCache,
    sampling: FrameSampling | None,
    *,
    workers: int,
    console: Console,
) -> dict[str, str]:
    """Open the media of samples that have no fingerprint yet, and add their fingerprints.

    Args:
        samples: questions of a benchmark.
        fingerprints: thumbnails by sha256 of the image or video; new ones are added.
        cache: opens media; worker processes are sent a copy of it, so it should keep no image.
        sampling: chooses the frames of videos; None leaves videos unopened.
        workers: processes that open media; 0 for this one alone.
        console: shows a progress bar.

    Returns:
        The first error among the media of each sample that has one, by sample id.
    """
    opened: dict[MediaRef, OpenedImage | OpenedVideo | MediaError] = {}
    images = [ref for ref in unique_images(samples) if ref.sha256 not in fingerprints]
    opened.update(open_all_media(images, partial(inspect_image, cache), workers=workers, console=console).items())
    if sampling is not None:
        videos = [ref for ref in unique_videos(samples) if ref.sha256 not in fingerprints]
        inspect = partial(inspect_video, cache, sampling)
        opened.update(open_all_media(videos, inspect, workers=workers, console=console).items())
    for ref, result in opened.items():
        if not isinstance(result, MediaError):
            fingerprints[ref.sha256] = result.fingerprint
    problems = {}
    for sample in samples:
        problem = find_media_problem(sample, opened)
        if problem:
            problems[sample.id] = problem
    return problems


def compare_with_training(questions: BenchmarkQuestions, overlaps: Sequence[DuplicateFinding]) -> BenchmarkReport:
    """Count the questions of a benchmark and what they share with training."""
    counts = Counter(overlap.code for overlap in overlaps)
    return BenchmarkReport(
        questions=len(questions.entries),
        media=len({ref.sha256 for sample in questions.samples for ref in sample.media}),
        leaked=counts[FindingCode.LEAK],
        shared=counts[FindingCode.SHARED_MEDIA],
    )

"""Benchmarks that a run takes, beside what it trains on."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping, Sequence

from mmrl.benchmarks.readers.questions import BenchmarkQuestions
from mmrl.data.open_media import find_media_problem, open_all_media, unique_images, unique_videos
from mmrl.data_check.duplicates import DuplicateFinding
from mmrl.data_check.findings import FindingCode
from mmrl.data_check.open_media import ImageInspector, OpenedImage, OpenedVideo, VideoInspector
from mmrl.data_check.report import BenchmarkReport
from mmrl.log.console import Console
from mmrl.media.checks import MediaError
from mmrl.types import MediaRef, Sample


def fingerprint_new_media(
    samples: Sequence[Sample],
    fingerprints: MutableMapping[str, bytes],
    *,
    inspect_image: ImageInspector,
    inspect_video: VideoInspector | None,
    workers: int,
    console: Console,
) -> dict[str, str]:
    """Add the fingerprints of media that are not `known` yet, by sha256; returns what is wrong with those that cannot
    be opened, by the id of the sample. Videos are looked at where there is a `watch`.
    """
    pictures = [ref for ref in unique_images(samples) if ref.sha256 not in fingerprints]
    seen: dict[MediaRef, OpenedImage | OpenedVideo | MediaError] = {}
    seen.update(open_all_media(pictures, inspect_image, workers=workers, console=console).items())
    if inspect_video is not None:
        videos = [ref for ref in unique_videos(samples) if ref.sha256 not in fingerprints]
        seen.update(open_all_media(videos, inspect_video, workers=workers, console=console).items())
    fingerprints.update(
        {ref.sha256: told.fingerprint for ref, told in seen.items() if not isinstance(told, MediaError)}
    )
    problems = {sample.id: find_media_problem(sample, seen) for sample in samples}
    return {id_: problem for id_, problem in problems.items() if problem}


def compare_with_training(questions: BenchmarkQuestions, overlaps: Sequence[DuplicateFinding]) -> BenchmarkReport:
    """What a benchmark has in common with training."""
    found = Counter(alarm.code for alarm in overlaps)
    return BenchmarkReport(
        questions=len(questions.entries),
        media=len({ref.sha256 for sample in questions.samples for ref in sample.media}),
        leaked=found[FindingCode.LEAK],
        shared=found[FindingCode.SHARED_MEDIUM],
    )

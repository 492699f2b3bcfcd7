"""Benchmarks that a run takes, beside what it trains on."""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableMapping, Sequence

from mmrl.benchmarks.readers.questions import Questions
from mmrl.data.load import look_at_all, pictures_of, problem_of, videos_of
from mmrl.data_check.duplicates import Alarm
from mmrl.data_check.findings import Code
from mmrl.data_check.open_media import Inspect, Seen, Watch, Watched
from mmrl.data_check.report import BenchmarkReport
from mmrl.log.console import Console
from mmrl.media.checks import MediaError
from mmrl.types import MediaRef, Sample


def recognise(
    samples: Sequence[Sample],
    known: MutableMapping[str, bytes],
    *,
    inspect: Inspect,
    watch: Watch | None,
    workers: int,
    console: Console,
) -> dict[str, str]:
    """Add the fingerprints of media that are not `known` yet, by sha256; returns what is wrong with those that cannot
    be opened, by the id of the sample. Videos are looked at where there is a `watch`.
    """
    pictures = [ref for ref in pictures_of(samples) if ref.sha256 not in known]
    seen: dict[MediaRef, Seen | Watched | MediaError] = {}
    seen.update(look_at_all(pictures, inspect, workers=workers, console=console).items())
    if watch is not None:
        videos = [ref for ref in videos_of(samples) if ref.sha256 not in known]
        seen.update(look_at_all(videos, watch, workers=workers, console=console).items())
    known.update({ref.sha256: told.fingerprint for ref, told in seen.items() if not isinstance(told, MediaError)})
    problems = {sample.id: problem_of(sample, seen) for sample in samples}
    return {id_: problem for id_, problem in problems.items() if problem}


def compared(questions: Questions, alarms: Sequence[Alarm]) -> BenchmarkReport:
    """What a benchmark has in common with training."""
    found = Counter(alarm.code for alarm in alarms)
    return BenchmarkReport(
        questions=len(questions.asked),
        media=len({ref.sha256 for sample in questions.samples for ref in sample.media}),
        leaked=found[Code.LEAK],
        shared=found[Code.SHARED_MEDIUM],
    )

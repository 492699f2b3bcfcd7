"""Questions and pictures that occur more than once: within training, and in training and held-out data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mmrl.data_check.findings import FindingCode
from mmrl.data_check.image_similarity import find_most_similar, find_near_duplicates
from mmrl.types import MediaRef, Sample, VideoRef


class DuplicateFinding(NamedTuple):
    """A finding about a sample and another one."""

    code: FindingCode
    sample_id: str
    message: str
    other_id: str


def find_repeated_questions(samples: Sequence[Sample]) -> Iterator[DuplicateFinding]:
    """Samples that ask what an earlier one asked: the same text, but for case and spaces, about the same bytes."""
    first: dict[tuple[str, ...], Sample] = {}
    for sample in samples:
        earlier = first.setdefault(_question_key(sample), sample)
        if earlier is sample:
            continue
        if earlier.target == sample.target:
            yield DuplicateFinding(FindingCode.DUPLICATE, sample.id, f"repeats {earlier.id}", earlier.id)
        else:
            both = f"{sample.target.value!r}, where {earlier.id} says {earlier.target.value!r}"
            yield DuplicateFinding(FindingCode.CONTRADICTION, sample.id, f"says {both}", earlier.id)


def find_training_overlap(
    held_out: Sequence[Sample], train: Sequence[Sample], fingerprints: Mapping[str, bytes]
) -> Iterator[DuplicateFinding]:
    """Held-out samples that training asks too, or whose media it shows: the same bytes, or pictures that look alike."""
    trained = {_question_key(sample): sample.id for sample in reversed(train)}
    shown = _first_uses_by_digest(train)
    alike = _match_similar_media(_first_uses_by_digest(held_out), shown, fingerprints)
    for sample in held_out:
        if other := trained.get(_question_key(sample)):
            yield DuplicateFinding(
                FindingCode.LEAK, sample.id, f"training sample {other} asks the same about the same media", other
            )
            continue
        same = [ref for ref in sample.media if ref.sha256 in shown]
        similar = [ref for ref in sample.media if ref.sha256 in alike]
        if same:
            other = shown[same[0].sha256][0]
            yield DuplicateFinding(
                FindingCode.SHARED_MEDIUM, sample.id, f"{same[0].path} is shown by training sample {other}", other
            )
        elif similar:
            other, ref = shown[alike[similar[0].sha256]]
            message = f"{similar[0].path} looks like {ref.path} of training sample {other}"
            yield DuplicateFinding(FindingCode.SHARED_MEDIUM, sample.id, message, other)


def find_similar_images(samples: Sequence[Sample], fingerprints: Mapping[str, bytes]) -> Iterator[DuplicateFinding]:
    """Pictures of other bytes that look like an earlier one."""
    uses = _first_uses_by_digest(samples)
    known = [sha256 for sha256 in uses if sha256 in fingerprints]
    for later, earlier in sorted(find_near_duplicates([fingerprints[sha256] for sha256 in known]).items()):
        (sample, ref), (other, like) = uses[known[later]], uses[known[earlier]]
        yield DuplicateFinding(
            FindingCode.NEAR_DUPLICATE, sample, f"{ref.path} looks like {like.path} of {other}", other
        )


def _question_key(sample: Sample) -> tuple[str, ...]:
    """What is asked: texts without differences of case and spaces, media by their bytes."""
    return tuple(
        " ".join(part.casefold().split()) if isinstance(part, str) else _media_key(part) for part in sample.parts
    )


def _media_key(ref: MediaRef) -> str:
    return f"{ref.sha256} {ref.start} {ref.end}" if isinstance(ref, VideoRef) else ref.sha256


def _first_uses_by_digest(samples: Sequence[Sample]) -> dict[str, tuple[str, MediaRef]]:
    """By sha256 of a medium: the first sample that shows it."""
    uses: dict[str, tuple[str, MediaRef]] = {}
    for sample in samples:
        for ref in sample.media:
            uses.setdefault(ref.sha256, (sample.id, ref))
    return uses


def _match_similar_media(
    queries: Mapping[str, object], others: Mapping[str, object], fingerprints: Mapping[str, bytes]
) -> dict[str, str]:
    """For each query that looks like another medium, by sha256: which."""
    mine, theirs = ([sha256 for sha256 in of if sha256 in fingerprints] for of in (queries, others))
    found = find_most_similar([fingerprints[sha256] for sha256 in mine], [fingerprints[sha256] for sha256 in theirs])
    return {mine[query]: theirs[other] for query, other in found.items()}

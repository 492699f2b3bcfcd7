"""Find questions and images that occur more than once: within training, or in training and in held-out data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from mmrl.data_check.fingerprints import find_most_similar, find_near_duplicates
from mmrl.data_check.report import FindingCode
from mmrl.types import MediaRef, Sample, VideoRef


class DuplicateFinding(NamedTuple):
    """A finding about two samples."""

    code: FindingCode
    sample_id: str
    message: str
    other_id: str


class _FirstUse(NamedTuple):
    """The first sample that shows an image or video."""

    sample_id: str
    ref: MediaRef


def find_repeated_questions(samples: Sequence[Sample]) -> Iterator[DuplicateFinding]:
    """Yield samples that ask the same as an earlier one (see `_question_key`), with the same answer or another."""
    first_sample: dict[tuple[str, ...], Sample] = {}
    for sample in samples:
        earlier = first_sample.setdefault(_question_key(sample), sample)
        if earlier is sample:
            continue
        if earlier.target == sample.target:
            yield DuplicateFinding(FindingCode.DUPLICATE, sample.id, f"repeats {earlier.id}", earlier.id)
        else:
            message = f"says {sample.target.value!r}, where {earlier.id} says {earlier.target.value!r}"
            yield DuplicateFinding(FindingCode.CONTRADICTION, sample.id, message, earlier.id)


def find_training_overlap(
    held_out: Sequence[Sample], train: Sequence[Sample], fingerprints: Mapping[str, bytes]
) -> Iterator[DuplicateFinding]:
    """Yield samples of a held-out split or a benchmark that share a question or media with training.

    `fingerprints` holds thumbnails by sha256 of the image or video, to find similar images.
    """
    # In reverse, so that the first of several training samples with one question is named.
    trained = {_question_key(sample): sample.id for sample in reversed(train)}
    first_uses = first_uses_by_digest(train)
    query_digests = [digest for digest in first_uses_by_digest(held_out) if digest in fingerprints]
    train_digests = [digest for digest in first_uses if digest in fingerprints]
    query_fingerprints = [fingerprints[digest] for digest in query_digests]
    most_similar = find_most_similar(query_fingerprints, [fingerprints[digest] for digest in train_digests])
    similar_digests = {query_digests[query]: train_digests[match] for query, match in most_similar.items()}
    for sample in held_out:
        same_question = trained.get(_question_key(sample))
        same_media = [ref for ref in sample.media if ref.sha256 in first_uses]
        similar_media = [ref for ref in sample.media if ref.sha256 in similar_digests]
        if same_question:
            message = f"training sample {same_question} asks the same about the same media"
            yield DuplicateFinding(FindingCode.LEAK, sample.id, message, same_question)
        elif same_media:
            use = first_uses[same_media[0].sha256]
            message = f"{same_media[0].path} is shown by training sample {use.sample_id}"
            yield DuplicateFinding(FindingCode.SHARED_MEDIA, sample.id, message, use.sample_id)
        elif similar_media:
            use = first_uses[similar_digests[similar_media[0].sha256]]
            message = f"{similar_media[0].path} looks like {use.ref.path} of training sample {use.sample_id}"
            yield DuplicateFinding(FindingCode.SHARED_MEDIA, sample.id, message, use.sample_id)


def find_similar_images(samples: Sequence[Sample], fingerprints: Mapping[str, bytes]) -> Iterator[DuplicateFinding]:
    """Yield images that look like an earlier one and differ from it in their bytes."""
    first_uses = first_uses_by_digest(samples)
    digests = [digest for digest in first_uses if digest in fingerprints]
    duplicates = find_near_duplicates([fingerprints[digest] for digest in digests])
    for later_index, earlier_index in sorted(duplicates.items()):
        later, earlier = first_uses[digests[later_index]], first_uses[digests[earlier_index]]
        message = f"{later.ref.path} looks like {earlier.ref.path} of {earlier.sample_id}"
        yield DuplicateFinding(FindingCode.NEAR_DUPLICATE, later.sample_id, message, earlier.sample_id)


def _question_key(sample: Sample) -> tuple[str, ...]:
    """Return the texts of a question, without differences of case and spaces, and what it shows of which media."""
    key = []
    for part in sample.parts:
        if isinstance(part, str):
            key.append(" ".join(part.casefold().split()))
        elif isinstance(part, VideoRef):
            key.append(f"{part.sha256} {part.start} {part.end} {part.fps}")
        else:
            key.append(f"{part.sha256} {part.timestamp} {part.crop} {part.fps}")
    return tuple(key)


def first_uses_by_digest(samples: Sequence[Sample]) -> dict[str, _FirstUse]:
    """Return the first use of each image and video, by its sha256."""
    uses: dict[str, _FirstUse] = {}
    for sample in samples:
        for ref in sample.media:
            uses.setdefault(ref.sha256, _FirstUse(sample.id, ref))
    return uses

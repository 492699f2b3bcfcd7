"""Experiences to tensors: the only place that packs or pads.

Letters: B rows, L columns, P prompt columns, N learned tokens, M patches, D values a patch, I images, V videos.

The learner's batch is one row that holds each prompt once, before all of its completions, and no padding:

    prompt | first | second second second | prompt' prompt' | first' first' ...

Every completion sees its prompt and itself, and its positions go on from the prompt's. It may contain media that tools
showed: patches come in the order of placeholders in the row. The plain layout, one padded row per completion, is what
this must equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.nn import functional as F

from mmrl.types import (
    Author,
    Experience,
    ImageRef,
    MediaRef,
    Prompt,
    Rollout,
    SamplingLaw,
    Segment,
    UserError,
    VideoRef,
    View,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholders:
    """The token ids that stand for pictures and frames, and how many patches per side one of them stands for."""

    image: int
    video: int
    merge: int

    def types(self, ids: torch.Tensor) -> torch.Tensor:
        """What each token stands for: 0 text, 1 a picture, 2 a video; int64 in the shape of `ids`."""
        return (ids == self.image).long() + 2 * (ids == self.video).long()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTensors:
    """What the model's forward needs of a prompt, or of a view, besides ids; N is 0 where is no picture or video."""

    images_ND: torch.Tensor
    videos_ND: torch.Tensor
    positions_3P: torch.Tensor
    seconds_V: torch.Tensor  # from one pair of frames to the next; an engine works out positions by itself

    @property
    def nbytes(self) -> int:
        """Memory of all of them."""
        return sum(getattr(self, f.name).nbytes for f in fields(self))


class Feeder(Protocol):
    """Gives the tensors of a prompt, and of what tools show."""

    placeholders: Placeholders

    def tensors(self, prompt: Prompt) -> PromptTensors:
        """Patches and position ids."""

    def seen(self, view: View) -> PromptTensors:
        """Patches, and position ids from 0 on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """The patches of a batch and the grids (t, h, w) that order them, pictures and videos apart; a key per medium."""

    images_ND: torch.Tensor
    image_grids_I3: torch.Tensor
    image_keys: tuple[str, ...]
    videos_ND: torch.Tensor
    video_grids_V3: torch.Tensor
    video_keys: tuple[str, ...]

    def to(self, device: torch.device) -> Media:
        """The same on another device."""
        return _moved(self, device)


class Stem(NamedTuple):
    """Lengths, in tokens, of a prompt and of the completions that follow it in a row."""

    prompt: int
    completions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tensors of one forward pass; those in N have one entry per token of the policy's or a teacher's."""

    ids_BL: torch.Tensor
    types_BL: torch.Tensor  # see `Placeholders.types`
    positions_3BL: torch.Tensor
    tree: tuple[Stem, ...] | None  # how the one row is packed; None where rows are ordinary sequences
    media: Media
    ids_N: torch.Tensor
    source_N: torch.Tensor  # which place of `ids_BL`, flattened, predicts a token
    temperature_N: torch.Tensor  # of the law that a token was drawn from
    banned: tuple[int, ...]

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return _moved(self, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Prompts, or responses, alone, padded on the left. `keep_BP` is 1 where there is no padding."""

    ids_BP: torch.Tensor
    types_BP: torch.Tensor
    keep_BP: torch.Tensor
    positions_3BP: torch.Tensor
    media: Media

    def to(self, device: torch.device) -> PromptBatch:
        """The same batch on another device."""
        return _moved(self, device)


def check_media(prompt: Prompt, tensors: PromptTensors, placeholders: Placeholders) -> None:
    """Hold placeholders, grids and patches of a prompt against each other: in the processor, and wherever it is used.

    Raises:
        UserError: they disagree; it names the sample.
    """
    _check(prompt.ids, _exhibits(prompt), tensors, placeholders, who=f"sample {prompt.sample.id}")


def check_view(segment: Segment, view: View, tensors: PromptTensors, placeholders: Placeholders, *, who: str) -> None:
    """The same for a segment that shows a medium; the error begins with `who`."""
    _check(segment.ids, [_Exhibit(view.ref, view.grid, view.digest)], tensors, placeholders, who=who)


def _check(
    ids: Sequence[int], exhibits: Sequence[_Exhibit], tensors: PromptTensors, placeholders: Placeholders, *, who: str
) -> None:
    for what, kind, patches, token in (
        ("picture", ImageRef, len(tensors.images_ND), placeholders.image),
        ("video", VideoRef, len(tensors.videos_ND), placeholders.video),
    ):
        called = sum(prod(exhibit.grid) for exhibit in exhibits if isinstance(exhibit.ref, kind))
        tokens = ids.count(token)
        if not called == patches == tokens * placeholders.merge**2:
            raise UserError(
                f"{who}: the {what} grids call for {called} patches, there are {patches}, "
                f"and {tokens} placeholders stand for {tokens * placeholders.merge**2}"
            )
    if tensors.positions_3P.shape != (3, len(ids)):
        raise UserError(f"{who}: {len(ids)} tokens, positions {list(tensors.positions_3P.shape)}")


def collate_prompts(prompts: Sequence[Prompt], feeder: Feeder, *, pad_id: int) -> PromptBatch:
    """Pack prompts into tensors.

    Raises:
        UserError: placeholders, grids and patches of a prompt disagree.
    """
    return _padded_left([Stretch.of_prompt(prompt, feeder) for prompt in prompts], feeder, pad_id)


def collate_responses(rollouts: Sequence[Rollout], feeder: Feeder, *, pad_id: int) -> PromptBatch:
    """What there is of responses, without their prompts; positions count from the first token of each.

    Raises:
        ValueError, UserError: as `collate`.
    """
    return _padded_left([Stretch.of_response(rollout, feeder) for rollout in rollouts], feeder, pad_id)


def _padded_left(stretches: Sequence[Stretch], feeder: Feeder, pad_id: int) -> PromptBatch:
    shape = (len(stretches), max(len(stretch.ids) for stretch in stretches))
    ids, keep = torch.full(shape, pad_id), torch.zeros(shape, dtype=torch.int64)
    positions = torch.zeros(3, *shape, dtype=torch.int64)
    for b, stretch in enumerate(stretches):
        start = shape[1] - len(stretch.ids)
        ids[b, start:], keep[b, start:] = torch.tensor(stretch.ids, dtype=torch.int64), 1
        positions[:, b, start:] = stretch.positions_3S
    types = feeder.placeholders.types(ids)
    return PromptBatch(ids_BP=ids, types_BP=types, keep_BP=keep, positions_3BP=positions, media=media_of(stretches))


def by_prompt(experiences: Iterable[Experience]) -> list[list[Experience]]:
    """Experiences in groups of one prompt each, in order of first appearance."""
    groups: dict[str, list[Experience]] = {}
    for experience in experiences:
        groups.setdefault(experience.rollout.prompt.digest, []).append(experience)
    return list(groups.values())


def collate(
    groups: Sequence[Sequence[Experience]], feeder: Feeder, *, pad_id: int, shared_prefix: bool = True
) -> Batch:
    """Groups as one packed row; or, without a shared prefix, every experience as an ordinary row, padded on the right.

    Raises:
        UserError: placeholders, grids and patches of a prompt, or of what a tool showed, disagree.
        ValueError: siblings differ in their prompt, or laws in what they ban; a completion contains a placeholder that
            no tool showed, or the policy's or a teacher's part of one a token that its law forbids.
    """
    banned = {law.banned for group in groups for experience in group for law in _laws(experience.rollout)}
    if len(banned) != 1:
        raise ValueError(f"all laws of a batch ban the same tokens, got {len(banned)} sets")
    rows = [groups] if shared_prefix else [[[experience]] for group in groups for experience in group]
    drafts = [_Draft.of(row, feeder) for row in rows]
    length = max(len(draft.ids) for draft in drafts)
    tokens = [(b * length, token) for b, draft in enumerate(drafts) for token in draft.learned]
    ids = torch.tensor([draft.ids + [pad_id] * (length - len(draft.ids)) for draft in drafts])
    positions = [F.pad(draft.positions_3L, (0, length - len(draft.ids))) for draft in drafts]
    return Batch(
        ids_BL=ids,
        types_BL=feeder.placeholders.types(ids),
        positions_3BL=torch.stack(positions, dim=1),
        tree=drafts[0].stems if shared_prefix else None,
        media=media_of([stretch for draft in drafts for stretch in draft.stretches]),
        ids_N=torch.tensor([token.id for _, token in tokens], dtype=torch.int64),
        source_N=torch.tensor([start + token.source for start, token in tokens], dtype=torch.int64),
        temperature_N=torch.tensor([token.temperature for _, token in tokens]),
        banned=banned.pop(),
    )


class _Learned(NamedTuple):
    """A token to be learned, and the column of its row that predicts it."""

    id: int
    source: int
    temperature: float


class _Exhibit(NamedTuple):
    """A medium of a batch, its grid and its key."""

    ref: MediaRef
    grid: tuple[int, int, int]
    key: str


def _exhibits(prompt: Prompt) -> list[_Exhibit]:
    pairs = zip(prompt.sample.media, prompt.grids, strict=True)
    return [_Exhibit(ref, grid, f"{prompt.digest}:{place}") for place, (ref, grid) in enumerate(pairs)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A prompt or a completion: its tokens, positions from 0 on, and its media."""

    ids: Sequence[int]
    positions_3S: torch.Tensor
    exhibits: Sequence[_Exhibit]
    tensors: Sequence[PromptTensors]

    @staticmethod
    def of_prompt(prompt: Prompt, feeder: Feeder) -> Stretch:
        """Raises UserError where placeholders, grids and patches disagree."""
        tensors = feeder.tensors(prompt)
        check_media(prompt, tensors, feeder.placeholders)
        return Stretch(ids=prompt.ids, positions_3S=tensors.positions_3P, exhibits=_exhibits(prompt), tensors=[tensors])

    @staticmethod
    def of_response(rollout: Rollout, feeder: Feeder) -> Stretch:
        """What there is of a response. Raises as `collate`."""
        _check_completion(rollout, feeder.placeholders)
        who = f"sample {rollout.prompt.sample.id}: what rollout {rollout.index} was shown"
        positions, tensors = [torch.zeros(3, 0, dtype=torch.int64)], []
        after = 0
        for segment in filter(lambda segment: segment.ids, rollout.segments):
            steps_3S = torch.arange(len(segment.ids)).expand(3, -1)
            if segment.view is not None:
                seen = feeder.seen(segment.view)
                check_view(segment, segment.view, seen, feeder.placeholders, who=who)
                tensors.append(seen)
                steps_3S = seen.positions_3P
            positions.append(after + steps_3S)
            after += int(steps_3S.max()) + 1
        return Stretch(
            ids=[token for segment in rollout.segments for token in segment.ids],
            positions_3S=torch.cat(positions, dim=1),
            exhibits=[_Exhibit(view.ref, view.grid, view.digest) for view in rollout.views],
            tensors=tensors,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """A row before padding."""

    ids: list[int]
    positions_3L: torch.Tensor
    stems: tuple[Stem, ...]
    stretches: list[Stretch]
    learned: list[_Learned]

    @staticmethod
    def of(row: Sequence[Sequence[Experience]], feeder: Feeder) -> _Draft:
        ids: list[int] = []
        positions: list[torch.Tensor] = []
        stems: list[Stem] = []
        stretches: list[Stretch] = []
        learned: list[_Learned] = []
        for group in row:
            prompt = Stretch.of_prompt(_shared_prompt(group), feeder)
            completions = [Stretch.of_response(experience.rollout, feeder) for experience in group]
            ids += prompt.ids
            positions.append(prompt.positions_3S)
            last, after = len(ids) - 1, int(prompt.positions_3S.max()) + 1
            for experience, completion in zip(group, completions, strict=True):
                learned += _learned(experience, prompt_end=last, start=len(ids))
                ids += completion.ids
                positions.append(after + completion.positions_3S)
            lengths = (len(completion.ids) for completion in completions)
            stems.append(Stem(len(prompt.ids), tuple(length for length in lengths if length)))
            stretches += [prompt, *completions]
        joined = torch.cat(positions, dim=1)
        return _Draft(ids=ids, positions_3L=joined, stems=tuple(stems), stretches=stretches, learned=learned)


def _learned(experience: Experience, *, prompt_end: int, start: int) -> list[_Learned]:
    """The tokens of a completion that stands from column `start` on; the prompt's last predicts the first of them."""
    columns = iter([prompt_end, *range(start, start + experience.rollout.num_tokens)])
    segments = zip(experience.rollout.segments, _laws(experience.rollout), strict=True)
    return [
        _Learned(token, column, law.divisor)
        for segment, law in segments
        for token, column in zip(segment.ids, columns, strict=False)
        if segment.author in (Author.POLICY, Author.TEACHER)
    ]


def _laws(rollout: Rollout) -> list[SamplingLaw]:
    """The law of each segment."""
    return [segment.law or rollout.law for segment in rollout.segments]


def _check_completion(rollout: Rollout, placeholders: Placeholders) -> None:
    who = f"sample {rollout.prompt.sample.id}: rollout {rollout.index}"
    for segment, law in zip(rollout.segments, _laws(rollout), strict=True):
        if segment.view is None and (stray := {placeholders.image, placeholders.video}.intersection(segment.ids)):
            raise ValueError(f"{who} contains the placeholder {min(stray)}, which stands for no picture or video")
        if segment.author in (Author.POLICY, Author.TEACHER) and (stray := set(law.banned).intersection(segment.ids)):
            raise ValueError(f"{who} contains token {min(stray)}, which its sampling law bans: its probability is 0")


def media_of(stretches: Sequence[Stretch]) -> Media:
    """The media of stretches, in order."""
    exhibits = [exhibit for stretch in stretches for exhibit in stretch.exhibits]
    tensors = [of_one for stretch in stretches for of_one in stretch.tensors]
    image_grids_I3, image_keys = _grids(exhibits, ImageRef)
    video_grids_V3, video_keys = _grids(exhibits, VideoRef)
    return Media(
        images_ND=_joined([of_one.images_ND for of_one in tensors]),
        image_grids_I3=image_grids_I3,
        image_keys=image_keys,
        videos_ND=_joined([of_one.videos_ND for of_one in tensors]),
        video_grids_V3=video_grids_V3,
        video_keys=video_keys,
    )


def _joined(patches: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(patches)) if patches else torch.zeros(0, 0)


def _grids(exhibits: Sequence[_Exhibit], kind: type[ImageRef] | type[VideoRef]) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Grids of the media of one kind, int64 [.., 3], and keys: a prompt's digest and a place, or a view's digest."""
    found = [exhibit for exhibit in exhibits if isinstance(exhibit.ref, kind)]
    grids = torch.tensor([exhibit.grid for exhibit in found], dtype=torch.int64).reshape(-1, 3)
    return grids, tuple(exhibit.key for exhibit in found)


def _shared_prompt(group: Sequence[Experience]) -> Prompt:
    prompt = group[0].rollout.prompt
    if (count := len({experience.rollout.prompt.digest for experience in group})) != 1:
        raise ValueError(f"sample {prompt.sample.id}: siblings must share one prompt, got {count}")
    return prompt


_T = TypeVar("_T", Media, Batch, PromptBatch)


def _moved(batch: _T, device: torch.device) -> _T:
    """A batch on another device; what is no tensor stays."""
    values: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(batch)}
    moved = {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor | Media)}
    return replace(batch, **(values | moved))

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
    MediaObservation,
    MediaRef,
    Prompt,
    Rollout,
    SamplingParams,
    Segment,
    UserError,
    VideoRef,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholders:
    """The token ids that stand for pictures and frames, and how many patches per side one of them stands for."""

    image_id: int
    video_id: int
    merge_size: int

    def token_types(self, ids: torch.Tensor) -> torch.Tensor:
        """What each token stands for: 0 text, 1 a picture, 2 a video; int64 in the shape of `ids`."""
        return (ids == self.image_id).long() + 2 * (ids == self.video_id).long()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTensors:
    """What the model's forward needs of a prompt, or of a view, besides ids; N is 0 where is no picture or video."""

    image_patches_MD: torch.Tensor
    video_patches_MD: torch.Tensor
    position_ids_3P: torch.Tensor
    second_per_grid_V: torch.Tensor  # from one pair of frames to the next; an engine works out positions by itself

    @property
    def nbytes(self) -> int:
        """Memory of all of them."""
        return sum(getattr(self, f.name).nbytes for f in fields(self))


class TensorProvider(Protocol):
    """Gives the tensors of a prompt, and of what tools show."""

    placeholders: Placeholders

    def prompt_tensors(self, prompt: Prompt) -> PromptTensors:
        """Patches and position ids."""

    def tool_media_tensors(self, observation: MediaObservation) -> PromptTensors:
        """Patches, and position ids from 0 on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMedia:
    """The patches of a batch and the grids (t, h, w) that order them, pictures and videos apart; a key per medium."""

    image_patches_MD: torch.Tensor
    image_grids_I3: torch.Tensor
    image_keys: tuple[str, ...]
    video_patches_MD: torch.Tensor
    video_grids_V3: torch.Tensor
    video_keys: tuple[str, ...]

    def to(self, device: torch.device) -> BatchMedia:
        """The same on another device."""
        return _to_device(self, device)


class PrefixGroup(NamedTuple):
    """Lengths, in tokens, of a prompt and of the completions that follow it in a row."""

    prompt_length: int
    completion_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tensors of one forward pass; those in N have one entry per token of the policy's or a teacher's."""

    input_ids_BL: torch.Tensor
    token_types_BL: torch.Tensor  # see `Placeholders.types`
    position_ids_3BL: torch.Tensor
    prefix_tree: tuple[PrefixGroup, ...] | None  # how the one row is packed; None where rows are ordinary sequences
    media: BatchMedia
    target_ids_N: torch.Tensor
    predictor_index_N: torch.Tensor  # which place of `ids_BL`, flattened, predicts a token
    temperature_N: torch.Tensor  # of the law that a token was drawn from
    banned_token_ids: tuple[int, ...]

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return _to_device(self, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Prompts, or responses, alone, padded on the left. `keep_BP` is 1 where there is no padding."""

    input_ids_BP: torch.Tensor
    token_types_BP: torch.Tensor
    attention_mask_BP: torch.Tensor
    position_ids_3BP: torch.Tensor
    media: BatchMedia

    def to(self, device: torch.device) -> PromptBatch:
        """The same batch on another device."""
        return _to_device(self, device)


def check_prompt_media(prompt: Prompt, tensors: PromptTensors, placeholders: Placeholders) -> None:
    """Hold placeholders, grids and patches of a prompt against each other: in the processor, and wherever it is used.

    Raises:
        UserError: they disagree; it names the sample.
    """
    _check_placeholders(
        prompt.token_ids, _prompt_media_items(prompt), tensors, placeholders, owner=f"sample {prompt.sample.id}"
    )


def check_observation(
    segment: Segment, observation: MediaObservation, tensors: PromptTensors, placeholders: Placeholders, *, owner: str
) -> None:
    """The same for a segment that shows a medium; the error begins with `who`."""
    _check_placeholders(
        segment.token_ids,
        [_MediaItem(observation.ref, observation.grid, observation.digest)],
        tensors,
        placeholders,
        owner=owner,
    )


def _check_placeholders(
    ids: Sequence[int],
    media_items: Sequence[_MediaItem],
    tensors: PromptTensors,
    placeholders: Placeholders,
    *,
    owner: str,
) -> None:
    for what, kind, patches, token in (
        ("picture", ImageRef, len(tensors.image_patches_MD), placeholders.image_id),
        ("video", VideoRef, len(tensors.video_patches_MD), placeholders.video_id),
    ):
        called = sum(prod(exhibit.grid) for exhibit in media_items if isinstance(exhibit.ref, kind))
        tokens = ids.count(token)
        if not called == patches == tokens * placeholders.merge_size**2:
            raise UserError(
                f"{owner}: the {what} grids call for {called} patches, there are {patches}, "
                f"and {tokens} placeholders stand for {tokens * placeholders.merge_size**2}"
            )
    if tensors.position_ids_3P.shape != (3, len(ids)):
        raise UserError(f"{owner}: {len(ids)} tokens, positions {list(tensors.position_ids_3P.shape)}")


def collate_prompts(prompts: Sequence[Prompt], provider: TensorProvider, *, pad_id: int) -> PromptBatch:
    """Pack prompts into tensors.

    Raises:
        UserError: placeholders, grids and patches of a prompt disagree.
    """
    return _pad_left([TokenSpan.from_prompt(prompt, provider) for prompt in prompts], provider, pad_id)


def collate_responses(rollouts: Sequence[Rollout], provider: TensorProvider, *, pad_id: int) -> PromptBatch:
    """What there is of responses, without their prompts; positions count from the first token of each.

    Raises:
        ValueError, UserError: as `collate`.
    """
    return _pad_left([TokenSpan.from_response(rollout, provider) for rollout in rollouts], provider, pad_id)


def _pad_left(spans: Sequence[TokenSpan], provider: TensorProvider, pad_id: int) -> PromptBatch:
    shape = (len(spans), max(len(stretch.ids) for stretch in spans))
    ids, keep = torch.full(shape, pad_id), torch.zeros(shape, dtype=torch.int64)
    positions = torch.zeros(3, *shape, dtype=torch.int64)
    for b, stretch in enumerate(spans):
        start = shape[1] - len(stretch.ids)
        ids[b, start:], keep[b, start:] = torch.tensor(stretch.ids, dtype=torch.int64), 1
        positions[:, b, start:] = stretch.position_ids_3S
    types = provider.placeholders.token_types(ids)
    return PromptBatch(
        input_ids_BP=ids,
        token_types_BP=types,
        attention_mask_BP=keep,
        position_ids_3BP=positions,
        media=collect_media(spans),
    )


def group_by_prompt(experiences: Iterable[Experience]) -> list[list[Experience]]:
    """Experiences in groups of one prompt each, in order of first appearance."""
    groups: dict[str, list[Experience]] = {}
    for experience in experiences:
        groups.setdefault(experience.rollout.prompt.digest, []).append(experience)
    return list(groups.values())


def collate(
    groups: Sequence[Sequence[Experience]], provider: TensorProvider, *, pad_id: int, shared_prefix: bool = True
) -> Batch:
    """Groups as one packed row; or, without a shared prefix, every experience as an ordinary row, padded on the right.

    Raises:
        UserError: placeholders, grids and patches of a prompt, or of what a tool showed, disagree.
        ValueError: siblings differ in their prompt, or laws in what they ban; a completion contains a placeholder that
            no tool showed, or the policy's or a teacher's part of one a token that its law forbids.
    """
    banned = {
        law.banned_token_ids
        for group in groups
        for experience in group
        for law in _segment_sampling_params(experience.rollout)
    }
    if len(banned) != 1:
        raise ValueError(f"all laws of a batch ban the same tokens, got {len(banned)} sets")
    rows = [groups] if shared_prefix else [[[experience]] for group in groups for experience in group]
    drafts = [_PackedRow.from_groups(row, provider) for row in rows]
    length = max(len(draft.ids) for draft in drafts)
    tokens = [(b * length, token) for b, draft in enumerate(drafts) for token in draft.trained_tokens]
    ids = torch.tensor([draft.ids + [pad_id] * (length - len(draft.ids)) for draft in drafts])
    positions = [F.pad(draft.position_ids_3L, (0, length - len(draft.ids))) for draft in drafts]
    return Batch(
        input_ids_BL=ids,
        token_types_BL=provider.placeholders.token_types(ids),
        position_ids_3BL=torch.stack(positions, dim=1),
        prefix_tree=drafts[0].prefix_groups if shared_prefix else None,
        media=collect_media([stretch for draft in drafts for stretch in draft.spans]),
        target_ids_N=torch.tensor([token.id for _, token in tokens], dtype=torch.int64),
        predictor_index_N=torch.tensor([start + token.predictor_index for start, token in tokens], dtype=torch.int64),
        temperature_N=torch.tensor([token.temperature for _, token in tokens]),
        banned_token_ids=banned.pop(),
    )


class _TrainedToken(NamedTuple):
    """A token to be learned, and the column of its row that predicts it."""

    id: int
    predictor_index: int
    temperature: float


class _MediaItem(NamedTuple):
    """A medium of a batch, its grid and its key."""

    ref: MediaRef
    grid: tuple[int, int, int]
    key: str


def _prompt_media_items(prompt: Prompt) -> list[_MediaItem]:
    pairs = zip(prompt.sample.media, prompt.grids, strict=True)
    return [_MediaItem(ref, grid, f"{prompt.digest}:{place}") for place, (ref, grid) in enumerate(pairs)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """A prompt or a completion: its tokens, positions from 0 on, and its media."""

    ids: Sequence[int]
    position_ids_3S: torch.Tensor
    media_items: Sequence[_MediaItem]
    tensors: Sequence[PromptTensors]

    @staticmethod
    def from_prompt(prompt: Prompt, provider: TensorProvider) -> TokenSpan:
        """Raises UserError where placeholders, grids and patches disagree."""
        tensors = provider.prompt_tensors(prompt)
        check_prompt_media(prompt, tensors, provider.placeholders)
        return TokenSpan(
            ids=prompt.token_ids,
            position_ids_3S=tensors.position_ids_3P,
            media_items=_prompt_media_items(prompt),
            tensors=[tensors],
        )

    @staticmethod
    def from_response(rollout: Rollout, provider: TensorProvider) -> TokenSpan:
        """What there is of a response. Raises as `collate`."""
        _check_completion(rollout, provider.placeholders)
        who = f"sample {rollout.prompt.sample.id}: what rollout {rollout.index} was shown"
        positions, tensors = [torch.zeros(3, 0, dtype=torch.int64)], []
        after = 0
        for segment in filter(lambda segment: segment.token_ids, rollout.segments):
            steps_3S = torch.arange(len(segment.token_ids)).expand(3, -1)
            if segment.observation is not None:
                seen = provider.tool_media_tensors(segment.observation)
                check_observation(segment, segment.observation, seen, provider.placeholders, owner=who)
                tensors.append(seen)
                steps_3S = seen.position_ids_3P
            positions.append(after + steps_3S)
            after += int(steps_3S.max()) + 1
        return TokenSpan(
            ids=[token for segment in rollout.segments for token in segment.token_ids],
            position_ids_3S=torch.cat(positions, dim=1),
            media_items=[_MediaItem(view.ref, view.grid, view.digest) for view in rollout.observations],
            tensors=tensors,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackedRow:
    """A row before padding."""

    ids: list[int]
    position_ids_3L: torch.Tensor
    prefix_groups: tuple[PrefixGroup, ...]
    spans: list[TokenSpan]
    trained_tokens: list[_TrainedToken]

    @staticmethod
    def from_groups(groups: Sequence[Sequence[Experience]], provider: TensorProvider) -> _PackedRow:
        ids: list[int] = []
        positions: list[torch.Tensor] = []
        stems: list[PrefixGroup] = []
        stretches: list[TokenSpan] = []
        learned: list[_TrainedToken] = []
        for group in groups:
            prompt = TokenSpan.from_prompt(_shared_prompt(group), provider)
            completions = [TokenSpan.from_response(experience.rollout, provider) for experience in group]
            ids += prompt.ids
            positions.append(prompt.position_ids_3S)
            last, after = len(ids) - 1, int(prompt.position_ids_3S.max()) + 1
            for experience, completion in zip(group, completions, strict=True):
                learned += _trained_tokens(experience, last_prompt_column=last, first_column=len(ids))
                ids += completion.ids
                positions.append(after + completion.position_ids_3S)
            lengths = (len(completion.ids) for completion in completions)
            stems.append(PrefixGroup(len(prompt.ids), tuple(length for length in lengths if length)))
            stretches += [prompt, *completions]
        joined = torch.cat(positions, dim=1)
        return _PackedRow(
            ids=ids, position_ids_3L=joined, prefix_groups=tuple(stems), spans=stretches, trained_tokens=learned
        )


def _trained_tokens(experience: Experience, *, last_prompt_column: int, first_column: int) -> list[_TrainedToken]:
    """The tokens of a completion that stands from column `start` on; the prompt's last predicts the first of them."""
    columns = iter([last_prompt_column, *range(first_column, first_column + experience.rollout.num_tokens)])
    segments = zip(experience.rollout.segments, _segment_sampling_params(experience.rollout), strict=True)
    return [
        _TrainedToken(token, column, law.effective_temperature)
        for segment, law in segments
        for token, column in zip(segment.token_ids, columns, strict=False)
        if segment.author in (Author.POLICY, Author.DEMONSTRATION)
    ]


def _segment_sampling_params(rollout: Rollout) -> list[SamplingParams]:
    """The law of each segment."""
    return [segment.sampling_params or rollout.sampling_params for segment in rollout.segments]


def _check_completion(rollout: Rollout, placeholders: Placeholders) -> None:
    who = f"sample {rollout.prompt.sample.id}: rollout {rollout.index}"
    for segment, law in zip(rollout.segments, _segment_sampling_params(rollout), strict=True):
        if segment.observation is None and (
            stray := {placeholders.image_id, placeholders.video_id}.intersection(segment.token_ids)
        ):
            raise ValueError(f"{who} contains the placeholder {min(stray)}, which stands for no picture or video")
        if segment.author in (Author.POLICY, Author.DEMONSTRATION) and (
            stray := set(law.banned_token_ids).intersection(segment.token_ids)
        ):
            raise ValueError(f"{who} contains token {min(stray)}, which its sampling law bans: its probability is 0")


def collect_media(spans: Sequence[TokenSpan]) -> BatchMedia:
    """The media of stretches, in order."""
    exhibits = [exhibit for stretch in spans for exhibit in stretch.media_items]
    tensors = [of_one for stretch in spans for of_one in stretch.tensors]
    image_grids_I3, image_keys = _grids_and_keys(exhibits, ImageRef)
    video_grids_V3, video_keys = _grids_and_keys(exhibits, VideoRef)
    return BatchMedia(
        image_patches_MD=_concat_patches([of_one.image_patches_MD for of_one in tensors]),
        image_grids_I3=image_grids_I3,
        image_keys=image_keys,
        video_patches_MD=_concat_patches([of_one.video_patches_MD for of_one in tensors]),
        video_grids_V3=video_grids_V3,
        video_keys=video_keys,
    )


def _concat_patches(patches: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(patches)) if patches else torch.zeros(0, 0)


def _grids_and_keys(
    media_items: Sequence[_MediaItem], ref_type: type[ImageRef] | type[VideoRef]
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Grids of the media of one kind, int64 [.., 3], and keys: a prompt's digest and a place, or a view's digest."""
    found = [exhibit for exhibit in media_items if isinstance(exhibit.ref, ref_type)]
    grids = torch.tensor([exhibit.grid for exhibit in found], dtype=torch.int64).reshape(-1, 3)
    return grids, tuple(exhibit.key for exhibit in found)


def _shared_prompt(group: Sequence[Experience]) -> Prompt:
    prompt = group[0].rollout.prompt
    if (count := len({experience.rollout.prompt.digest for experience in group})) != 1:
        raise ValueError(f"sample {prompt.sample.id}: siblings must share one prompt, got {count}")
    return prompt


_T = TypeVar("_T", BatchMedia, Batch, PromptBatch)


def _to_device(batch: _T, device: torch.device) -> _T:
    """A batch on another device; what is no tensor stays."""
    values: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(batch)}
    moved = {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor | BatchMedia)}
    return replace(batch, **(values | moved))

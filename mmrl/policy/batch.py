"""Experiences to tensors: the only place that packs or pads.

The learner's batch is one row that holds each prompt once, before all of its completions, and no padding:

    prompt | first | second second second | prompt' prompt' | first' first' ...

A completion attends to its prompt and itself, and its positions go on from the prompt's. It may contain images and
videos that tools showed: patches come in the order of placeholders in the row. The plain layout, one padded row for
each completion, must give the same log-probs and gradients.

Suffixes of tensor names: B rows, L columns, P prompt columns, S tokens of a span, N trained tokens, M patches, D values
of a patch, I images, V videos. Position ids have 3 axes: time, height, width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import functional as F

from mmrl.policy.prompt_tensors import (
    MediaItem,
    Placeholders,
    PromptTensors,
    TensorProvider,
    check_observation,
    check_prompt_media,
    prompt_media_items,
)
from mmrl.types import Author, Experience, ImageRef, Prompt, Rollout, SamplingParams, VideoRef

_TRAINED_AUTHORS = (Author.POLICY, Author.DEMONSTRATION)


class PrefixGroup(NamedTuple):
    """Lengths, in tokens, of a prompt and of the completions that follow it in a packed row."""

    prompt_length: int
    completion_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMedia:
    """Images and videos of a batch, each in the order of their placeholders."""

    image_patches_MD: torch.Tensor
    """Patches of all images, float32."""
    image_grids_I3: torch.Tensor
    """Time, height and width of each image in patches, int64."""
    image_keys: tuple[str, ...]
    """Name of each image's content, for a cache."""
    video_patches_MD: torch.Tensor
    """Patches of all videos, float32."""
    video_grids_V3: torch.Tensor
    """Time (pairs of frames), height and width of each video in patches, int64."""
    video_keys: tuple[str, ...]
    """Name of each video's content, for a cache."""

    def to(self, device: torch.device) -> BatchMedia:
        """Return a copy on another device."""
        return _to_device(self, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tensors of one forward pass of the learner."""

    input_ids_BL: torch.Tensor
    """Token ids, int64."""
    token_types_BL: torch.Tensor
    """0 for text, 1 for an image, 2 for a video, int64."""
    position_ids_3BL: torch.Tensor
    """Position ids, int64."""
    prefix_tree: tuple[PrefixGroup, ...] | None
    """Lengths of the prompts and completions in the one row; None where rows are ordinary sequences."""
    media: BatchMedia
    target_ids_N: torch.Tensor
    """Ids of the trained tokens, sampled or demonstrated, int64."""
    predictor_index_N: torch.Tensor
    """Index in the flattened `input_ids_BL` of the token that predicts each of them, int64."""
    temperature_N: torch.Tensor
    """Temperature that each of them was sampled at, above 0, float32."""
    banned_token_ids: tuple[int, ...]
    """Tokens with probability 0."""

    def to(self, device: torch.device) -> Batch:
        """Return a copy on another device."""
        return _to_device(self, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Tensors of prompts, or of responses without their prompts, padded on the left."""

    input_ids_BP: torch.Tensor
    """Token ids, int64."""
    token_types_BP: torch.Tensor
    """0 for text, 1 for an image, 2 for a video, int64."""
    attention_mask_BP: torch.Tensor
    """1 for tokens, 0 for padding, int64."""
    position_ids_3BP: torch.Tensor
    """Position ids, int64; 0 for padding."""
    media: BatchMedia

    def to(self, device: torch.device) -> PromptBatch:
        """Return a copy on another device."""
        return _to_device(self, device)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """A prompt or a response before it is packed."""

    ids: Sequence[int]
    position_ids_3S: torch.Tensor
    """Position ids that count from 0, int64."""
    media_items: Sequence[MediaItem]
    tensors: Sequence[PromptTensors]
    """Tensors of the prompt, or of each image and video that a tool showed."""

    @staticmethod
    def from_prompt(prompt: Prompt, provider: TensorProvider) -> TokenSpan:
        """Return the span of a prompt.

        Raises:
            UserError: its placeholders, grids and patches disagree.
        """
        tensors = provider.prompt_tensors(prompt)
        check_prompt_media(prompt, tensors, provider.placeholders)
        return TokenSpan(
            ids=prompt.token_ids,
            position_ids_3S=tensors.position_ids_3P,
            media_items=prompt_media_items(prompt),
            tensors=[tensors],
        )

    @staticmethod
    def from_response(rollout: Rollout, provider: TensorProvider) -> TokenSpan:
        """Return the span of the tokens of a response so far.

        Raises:
            UserError: placeholders, grids and patches of what a tool showed disagree.
            ValueError: it contains a placeholder that no tool showed, or a trained token that is banned.
        """
        _check_completion(rollout, provider.placeholders)
        owner = f"sample {rollout.prompt.sample.id}: what rollout {rollout.index} was shown"
        ids: list[int] = []
        positions, tensors = [torch.zeros(3, 0, dtype=torch.int64)], []
        next_position = 0
        for segment in rollout.segments:
            if not segment.token_ids:
                continue
            ids += segment.token_ids
            steps_3S = torch.arange(len(segment.token_ids)).expand(3, -1)
            if segment.observation is not None:
                shown = provider.tool_media_tensors(segment.observation)
                check_observation(segment, segment.observation, shown, provider.placeholders, owner=owner)
                tensors.append(shown)
                steps_3S = shown.position_ids_3P
            positions.append(next_position + steps_3S)
            next_position += int(steps_3S.max()) + 1
        return TokenSpan(
            ids=ids,
            position_ids_3S=torch.cat(positions, dim=1),
            media_items=[MediaItem(shown.ref, shown.grid, shown.digest) for shown in rollout.observations],
            tensors=tensors,
        )


class _TrainedToken(NamedTuple):
    """A token to score, and the column of its row that predicts it."""

    id: int
    predictor_column: int
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackedRow:
    """A row of a batch before padding."""

    ids: list[int]
    position_ids_3L: torch.Tensor
    prefix_groups: tuple[PrefixGroup, ...]
    spans: list[TokenSpan]
    trained_tokens: list[_TrainedToken]


def group_by_prompt(experiences: Iterable[Experience]) -> list[list[Experience]]:
    """Return experiences in groups of one prompt each, in order of first appearance."""
    groups: dict[str, list[Experience]] = {}
    for experience in experiences:
        groups.setdefault(experience.rollout.prompt.digest, []).append(experience)
    return list(groups.values())


def collate(
    groups: Sequence[Sequence[Experience]], provider: TensorProvider, *, pad_id: int, shared_prefix: bool = True
) -> Batch:
    """Pack groups into tensors.

    Args:
        groups: experiences; those of a group have one prompt.
        provider: provides patches and position ids.
        pad_id: token id of padding.
        shared_prefix: pack all groups into one row, each prompt once. Otherwise every experience is a row of its own,
            padded on the right.

    Raises:
        UserError: placeholders, grids and patches of a prompt, or of what a tool showed, disagree.
        ValueError: experiences of a group differ in their prompt, or rollouts in their banned tokens; a completion
            contains a placeholder that no tool showed, or a trained token that is banned.
    """
    banned_token_ids = _shared_banned_ids(groups)
    if shared_prefix:
        rows = [_pack_row(groups, provider)]
    else:
        rows = []
        for group in groups:
            for experience in group:
                rows.append(_pack_row([[experience]], provider))
    length = max(len(row.ids) for row in rows)
    ids, positions, spans = [], [], []
    targets, predictor_index, temperatures = [], [], []
    for row_index, row in enumerate(rows):
        padding = length - len(row.ids)
        ids.append(row.ids + [pad_id] * padding)
        positions.append(F.pad(row.position_ids_3L, (0, padding)))
        spans += row.spans
        for token in row.trained_tokens:
            targets.append(token.id)
            predictor_index.append(row_index * length + token.predictor_column)
            temperatures.append(token.temperature)
    input_ids_BL = torch.tensor(ids)
    return Batch(
        input_ids_BL=input_ids_BL,
        token_types_BL=provider.placeholders.token_types(input_ids_BL),
        position_ids_3BL=torch.stack(positions, dim=1),
        prefix_tree=rows[0].prefix_groups if shared_prefix else None,
        media=collect_media(spans),
        target_ids_N=torch.tensor(targets, dtype=torch.int64),
        predictor_index_N=torch.tensor(predictor_index, dtype=torch.int64),
        temperature_N=torch.tensor(temperatures),
        banned_token_ids=banned_token_ids,
    )


def collate_prompts(prompts: Sequence[Prompt], provider: TensorProvider, *, pad_id: int) -> PromptBatch:
    """Pack prompts into tensors, padded on the left.

    Raises:
        UserError: placeholders, grids and patches of a prompt disagree.
    """
    return _pad_left([TokenSpan.from_prompt(prompt, provider) for prompt in prompts], provider, pad_id)


def collate_responses(rollouts: Sequence[Rollout], provider: TensorProvider, *, pad_id: int) -> PromptBatch:
    """Pack responses so far, without their prompts, padded on the left; positions count from the first token of each.

    Raises:
        UserError: placeholders, grids and patches of what a tool showed disagree.
        ValueError: a response contains a placeholder that no tool showed, or a trained token that is banned.
    """
    return _pad_left([TokenSpan.from_response(rollout, provider) for rollout in rollouts], provider, pad_id)


def collect_media(spans: Sequence[TokenSpan]) -> BatchMedia:
    """Return the images and videos of spans, in order."""
    items: list[MediaItem] = []
    tensors: list[PromptTensors] = []
    for span in spans:
        items += span.media_items
        tensors += span.tensors
    images = [item for item in items if isinstance(item.ref, ImageRef)]
    videos = [item for item in items if isinstance(item.ref, VideoRef)]
    return BatchMedia(
        image_patches_MD=_concat_patches([own.image_patches_MD for own in tensors]),
        image_grids_I3=_stack_grids(images),
        image_keys=tuple(item.key for item in images),
        video_patches_MD=_concat_patches([own.video_patches_MD for own in tensors]),
        video_grids_V3=_stack_grids(videos),
        video_keys=tuple(item.key for item in videos),
    )


def _check_completion(rollout: Rollout, placeholders: Placeholders) -> None:
    owner = f"sample {rollout.prompt.sample.id}: rollout {rollout.index}"
    placeholder_ids = {placeholders.image_id, placeholders.video_id}
    for segment, params in zip(rollout.segments, _segment_sampling_params(rollout), strict=True):
        stray = placeholder_ids.intersection(segment.token_ids)
        if stray and segment.observation is None:
            raise ValueError(f"{owner} contains the placeholder {min(stray)}, which stands for no image or video")
        banned = set(params.banned_token_ids).intersection(segment.token_ids)
        # A log-probability of -inf would make the loss NaN.
        if banned and segment.author in _TRAINED_AUTHORS:
            raise ValueError(f"{owner} contains token {min(banned)}, which its sampling params ban")


def _pad_left(spans: Sequence[TokenSpan], provider: TensorProvider, pad_id: int) -> PromptBatch:
    shape = (len(spans), max(len(span.ids) for span in spans))
    input_ids_BP, attention_mask_BP = torch.full(shape, pad_id), torch.zeros(shape, dtype=torch.int64)
    position_ids_3BP = torch.zeros(3, *shape, dtype=torch.int64)
    for row, span in enumerate(spans):
        start = shape[1] - len(span.ids)
        input_ids_BP[row, start:] = torch.tensor(span.ids, dtype=torch.int64)
        attention_mask_BP[row, start:] = 1
        position_ids_3BP[:, row, start:] = span.position_ids_3S
    return PromptBatch(
        input_ids_BP=input_ids_BP,
        token_types_BP=provider.placeholders.token_types(input_ids_BP),
        attention_mask_BP=attention_mask_BP,
        position_ids_3BP=position_ids_3BP,
        media=collect_media(spans),
    )


def _pack_row(groups: Sequence[Sequence[Experience]], provider: TensorProvider) -> _PackedRow:
    """Return one row that holds the prompt of each group once, before its completions."""
    ids: list[int] = []
    positions: list[torch.Tensor] = []
    prefix_groups: list[PrefixGroup] = []
    spans: list[TokenSpan] = []
    trained_tokens: list[_TrainedToken] = []
    for group in groups:
        prompt = TokenSpan.from_prompt(_shared_prompt(group), provider)
        completions = [TokenSpan.from_response(experience.rollout, provider) for experience in group]
        ids += prompt.ids
        positions.append(prompt.position_ids_3S)
        last_prompt_column, next_position = len(ids) - 1, int(prompt.position_ids_3S.max()) + 1
        for experience, completion in zip(group, completions, strict=True):
            trained_tokens += _trained_tokens(
                experience.rollout, last_prompt_column=last_prompt_column, first_column=len(ids)
            )
            ids += completion.ids
            positions.append(next_position + completion.position_ids_3S)
        # A completion without tokens takes no place, and the attention kernel refuses blocks of length 0.
        lengths = tuple(len(completion.ids) for completion in completions if completion.ids)
        prefix_groups.append(PrefixGroup(len(prompt.ids), lengths))
        spans += [prompt, *completions]
    return _PackedRow(
        ids=ids,
        position_ids_3L=torch.cat(positions, dim=1),
        prefix_groups=tuple(prefix_groups),
        spans=spans,
        trained_tokens=trained_tokens,
    )


def _trained_tokens(rollout: Rollout, *, last_prompt_column: int, first_column: int) -> list[_TrainedToken]:
    """Return the trained tokens of a completion that begins at `first_column` of its row."""
    tokens = []
    # The prompt's last token predicts the first of every completion, though it does not stand before all of them.
    predictor = last_prompt_column
    column = first_column
    for segment, params in zip(rollout.segments, _segment_sampling_params(rollout), strict=True):
        for token_id in segment.token_ids:
            if segment.author in _TRAINED_AUTHORS:
                tokens.append(_TrainedToken(token_id, predictor, params.effective_temperature))
            predictor = column
            column += 1
    return tokens


def _segment_sampling_params(rollout: Rollout) -> list[SamplingParams]:
    """Return the sampling params of each segment: its own, else the rollout's."""
    return [segment.sampling_params or rollout.sampling_params for segment in rollout.segments]


def _shared_banned_ids(groups: Sequence[Sequence[Experience]]) -> tuple[int, ...]:
    banned_sets = set()
    for group in groups:
        for experience in group:
            for params in _segment_sampling_params(experience.rollout):
                banned_sets.add(params.banned_token_ids)
    # The output layer masks one set of tokens for all rows of a batch.
    if len(banned_sets) != 1:
        raise ValueError(f"all rollouts of a batch must ban the same tokens, got {len(banned_sets)} sets")
    return banned_sets.pop()


def _shared_prompt(group: Sequence[Experience]) -> Prompt:
    prompt = group[0].rollout.prompt
    count = len({experience.rollout.prompt.digest for experience in group})
    if count != 1:
        raise ValueError(f"sample {prompt.sample.id}: siblings must share one prompt, got {count}")
    return prompt


def _concat_patches(patches: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all patches in one tensor, float32 [M, D]; [0, 0] if no tensors are given."""
    return torch.cat(list(patches)) if patches else torch.zeros(0, 0)


def _stack_grids(items: Sequence[MediaItem]) -> torch.Tensor:
    """Return the grids of images or videos, int64 [items, 3]."""
    return torch.tensor([item.grid for item in items], dtype=torch.int64).reshape(-1, 3)


_BatchT = TypeVar("_BatchT", BatchMedia, Batch, PromptBatch)


def _to_device(batch: _BatchT, device: torch.device) -> _BatchT:
    """Return a copy of a batch with all its tensors on another device."""
    moved: dict[str, Any] = {}
    for batch_field in fields(batch):
        value = getattr(batch, batch_field.name)
        if isinstance(value, torch.Tensor | BatchMedia):
            moved[batch_field.name] = value.to(device)
    return replace(batch, **moved)

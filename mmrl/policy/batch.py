"""Packs and pads: experiences become the tensors of a forward pass.

The learner's batch is one row without padding, which holds each prompt once, followed by all of its responses. For a
prompt `a b` with the responses `c` and `d e`, and a prompt `f` with the response `g`:

    input_ids           a b | c | d e | f | g
    position_ids        0 1 | 2 | 2 3 | 0 | 1    each response continues from its prompt
    target_ids          c d e g
    predictor_index     1 1 3 5                  places in the row of the tokens that predict them: b b d f

A response attends to its prompt and itself. It may contain images and videos that tools showed; patches come in the
order of placeholders in the row. The plain layout, one padded row for each response, must give the same log-probs and
gradients.

Suffixes of tensor names, one letter an axis, here and in the files that refer to this list:

    N   trained tokens of a batch, or of a `TokenTable`, which has a row for each
    S   tokens of one prompt or response; in a loss, tokens of a response that the policy sampled
    B   rows, L their columns, T all their tokens, B x L
    P   tokens of a prompt, or columns of prompts or responses padded on the left
    C   tokens of a chunk, R rows of a cache or to sample from, V tokens of the vocabulary, W hidden channels
    X   layers with experts, K experts of a token
    M   patches, D values of a patch, I images; V is videos in `video_grids_V3` and `second_per_grid_V`
    3   axes of a position or of a grid: time, height, width
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch.nn import functional as F

from mmrl.policy.expert_routing import RoutePiece, place_routes
from mmrl.types import (
    TRAINED_AUTHORS,
    Experience,
    ImageRef,
    MediaRef,
    Prompt,
    Rollout,
    Segment,
    UserError,
    VideoRef,
)
from mmrl.utils.torch_transfer import send

if TYPE_CHECKING:
    from mmrl.policy.processor import PromptProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholders:
    """Ids of the tokens that mark the places of images and videos in a prompt."""

    image_id: int
    video_id: int
    merge_size: int  # patches per side of one placeholder: 2 in Qwen-VL, so a token is 2 x 2 patches

    def token_types(self, ids: torch.Tensor) -> torch.Tensor:
        """Return 0 for text, 1 for an image and 2 for a video, for each token id; int64 in the shape of `ids`."""
        return (ids == self.image_id).long() + 2 * (ids == self.video_id).long()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTensors:
    """Tensors that the forward pass needs for a prompt, or for a tool's image or video, in addition to token ids.

    M and V are 0 without images or videos.
    """

    image_patches_MD: torch.Tensor  # normalised patches of all images in reading order, float32
    video_patches_MD: torch.Tensor  # normalised patches of all videos in reading order, float32
    position_ids_3P: torch.Tensor  # position ids of the tokens, int64
    # Seconds from one pair of frames to the next, float32; for vLLM, which computes position ids itself.
    second_per_grid_V: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, in bytes."""
        patches = self.image_patches_MD.nbytes + self.video_patches_MD.nbytes
        return patches + self.position_ids_3P.nbytes + self.second_per_grid_V.nbytes


class MediaItem(NamedTuple):
    """An image or video of a prompt or response."""

    ref: MediaRef
    grid: tuple[int, int, int]  # time, height and width in patches
    key: str  # identifies its content in a cache


class PackedGroup(NamedTuple):
    """Lengths, in tokens, of a prompt and of the responses that follow it in a packed row."""

    prompt_length: int
    response_lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTensors:
    """Tensors that move to another device together."""

    def to(self, device: torch.device) -> Self:
        """Return a copy with all tensors on another device."""
        moved: dict[str, Any] = {}
        for own_field in fields(self):
            value = getattr(self, own_field.name)
            if isinstance(value, torch.Tensor):
                moved[own_field.name] = send(value, device)
            elif isinstance(value, DeviceTensors):
                moved[own_field.name] = value.to(device)
        return replace(self, **moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMedia(DeviceTensors):
    """Images and videos of a batch, each in the order of their placeholders. Grids stay in CPU memory."""

    image_patches_MD: torch.Tensor  # patches of all images, float32
    image_grids_I3: torch.Tensor  # time, height and width of each image in patches, int64
    image_keys: tuple[str, ...]  # cache key of each image's content
    video_patches_MD: torch.Tensor  # patches of all videos, float32
    video_grids_V3: torch.Tensor  # time (pairs of frames), height and width of each video in patches, int64
    video_keys: tuple[str, ...]  # cache key of each video's content

    def to(self, device: torch.device) -> BatchMedia:
        """Return a copy with the patches on another device."""
        # Grids stay: the CPU cuts patches and features by them, and would wait for the device to read them back.
        images, videos = send(self.image_patches_MD, device), send(self.video_patches_MD, device)
        return replace(self, image_patches_MD=images, video_patches_MD=videos)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(DeviceTensors):
    """Tensors of one forward pass of the learner."""

    input_ids_BL: torch.Tensor  # token ids, int64
    token_types_BL: torch.Tensor  # 0 for text, 1 for an image, 2 for a video, int64
    position_ids_3BL: torch.Tensor  # position ids, int64
    # Lengths of the prompts and responses in the one row; None where rows are ordinary sequences.
    packed_groups: tuple[PackedGroup, ...] | None
    media: BatchMedia
    target_ids_N: torch.Tensor  # ids of the trained tokens, sampled or demonstrated, int64
    predictor_index_N: torch.Tensor  # index in the flattened `input_ids_BL` of the token that predicts each, int64
    temperature_N: torch.Tensor  # temperature that each of them was sampled at, above 0, float32
    banned_token_ids: tuple[int, ...]  # tokens with probability 0
    # Experts that the rollout engine sent each token of the flattened rows to, int16; `UNKNOWN_EXPERT` for tokens
    # without routes. None if no token has any.
    engine_routes_XTK: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftPaddedBatch(DeviceTensors):
    """Tensors of prompts, or of responses without their prompts, padded on the left."""

    input_ids_BP: torch.Tensor  # token ids, int64
    token_types_BP: torch.Tensor  # 0 for text, 1 for an image, 2 for a video, int64
    attention_mask_BP: torch.Tensor  # 1 for tokens, 0 for padding, int64
    position_ids_3BP: torch.Tensor  # position ids, int64; 0 for padding
    media: BatchMedia


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """A prompt or a response before it is packed."""

    ids: Sequence[int]
    position_ids_3S: torch.Tensor  # position ids that count from 0, int64
    media_items: Sequence[MediaItem]
    tensors: Sequence[PromptTensors]  # tensors of the prompt, or of each image and video that a tool showed
    routes: Sequence[RoutePiece] = ()  # routes of a response, with columns that count from its first token

    @staticmethod
    def from_prompt(prompt: Prompt, processor: PromptProcessor) -> TokenSpan:
        """Return the span of a prompt.

        Raises:
            UserError: its placeholders, grids and patches disagree.
        """
        items, tensors = prompt_media_items(prompt), processor.prompt_tensors(prompt)
        # Checked at encoding too, but a prompt may come from a checkpoint while its tensors are encoded again.
        check_placeholders(prompt.token_ids, items, tensors, processor.placeholders, owner=f"sample {prompt.sample.id}")
        return TokenSpan(
            ids=prompt.token_ids, position_ids_3S=tensors.position_ids_3P, media_items=items, tensors=[tensors]
        )

    @staticmethod
    def from_response(rollout: Rollout, processor: PromptProcessor) -> TokenSpan:
        """Return the span of the tokens of a response so far.

        Raises:
            UserError: placeholders, grids and patches of what a tool showed disagree.
            ValueError: it contains a placeholder that no tool showed, or a trained token that is banned.
        """
        placeholders = processor.placeholders
        ids: list[int] = []
        items, tensors = [], []
        routes: list[RoutePiece] = []
        positions = [torch.zeros(3, 0, dtype=torch.int64)]  # an empty first piece, for responses without tokens
        next_position = 0
        for segment in rollout.segments:
            if not segment.token_ids:
                continue
            _check_tokens(segment, rollout, placeholders)
            if segment.routes is not None:
                routes.append(RoutePiece(len(ids), len(segment.token_ids), segment.routes))
            ids += segment.token_ids
            steps_3S = torch.arange(len(segment.token_ids)).expand(3, -1)
            if segment.observation is not None:
                shown = processor.tool_media_tensors(segment.observation)
                item = MediaItem(segment.observation.ref, segment.observation.grid, segment.observation.digest)
                owner = f"sample {rollout.prompt.sample.id}: what rollout {rollout.index} was shown"
                check_placeholders(segment.token_ids, [item], shown, placeholders, owner=owner)
                items.append(item)
                tensors.append(shown)
                steps_3S = shown.position_ids_3P
            positions.append(next_position + steps_3S)
            # Not the number of tokens: an image's tokens share positions, see `ModelFamily.position_ids`.
            next_position += int(steps_3S.max()) + 1
        positions_3S = torch.cat(positions, dim=1)
        return TokenSpan(ids=ids, position_ids_3S=positions_3S, media_items=items, tensors=tensors, routes=routes)


def _check_tokens(segment: Segment, rollout: Rollout, placeholders: Placeholders) -> None:
    """Raise a ValueError for a placeholder that no tool showed, and for a trained token that is banned."""
    owner = f"sample {rollout.prompt.sample.id}: rollout {rollout.index}"
    stray = {placeholders.image_id, placeholders.video_id}.intersection(segment.token_ids)
    if stray and segment.observation is None:
        raise ValueError(f"{owner} contains the placeholder {min(stray)}, which no image or video belongs to")
    params = segment.sampling_params or rollout.sampling_params
    banned = set(params.banned_token_ids).intersection(segment.token_ids)
    # A log-probability of -inf would make the loss NaN.
    if banned and segment.author in TRAINED_AUTHORS:
        raise ValueError(f"{owner} contains token {min(banned)}, which its sampling params ban")


class _LogprobToken(NamedTuple):
    """A token whose log-probability is wanted, and the column of its row that predicts it."""

    id: int
    predictor_column: int
    temperature: float


@dataclass(frozen=True, slots=True)
class _PackedRow:
    """A row of a batch before padding; its pieces are appended in order."""

    ids: list[int] = field(default_factory=list)
    positions: list[torch.Tensor] = field(default_factory=list)  # position ids of each piece, int64 [3, S]
    packed_groups: list[PackedGroup] = field(default_factory=list)
    spans: list[TokenSpan] = field(default_factory=list)
    logprob_tokens: list[_LogprobToken] = field(default_factory=list)
    # Routes that the rollout engine recorded, with columns that count from the row's start.
    routes: list[RoutePiece] = field(default_factory=list)

    def append(self, span: TokenSpan, first_position: int = 0) -> None:
        """Append a prompt or a response, whose positions begin at `first_position`."""
        self.routes.extend(piece._replace(column=len(self.ids) + piece.column) for piece in span.routes)
        self.spans.append(span)
        self.ids.extend(span.ids)
        self.positions.append(first_position + span.position_ids_3S)


def group_by_prompt(experiences: Iterable[Experience]) -> list[list[Experience]]:
    """Return experiences in groups of one prompt each, in order of first appearance."""
    groups: dict[tuple[str, str], list[Experience]] = {}
    for experience in experiences:
        groups.setdefault(experience.rollout.prompt.group_key, []).append(experience)
    return list(groups.values())


def collate(
    groups: Sequence[Sequence[Experience]], processor: PromptProcessor, *, pad_id: int, shared_prefix: bool = True
) -> Batch:
    """Pack groups of experiences into tensors. All experiences of a group have the same prompt.

    With `shared_prefix` all groups share one row, which has each prompt once. Otherwise every experience gets its own
    row, padded on the right with `pad_id`.

    Raises:
        ValueError: experiences of a group differ in their prompt, or rollouts in their banned tokens. Also as
            `TokenSpan.from_prompt` and `from_response`.
    """
    banned_token_ids = _shared_banned_tokens(chain.from_iterable(groups))
    if shared_prefix:
        rows = [_pack_row(groups, processor)]
    else:
        rows = [_pack_row([[experience]], processor) for experience in chain.from_iterable(groups)]
    length = max(len(row.ids) for row in rows)
    ids, positions, spans = [], [], []
    targets, predictor_index, temperatures = [], [], []
    routes: list[RoutePiece] = []
    for row_index, row in enumerate(rows):
        # Padding on the right is hidden from all tokens by causal attention, so no mask is needed.
        padding = length - len(row.ids)
        ids.append(row.ids + [pad_id] * padding)
        positions.append(F.pad(torch.cat(row.positions, dim=1), (0, padding)))
        spans += row.spans
        for token in row.logprob_tokens:
            targets.append(token.id)
            predictor_index.append(row_index * length + token.predictor_column)
            temperatures.append(token.temperature)
        for piece in row.routes:
            routes.append(piece._replace(column=row_index * length + piece.column))
    input_ids_BL = torch.tensor(ids)
    return Batch(
        input_ids_BL=input_ids_BL,
        token_types_BL=processor.placeholders.token_types(input_ids_BL),
        position_ids_3BL=torch.stack(positions, dim=1),
        packed_groups=tuple(rows[0].packed_groups) if shared_prefix else None,
        media=collect_media(spans),
        # By default torch turns an empty list into float32.
        target_ids_N=torch.tensor(targets, dtype=torch.int64),
        predictor_index_N=torch.tensor(predictor_index, dtype=torch.int64),
        temperature_N=torch.tensor(temperatures),
        banned_token_ids=banned_token_ids,
        engine_routes_XTK=place_routes(routes, input_ids_BL.numel()) if routes else None,
    )


def pad_left(spans: Sequence[TokenSpan], placeholders: Placeholders, pad_id: int) -> LeftPaddedBatch:
    """Return the tensors of prompts, or of responses without their prompts, padded on the left with `pad_id`.

    Positions of a response count from its first token.
    """
    # At least two columns: transformers withholds a mask of one column from recurrent layers, which would then read
    # the padding of an empty row as a token.
    shape = (len(spans), max(2, *(len(span.ids) for span in spans)))
    input_ids_BP, attention_mask_BP = torch.full(shape, pad_id), torch.zeros(shape, dtype=torch.int64)
    position_ids_3BP = torch.zeros(3, *shape, dtype=torch.int64)
    for row, span in enumerate(spans):
        # On the left, so that the last column predicts the next token of every row.
        start = shape[1] - len(span.ids)
        input_ids_BP[row, start:] = torch.tensor(span.ids, dtype=torch.int64)
        attention_mask_BP[row, start:] = 1
        position_ids_3BP[:, row, start:] = span.position_ids_3S
    return LeftPaddedBatch(
        input_ids_BP=input_ids_BP,
        token_types_BP=placeholders.token_types(input_ids_BP),
        attention_mask_BP=attention_mask_BP,
        position_ids_3BP=position_ids_3BP,
        media=collect_media(spans),
    )


def collect_media(spans: Sequence[TokenSpan]) -> BatchMedia:
    """Return the images and videos of spans, each in order."""
    images, videos, image_patches, video_patches = [], [], [], []
    for span in spans:
        images += [item for item in span.media_items if isinstance(item.ref, ImageRef)]
        videos += [item for item in span.media_items if isinstance(item.ref, VideoRef)]
        for tensors in span.tensors:
            image_patches.append(tensors.image_patches_MD)
            video_patches.append(tensors.video_patches_MD)
    # Responses without tool media have no tensors at all, and `torch.cat` refuses an empty list.
    nothing = [torch.zeros(0, 0)]
    return BatchMedia(
        image_patches_MD=torch.cat(image_patches or nothing),
        image_grids_I3=torch.tensor([item.grid for item in images], dtype=torch.int64).reshape(-1, 3),
        image_keys=tuple(item.key for item in images),
        video_patches_MD=torch.cat(video_patches or nothing),
        video_grids_V3=torch.tensor([item.grid for item in videos], dtype=torch.int64).reshape(-1, 3),
        video_keys=tuple(item.key for item in videos),
    )


def prompt_media_items(prompt: Prompt) -> list[MediaItem]:
    """Return the images and videos of a prompt, in reading order."""
    items = []
    for index, (ref, grid) in enumerate(zip(prompt.sample.media, prompt.grids, strict=True)):
        items.append(MediaItem(ref, grid, f"{prompt.digest}:{index}"))
    return items


def check_placeholders(
    ids: Sequence[int],
    media_items: Sequence[MediaItem],
    tensors: PromptTensors,
    placeholders: Placeholders,
    *,
    owner: str,
) -> None:
    """Check that placeholders, grids, patches and position ids of a prompt, or of what a tool showed, agree.

    Raises:
        UserError: they disagree. The message begins with `owner`.
    """
    for name, ref_type, patches, placeholder in (
        ("image", ImageRef, len(tensors.image_patches_MD), placeholders.image_id),
        ("video", VideoRef, len(tensors.video_patches_MD), placeholders.video_id),
    ):
        expected = sum(prod(item.grid) for item in media_items if isinstance(item.ref, ref_type))
        tokens = ids.count(placeholder)
        if not expected == patches == tokens * placeholders.merge_size**2:
            raise UserError(
                f"{owner}: the {name} grids call for {expected} patches, there are {patches}, "
                f"and {tokens} placeholders stand for {tokens * placeholders.merge_size**2}"
            )
    if tensors.position_ids_3P.shape != (3, len(ids)):
        raise UserError(f"{owner}: {len(ids)} tokens, positions {list(tensors.position_ids_3P.shape)}")


def _shared_banned_tokens(experiences: Iterable[Experience]) -> tuple[int, ...]:
    """Return the tokens that all rollouts ban; ValueError if they ban different ones."""
    banned_sets = set()
    for experience in experiences:
        rollout = experience.rollout
        for segment in rollout.segments:
            banned_sets.add((segment.sampling_params or rollout.sampling_params).banned_token_ids)
    # The output layer masks one set of tokens for all rows of a batch.
    if len(banned_sets) != 1:
        raise ValueError(f"all rollouts of a batch must ban the same tokens, got {len(banned_sets)} sets")
    return banned_sets.pop()


def _pack_row(groups: Sequence[Sequence[Experience]], processor: PromptProcessor) -> _PackedRow:
    """Return one row that holds the prompt of each group once, before its responses."""
    row = _PackedRow()
    for group in groups:
        prompt = group[0].rollout.prompt
        num_prompts = len({experience.rollout.prompt.digest for experience in group})
        if num_prompts != 1:
            raise ValueError(f"sample {prompt.sample.id}: siblings must share one prompt, got {num_prompts}")
        prompt_span = TokenSpan.from_prompt(prompt, processor)
        prompt_routes = [experience.rollout.prompt_routes for experience in group if experience.rollout.prompt_routes]
        if prompt_routes:
            # The first stands for all: siblings that were sampled in one call share the routes of their prompt.
            row.routes.append(RoutePiece(len(row.ids), len(prompt_span.ids), prompt_routes[0]))
        row.append(prompt_span)
        last_prompt_column = len(row.ids) - 1
        next_position = int(prompt_span.position_ids_3S.max()) + 1
        lengths = []
        for experience in group:
            response = TokenSpan.from_response(experience.rollout, processor)
            row.logprob_tokens.extend(_logprob_tokens(experience.rollout, last_prompt_column, len(row.ids)))
            # The positions of every sibling continue from the prompt, as if there were no other sibling.
            row.append(response, next_position)
            # A response without tokens takes no columns, and the attention kernel refuses blocks of length 0.
            if response.ids:
                lengths.append(len(response.ids))
        row.packed_groups.append(PackedGroup(len(prompt_span.ids), tuple(lengths)))
    return row


def _logprob_tokens(rollout: Rollout, last_prompt_column: int, first_column: int) -> list[_LogprobToken]:
    """Return the trained tokens of a response that begins at `first_column` of its row."""
    tokens: list[_LogprobToken] = []
    # The prompt's last token predicts the first of every response, also where siblings lie in between.
    predictor, column = last_prompt_column, first_column
    for segment in rollout.segments:
        # A continuation after a rethink trigger may have been sampled at another temperature.
        temperature = (segment.sampling_params or rollout.sampling_params).effective_temperature
        for token_id in segment.token_ids:
            if segment.author in TRAINED_AUTHORS:
                tokens.append(_LogprobToken(token_id, predictor, temperature))
            predictor = column
            column += 1
    return tokens

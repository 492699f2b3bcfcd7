"""Experiences to tensors: the only place that packs or pads.

Letters: B rows, P prompt columns, C completion columns, L = P + C, N patches, D values a patch, I images, V videos.

A row is one prompt and the completions that share it:

    pad pad prompt prompt prompt | first first | second second second | pad
    column        ...        P-1   P                                    L-1

Prompts are padded on the left, so every completion token is predicted by one of the last C + 1 columns. With one
completion a row this is the ordinary causal layout; with more, a completion sees the prompt and itself, its positions
restart after the prompt, and image and prompt are encoded once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Protocol

import torch

from mmrl.types import Author, Experience, ImageRef, Prompt, SamplingLaw, UserError, VideoRef

_PAD, _PROMPT, _FIRST = 0, 1, 2  # values of branch_BL; completion k of a row is _FIRST + k


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
    """What the model's forward needs of one prompt besides its ids; N is 0 where there is no picture or video."""

    images_ND: torch.Tensor
    videos_ND: torch.Tensor
    positions_3P: torch.Tensor
    seconds_V: torch.Tensor  # from one pair of frames to the next; an engine works out positions by itself

    @property
    def nbytes(self) -> int:
        """Memory of all of them."""
        return sum(getattr(self, f.name).nbytes for f in fields(self))


class Feeder(Protocol):
    """Gives the tensors of a prompt."""

    placeholders: Placeholders

    def tensors(self, prompt: Prompt) -> PromptTensors:
        """Patches and position ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """The patches of a batch and the grids (t, h, w) that order them, pictures and videos apart."""

    images_ND: torch.Tensor
    image_grids_I3: torch.Tensor
    videos_ND: torch.Tensor
    video_grids_V3: torch.Tensor

    def to(self, device: torch.device) -> Media:
        """The same on another device."""
        return Media(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tensors of one forward pass. `source_BC` is the column, counted from P - 1, whose logits predict a token."""

    ids_BL: torch.Tensor
    types_BL: torch.Tensor  # see `Placeholders.types`
    positions_3BL: torch.Tensor
    mask: torch.Tensor  # bool [B, 1, L, L] where completions share a prompt, otherwise int64 [B, L]
    media: Media
    source_BC: torch.Tensor
    policy_BC: torch.Tensor
    teacher_BC: torch.Tensor
    old_logps_BC: torch.Tensor
    advantages_BC: torch.Tensor
    law: SamplingLaw

    @property
    def completion_ids_BC(self) -> torch.Tensor:
        """The completions' part of `ids_BL`."""
        return self.ids_BL[:, self.ids_BL.shape[1] - self.source_BC.shape[1] :]

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "law"}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Prompts alone, padded on the left. `keep_BP` is 1 where there is no padding."""

    ids_BP: torch.Tensor
    types_BP: torch.Tensor
    keep_BP: torch.Tensor
    positions_3BP: torch.Tensor
    media: Media


def check_media(prompt: Prompt, tensors: PromptTensors, placeholders: Placeholders) -> None:
    """Hold placeholders, grids and patches of a prompt against each other: in the processor, and wherever it is used.

    Raises:
        UserError: they disagree; it names the sample.
    """
    for what, kind, patches, token in (
        ("picture", ImageRef, len(tensors.images_ND), placeholders.image),
        ("video", VideoRef, len(tensors.videos_ND), placeholders.video),
    ):
        grids = [prod(g) for ref, g in zip(prompt.sample.media, prompt.grids, strict=True) if isinstance(ref, kind)]
        tokens = prompt.ids.count(token)
        if not sum(grids) == patches == tokens * placeholders.merge**2:
            raise UserError(
                f"sample {prompt.sample.id}: the {what} grids call for {sum(grids)} patches, there are {patches}, "
                f"and {tokens} placeholders stand for {tokens * placeholders.merge**2}"
            )
    if tensors.positions_3P.shape != (3, len(prompt.ids)):
        raise UserError(
            f"sample {prompt.sample.id}: {len(prompt.ids)} tokens, positions {list(tensors.positions_3P.shape)}"
        )


def collate_prompts(prompts: Sequence[Prompt], feeder: Feeder, *, pad_id: int) -> PromptBatch:
    """Pack prompts into tensors.

    Raises:
        UserError: placeholders, grids and patches of a prompt disagree.
    """
    shape = (len(prompts), max(len(prompt.ids) for prompt in prompts))
    ids, keep = torch.full(shape, pad_id), torch.zeros(shape, dtype=torch.int64)
    positions = torch.zeros(3, *shape, dtype=torch.int64)
    tensors = [feeder.tensors(prompt) for prompt in prompts]
    for b, (prompt, of_prompt) in enumerate(zip(prompts, tensors, strict=True)):
        check_media(prompt, of_prompt, feeder.placeholders)
        start = shape[1] - len(prompt.ids)
        ids[b, start:], keep[b, start:] = torch.tensor(prompt.ids), 1
        positions[:, b, start:] = of_prompt.positions_3P
    media = Media(
        images_ND=torch.cat([of_prompt.images_ND for of_prompt in tensors]),
        image_grids_I3=_grids(prompts, ImageRef),
        videos_ND=torch.cat([of_prompt.videos_ND for of_prompt in tensors]),
        video_grids_V3=_grids(prompts, VideoRef),
    )
    types = feeder.placeholders.types(ids)
    return PromptBatch(ids_BP=ids, types_BP=types, keep_BP=keep, positions_3BP=positions, media=media)


def rows(experiences: Sequence[Experience], *, shared_prefix: bool) -> list[list[Experience]]:
    """Experiences by row, in order of first appearance: one row per prompt, or one per experience."""
    if not shared_prefix:
        return [[experience] for experience in experiences]
    by_prompt: dict[str, list[Experience]] = {}
    for experience in experiences:
        by_prompt.setdefault(experience.rollout.prompt.sample.id, []).append(experience)
    return list(by_prompt.values())


def collate(rows_: Sequence[Sequence[Experience]], feeder: Feeder, *, pad_id: int) -> Batch:
    """Pack rows into tensors.

    Raises:
        UserError: placeholders, grids and patches of a prompt disagree.
        ValueError: siblings of one row differ in their prompt, or rollouts in their law; or a completion contains a
            placeholder.
    """
    prompts = [_one(f"prompt digest of {row[0].rollout.prompt.sample.id}", row) for row in rows_]
    laws = {experience.rollout.law for row in rows_ for experience in row}
    tempers = {(law.temperature, law.banned) for law in laws}
    if len(tempers) != 1:
        raise ValueError(f"a batch has one sampling law, got {len(tempers)}: {tempers}")
    width_P = max(len(prompt.ids) for prompt in prompts)
    width_C = max(sum(e.rollout.num_tokens for e in row) for row in rows_)
    prompts_only = collate_prompts(prompts, feeder, pad_id=pad_id)
    ids = torch.cat([prompts_only.ids_BP, torch.full((len(rows_), width_C), pad_id)], dim=1)
    branch = torch.where(prompts_only.keep_BP == 1, _PROMPT, _PAD)
    branch = torch.cat([branch, torch.full((len(rows_), width_C), _PAD)], dim=1)
    positions = torch.cat([prompts_only.positions_3BP, torch.zeros(3, len(rows_), width_C, dtype=torch.int64)], dim=2)
    starts = prompts_only.positions_3BP.amax(dim=(0, 2)) + 1
    completion = _Completions.empty(len(rows_), width_C)
    for b, row in enumerate(rows_):
        column = width_P
        for k, experience in enumerate(row):
            end = column + experience.rollout.num_tokens
            ids[b, column:end] = torch.tensor([t for s in experience.rollout.segments for t in s.ids])
            branch[b, column:end] = _FIRST + k
            positions[:, b, column:end] = starts[b] + torch.arange(end - column)
            completion.fill(b, slice(column - width_P, end - width_P), experience)
            column = end
    types = feeder.placeholders.types(ids)
    if (stray := types[:, width_P:] != 0).any():
        token = int(ids[:, width_P:][stray][0])
        raise ValueError(f"a completion contains the placeholder {token}, which stands for no picture or video")
    return Batch(
        ids_BL=ids,
        types_BL=types,
        positions_3BL=positions,
        mask=_mask(branch),
        media=prompts_only.media,
        source_BC=completion.source,
        policy_BC=completion.policy,
        teacher_BC=completion.teacher,
        old_logps_BC=completion.old_logps,
        advantages_BC=completion.advantages,
        law=next(iter(laws)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Completions:
    """What holds for each completion column, each [B, C]."""

    source: torch.Tensor
    policy: torch.Tensor
    teacher: torch.Tensor
    old_logps: torch.Tensor
    advantages: torch.Tensor

    @staticmethod
    def empty(rows_B: int, columns_C: int) -> _Completions:
        shape = (rows_B, columns_C)
        return _Completions(
            source=torch.zeros(shape, dtype=torch.int64),
            policy=torch.zeros(shape, dtype=torch.bool),
            teacher=torch.zeros(shape, dtype=torch.bool),
            old_logps=torch.zeros(shape),
            advantages=torch.zeros(shape),
        )

    def fill(self, b: int, columns: slice, experience: Experience) -> None:
        # A token at completion column c is predicted by column c of the kept logits; the first token of every
        # completion is predicted by column 0, the prompt's last.
        segments = experience.rollout.segments
        authors = [segment.author for segment in segments for _ in segment.ids]
        self.source[b, columns] = torch.arange(columns.start, columns.stop)
        self.source[b, columns.start] = 0
        self.policy[b, columns] = torch.tensor([author is Author.POLICY for author in authors])
        self.teacher[b, columns] = torch.tensor([author is Author.TEACHER for author in authors])
        self.old_logps[b, columns] = torch.tensor([logp for segment in segments for logp in segment.logps])
        self.advantages[b, columns] = experience.advantage


def _grids(prompts: Sequence[Prompt], kind: type[ImageRef] | type[VideoRef]) -> torch.Tensor:
    """Grids of the media of one kind, int64 [.., 3]."""
    pairs = (pair for prompt in prompts for pair in zip(prompt.sample.media, prompt.grids, strict=True))
    return torch.tensor([grid for ref, grid in pairs if isinstance(ref, kind)], dtype=torch.int64).reshape(-1, 3)


def _one(what: str, row: Sequence[Experience]) -> Prompt:
    digests = {experience.rollout.prompt.digest for experience in row}
    if len(digests) != 1:
        raise ValueError(f"{what}: siblings must share one prompt, got {len(digests)}")
    return row[0].rollout.prompt


def _mask(branch_BL: torch.Tensor) -> torch.Tensor:
    if int(branch_BL.max()) <= _FIRST:  # no siblings: the model's own causal mask does
        return (branch_BL != _PAD).long()
    length = branch_BL.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    queries, keys = branch_BL[:, :, None], branch_BL[:, None, :]
    visible = causal & (((keys == _PROMPT) & (queries != _PAD)) | ((keys == queries) & (keys != _PAD)))
    # A pad sees itself, because a softmax over nothing is not a number.
    return (visible | torch.eye(length, dtype=torch.bool))[:, None]

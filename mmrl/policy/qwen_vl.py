"""A Qwen-VL model as a policy: load, freeze by role, ban what must not be sampled, and score completions.

Letters: B rows, P prompt columns, C completion columns, L = P + C, R sampled rows, K cached columns, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from mmrl.batch import Batch, Media, PromptBatch
from mmrl.config.schema import Role
from mmrl.policy.law import law_logps

_STRUCTURAL = (
    "<|im_start|>",
    "<|endoftext|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


class TokenScores(NamedTuple):
    """Log-probability and entropy of each completion token, nats, float32 [B, C]; both carry gradients."""

    logps_BC: torch.Tensor
    entropies_BC: torch.Tensor


class Policy:
    """The model being trained. All forwards go through the model's own top-level call."""

    def __init__(self, model: PreTrainedModel, *, freeze: tuple[Role, ...] = ()) -> None:
        self.model = model
        for parameter in self._of_roles(freeze):
            parameter.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    @property
    def trainable(self) -> list[nn.Parameter]:
        """Parameters that are trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def frozen_copy(self) -> Policy:
        """The policy as it is now, never to change: a reference for the KL penalty."""
        reference = Policy(copy.deepcopy(self.model))
        reference.model.requires_grad_(False)
        return reference

    def score(self, batch: Batch) -> TokenScores:
        """Score every completion token of a batch under the batch's law; columns of padding hold garbage."""
        batch = batch.to(self.device)
        # transformers recomputes activations in training mode only, and there it would drop the sampler's cache.
        self.model.train(self.model.is_gradient_checkpointing and torch.is_grad_enabled())
        logits = self.model(
            input_ids=batch.ids_BL,
            attention_mask=batch.mask,
            position_ids=batch.positions_3BL,
            mm_token_type_ids=batch.types_BL,
            **_media(batch.media),
            logits_to_keep=batch.source_BC.shape[1] + 1,
            use_cache=False,
        ).logits
        logps = law_logps(logits, batch.law)
        index = batch.source_BC.unsqueeze(-1).expand(-1, -1, logps.shape[-1])
        predicting = logps.gather(1, index)
        # A banned token has log-prob -inf: 0 log 0 is 0, and so must its gradient be.
        finite = predicting.masked_fill(predicting == -torch.inf, 0.0)
        entropies = -(predicting.exp() * finite).sum(dim=-1)
        return TokenScores(predicting.gather(2, batch.completion_ids_BC.unsqueeze(-1)).squeeze(-1), entropies)

    @torch.no_grad()
    def prefill(self, batch: PromptBatch) -> tuple[Cache, torch.Tensor]:
        """Encode prompts; returns their key-value cache and the logits of the next token, [B, V]."""
        self.model.eval()
        output = self.model(
            input_ids=batch.ids_BP.to(self.device),
            attention_mask=batch.keep_BP.to(self.device),
            position_ids=batch.positions_3BP.to(self.device),
            mm_token_type_ids=batch.types_BP.to(self.device),
            **_media(batch.media.to(self.device)),
            past_key_values=DynamicCache(config=self.model.config.get_text_config()),
            use_cache=True,
            logits_to_keep=1,
        )
        return output.past_key_values, output.logits[:, -1]

    @torch.no_grad()
    def extend(
        self, cache: Cache, ids_R: torch.Tensor, keep_RK: torch.Tensor, positions_R: torch.Tensor
    ) -> torch.Tensor:
        """Append one text token to each cached row; returns the logits of the next, [R, V]."""
        ids_R1 = ids_R[:, None]
        output = self.model(
            input_ids=ids_R1,
            attention_mask=keep_RK,
            position_ids=positions_R[None, :, None].expand(3, -1, -1),
            mm_token_type_ids=torch.zeros_like(ids_R1),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_RV: torch.Tensor = output.logits[:, -1]
        return logits_RV

    def _of_roles(self, roles: tuple[Role, ...]) -> Iterator[nn.Parameter]:
        for name, parameter in self.model.named_parameters():
            if role_of(name) in roles:
                yield parameter


def _media(media: Media) -> dict[str, torch.Tensor]:
    """Arguments of the model's forward; it wants none for what is not there."""
    arguments: dict[str, torch.Tensor] = {}
    if len(media.image_grids_I3):
        arguments |= {"pixel_values": media.images_ND, "image_grid_thw": media.image_grids_I3}
    if len(media.video_grids_V3):
        arguments |= {"pixel_values_videos": media.videos_ND, "video_grid_thw": media.video_grids_V3}
    return arguments


def role_of(parameter_name: str) -> Role:
    """Whether a parameter belongs to the vision tower, the projector (its merger) or the language model."""
    if ".visual." not in f".{parameter_name}":
        return "language"
    return "projector" if "merger" in parameter_name else "vision"


def banned_ids(tokenizer: PreTrainedTokenizerBase, embeddings: int) -> tuple[int, ...]:
    """What a response must never contain: structural and vision tokens, and rows of the embedding that are no token.

    The end-of-sequence token stays allowed, although it is structural.
    """
    vocabulary = tokenizer.get_vocab()
    structural = {vocabulary[token] for token in _STRUCTURAL if token in vocabulary} - {tokenizer.eos_token_id}
    return tuple(sorted(structural | set(range(len(tokenizer), embeddings))))

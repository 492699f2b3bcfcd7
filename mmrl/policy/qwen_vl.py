"""A Qwen-VL model as a policy: load, freeze by role, ban what must not be sampled, and score completions.

Letters: B rows, L columns, P prompt columns, N learned tokens, R sampled rows, S new columns, K cached columns,
V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from mmrl.config.schema import COMPONENTS, Component
from mmrl.distributed.ranks import Ranks, balanced_range
from mmrl.policy.batch import Batch, BatchMedia, PromptBatch
from mmrl.policy.chunked_logprobs import LogprobHead, LogprobRequest
from mmrl.policy.components import component_of
from mmrl.policy.lora import has_adapter, iter_adapted_layers, merged_weight, without_adapter
from mmrl.policy.shared_prefix_attention import ATTENTION_NAME as TREE
from mmrl.policy.shared_prefix_attention import install_shared_prefix_attention
from mmrl.policy.vision_cache import VisionCache

_VISION_COMPONENTS: tuple[Component, Component] = ("vision", "projector")
_VISION_CACHE_BYTES = 2**30

_STRUCTURAL_TOKENS = (
    "<|im_start|>",
    "<|endoftext|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


class TokenLogprobs(NamedTuple):
    """Log-probability and entropy of each learned token, nats, float32 [N]; both carry gradients."""

    logprobs_N: torch.Tensor
    entropies_N: torch.Tensor


class ShardedForward(Protocol):
    """Who calls the model where its weights are divided among processes; all must call together."""

    def __call__(self, **arguments: object) -> ModelOutput:
        """The model's forward."""

    def gather_all(self) -> AbstractContextManager[None]:
        """Within this block the model is whole on every process, and each may call it as it likes."""

    def gather_params(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Within this block these weights are whole on every process; all must ask for them together."""

    def compute_gradient(
        self, loss: Callable[[], torch.Tensor], parameters: Sequence[nn.Parameter]
    ) -> list[torch.Tensor]:
        """What this process has of a gradient, of which nothing stays; all must ask together."""

    def iter_params(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights one after the other, each whole while it is looked at; every process must look at all."""

    def local_shard(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        """This process's part of the weights, each whole, in its host memory; all must ask together."""


class Policy:
    """The model being trained. All forwards go through the model's own top-level call.

    Logits exist for `logits_chunk` tokens at a time while scoring. `vision` keeps what the vision tower made of a
    medium; a policy that freezes the tower as a whole makes its own, and shares it with its copies, unless
    `remembers_media` is False: ranks that march in step run it every time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        freeze: tuple[Component, ...] = (),
        logits_chunk: int = 1024,
        vision_cache: VisionCache | None = None,
        cache_vision: bool = True,
    ) -> None:
        self.model = model
        self._logits_chunk = logits_chunk
        for name, parameter in model.named_parameters():
            if component_of(name) in freeze:
                parameter.requires_grad_(False)
        if vision_cache is None and cache_vision and set(_VISION_COMPONENTS) <= set(freeze):
            vision_cache = VisionCache(_VISION_CACHE_BYTES)
        self._vision_cache = vision_cache
        head = model.get_output_embeddings()
        self._head = head if isinstance(head, LogprobHead) else LogprobHead(head)
        model.set_output_embeddings(self._head)
        if model.get_decoder().config._attn_implementation == "sdpa":
            install_shared_prefix_attention(model)
        self._trained_names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._sharded_forward: ShardedForward | None = None

    def set_sharded_forward(self, sharded_forward: ShardedForward | None) -> None:
        """Leave calls of the model to another, or to nobody else again."""
        self._sharded_forward = sharded_forward

    @property
    def is_sharded(self) -> bool:
        """Whether another runs the model."""
        return self._sharded_forward is not None

    def gather_all(self) -> AbstractContextManager[None]:
        """Within this block the model is whole on every rank, and each may call it as it likes."""
        return self._sharded_forward.gather_all() if self._sharded_forward else nullcontext()

    def gather_params(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Within this block these few weights are whole on every rank; all must ask for them together."""
        return self._sharded_forward.gather_params(parameters) if self._sharded_forward else nullcontext()

    def iter_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What training changes, one weight after the other, each whole while it is looked at; all ranks together."""
        learned = self.trained
        yield from self._sharded_forward.iter_params(learned) if self._sharded_forward else learned.items()

    def local_shard(self, ranks: Ranks) -> dict[str, torch.Tensor]:
        """This rank's part of what training changes, by name, each weight whole; all ranks together."""
        learned = self.trained
        if self._sharded_forward:
            return self._sharded_forward.local_shard(learned)
        own = balanced_range([parameter.numel() for parameter in learned.values()], ranks)
        return dict(list(learned.items())[own.start : own.stop])

    def compute_gradient(self, loss: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        """The gradient of a loss in all that is trained; of a model that is divided this rank's pieces of it."""
        learned = list(self.trained.values())
        return (
            self._sharded_forward.compute_gradient(loss, learned)
            if self._sharded_forward
            else loss_gradient(loss(), learned)
        )

    @property
    def patch_dim(self) -> int:
        """Numbers in a patch."""
        vision = self.model.config.vision_config
        return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.device
        return device

    @property
    def max_positions(self) -> int:
        """Tokens of the longest sequence that the model is made for."""
        positions: int = self.model.config.get_text_config().max_position_embeddings
        return positions

    @property
    def trained_by_component(self) -> dict[Component, list[nn.Parameter]]:
        """Parameters that are trained."""
        named = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        return {role: [parameter for name, parameter in named if component_of(name) == role] for role in COMPONENTS}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """What training changes, by name; a frozen copy has the same names."""
        return {name: self.model.get_parameter(name) for name in self._trained_names}

    @property
    def frozen(self) -> dict[str, nn.Parameter]:
        """What training leaves as it was, by name."""
        learned = set(self._trained_names)
        return {name: parameter for name, parameter in self.model.named_parameters() if name not in learned}

    def iter_export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What training changes, as weights of the bare model: adapters added, a tied matrix under both its names."""
        if has_adapter(self.model):
            for name, layer in iter_adapted_layers(self.model):
                with self.gather_params(list(self.model.get_submodule(name).parameters())):
                    yield f"{name}.weight", merged_weight(layer)
            return
        embeddings = self.model.get_input_embeddings().weight
        for name, parameter in self.iter_params():
            yield name, parameter
            if parameter is embeddings is self._head.weight:
                yield "lm_head.weight", parameter

    @property
    def supports_shared_prefix(self) -> bool:
        """Whether it can score packed batches: with any attention but transformers' eager one."""
        return bool(self.model.get_decoder().config._attn_implementation == TREE)

    def frozen_copy(self) -> Policy:
        """The policy as it is now, never to change: a reference for the KL penalty. Frozen weights are shared.

        Of a policy that is divided among ranks, each gets a whole copy that shares nothing.
        """
        frozen = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        with self.gather_all():
            copied = copy.deepcopy(
                self.model, {} if self._sharded_forward else {id(parameter): parameter for parameter in frozen}
            )
        if self._sharded_forward:
            _remove_hooks(copied)
        reference = Policy(copied, logits_chunk=self._logits_chunk, vision_cache=self._vision_cache)
        reference.model.requires_grad_(False)
        return reference

    def without_adapter(self) -> Policy:
        """The policy as its adapter found it: a reference that takes no memory, unless the policy is divided."""
        if self._sharded_forward:
            return self.frozen_copy().without_adapter()
        return Policy(without_adapter(self.model), logits_chunk=self._logits_chunk, vision_cache=self._vision_cache)

    def compute_logprobs(self, batch: Batch) -> TokenLogprobs:
        """Score every learned token of a batch under the law it was drawn from."""
        batch = batch.to(self.device)
        # transformers recomputes activations, and peft drops out, in training mode only.
        self.model.train(torch.is_grad_enabled())
        # A row is causal, padded on the right or packed along `tree`: neither needs a mask. With 4 rows of positions
        # transformers would take restarts for other sequences and hide the prompt; 3 say nothing of the kind.
        packed = {} if batch.prefix_tree is None else {"prefix_tree": batch.prefix_tree}
        request = LogprobRequest(
            target_ids_N=batch.target_ids_N,
            predictor_index_N=batch.predictor_index_N,
            temperature_N=batch.temperature_N,
            banned_token_ids=batch.banned_token_ids,
            chunk_tokens=self._logits_chunk,
        )
        with self._head.use_request(request), self._use_vision_cache(batch.media):
            scores_2N = (self._sharded_forward or self.model)(
                input_ids=batch.input_ids_BL,
                position_ids=batch.position_ids_3BL,
                mm_token_type_ids=batch.token_types_BL,
                **_media_arguments(batch.media),
                **packed,
                use_cache=False,
            ).logits
        return TokenLogprobs(*scores_2N)

    @torch.no_grad()
    def prefill(self, batch: PromptBatch) -> tuple[Cache, torch.Tensor]:
        """Encode prompts; returns their key-value cache and the logits of the next token, [B, V]."""
        self.model.eval()
        cache = DynamicCache(config=self.model.config.get_text_config())
        return cache, self.append(cache, batch, batch.attention_mask_BP)

    @torch.no_grad()
    def append(self, cache: Cache, batch: PromptBatch, attention_mask_RK: torch.Tensor) -> torch.Tensor:
        """Append tokens and media, padded on the left, to cached rows; returns the logits of the next, [R, V]."""
        batch = batch.to(self.device)
        with self._use_vision_cache(batch.media):
            output = self.model(
                input_ids=batch.input_ids_BP,
                attention_mask=attention_mask_RK.to(self.device),
                position_ids=batch.position_ids_3BP,
                mm_token_type_ids=batch.token_types_BP,
                **_media_arguments(batch.media),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits_RV: torch.Tensor = output.logits[:, -1]
        return logits_RV

    @torch.no_grad()
    def append_text(
        self, cache: Cache, input_ids_RS: torch.Tensor, attention_mask_RK: torch.Tensor, positions_RS: torch.Tensor
    ) -> torch.Tensor:
        """Append text tokens to cached rows; returns the logits of the next, [R, V]."""
        output = self.model(
            input_ids=input_ids_RS,
            attention_mask=attention_mask_RK,
            position_ids=positions_RS.expand(3, -1, -1),
            mm_token_type_ids=torch.zeros_like(input_ids_RS),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_RV: torch.Tensor = output.logits[:, -1]
        return logits_RV

    def _use_vision_cache(self, media: BatchMedia) -> AbstractContextManager[None]:
        return (
            nullcontext()
            if self._vision_cache is None
            else self._vision_cache.cached_forward(self.model.model.visual, media)
        )


def _remove_hooks(model: nn.Module) -> None:
    """Make an ordinary model of the copy of one that somebody else runs."""
    for module in model.modules():
        module._parameters = dict(dict.items(module._parameters))
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks):
            hooks.clear()


def _media_arguments(media: BatchMedia) -> dict[str, torch.Tensor]:
    """Arguments of the model's forward; it wants none for what is not there."""
    arguments: dict[str, torch.Tensor] = {}
    if len(media.image_grids_I3):
        arguments |= {"pixel_values": media.image_patches_MD, "image_grid_thw": media.image_grids_I3}
    if len(media.video_grids_V3):
        arguments |= {"pixel_values_videos": media.video_patches_MD, "video_grid_thw": media.video_grids_V3}
    return arguments


def banned_ids(tokenizer: PreTrainedTokenizerBase, embeddings: int) -> tuple[int, ...]:
    """What a response must never contain: structural and vision tokens, and rows of the embedding that are no token.

    The end-of-sequence token stays allowed, although it is structural.
    """
    vocabulary = tokenizer.get_vocab()
    structural = {vocabulary[token] for token in _STRUCTURAL_TOKENS if token in vocabulary} - {tokenizer.eos_token_id}
    return tuple(sorted(structural | set(range(len(tokenizer), embeddings))))


def loss_gradient(loss: torch.Tensor, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """The gradient of a loss, 0 where it does not reach."""
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]

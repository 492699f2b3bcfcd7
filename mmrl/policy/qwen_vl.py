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

from mmrl.config.schema import ROLES, Role
from mmrl.distributed.ranks import Ranks, even_part
from mmrl.policy.batch import Batch, Media, PromptBatch
from mmrl.policy.chunked_logprobs import Request, ScoringHead
from mmrl.policy.components import role_of
from mmrl.policy.lora import adapted, is_adapted, merged, without_adapter
from mmrl.policy.shared_prefix_attention import NAME as TREE
from mmrl.policy.shared_prefix_attention import install
from mmrl.policy.vision_cache import VisionCache

_TOWER: tuple[Role, Role] = ("vision", "projector")
_VISION_BYTES = 2**30

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
    """Log-probability and entropy of each learned token, nats, float32 [N]; both carry gradients."""

    logps_N: torch.Tensor
    entropies_N: torch.Tensor


class Runner(Protocol):
    """Who calls the model where its weights are divided among processes; all must call together."""

    def __call__(self, **arguments: object) -> ModelOutput:
        """The model's forward."""

    def whole(self) -> AbstractContextManager[None]:
        """Within this block the model is whole on every process, and each may call it as it likes."""

    def part(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Within this block these weights are whole on every process; all must ask for them together."""

    def gradient(self, loss: Callable[[], torch.Tensor], parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        """What this process has of a gradient, of which nothing stays; all must ask together."""

    def passed(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
        """Weights one after the other, each whole while it is looked at; every process must look at all."""

    def collected(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
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
        freeze: tuple[Role, ...] = (),
        logits_chunk: int = 1024,
        vision: VisionCache | None = None,
        remembers_media: bool = True,
    ) -> None:
        self.model = model
        self._logits_chunk = logits_chunk
        for name, parameter in model.named_parameters():
            if role_of(name) in freeze:
                parameter.requires_grad_(False)
        if vision is None and remembers_media and set(_TOWER) <= set(freeze):
            vision = VisionCache(_VISION_BYTES)
        self._vision = vision
        head = model.get_output_embeddings()
        self._head = head if isinstance(head, ScoringHead) else ScoringHead(head)
        model.set_output_embeddings(self._head)
        if model.get_decoder().config._attn_implementation == "sdpa":
            install(model)
        self._learned = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._runner: Runner | None = None

    def run_by(self, runner: Runner | None) -> None:
        """Leave calls of the model to another, or to nobody else again."""
        self._runner = runner

    @property
    def is_divided(self) -> bool:
        """Whether another runs the model."""
        return self._runner is not None

    def whole(self) -> AbstractContextManager[None]:
        """Within this block the model is whole on every rank, and each may call it as it likes."""
        return self._runner.whole() if self._runner else nullcontext()

    def part(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Within this block these few weights are whole on every rank; all must ask for them together."""
        return self._runner.part(parameters) if self._runner else nullcontext()

    def passed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What training changes, one weight after the other, each whole while it is looked at; all ranks together."""
        learned = self.learned
        yield from self._runner.passed(learned) if self._runner else learned.items()

    def collected(self, ranks: Ranks) -> dict[str, torch.Tensor]:
        """This rank's part of what training changes, by name, each weight whole; all ranks together."""
        learned = self.learned
        if self._runner:
            return self._runner.collected(learned)
        own = even_part([parameter.numel() for parameter in learned.values()], ranks)
        return dict(list(learned.items())[own.start : own.stop])

    def gradient(self, loss: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        """The gradient of a loss in all that is trained; of a model that is divided this rank's pieces of it."""
        learned = list(self.learned.values())
        return self._runner.gradient(loss, learned) if self._runner else gradient_of(loss(), learned)

    @property
    def patch_values(self) -> int:
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
    def trainable(self) -> dict[Role, list[nn.Parameter]]:
        """Parameters that are trained."""
        named = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        return {role: [parameter for name, parameter in named if role_of(name) == role] for role in ROLES}

    @property
    def learned(self) -> dict[str, nn.Parameter]:
        """What training changes, by name; a frozen copy has the same names."""
        return {name: self.model.get_parameter(name) for name in self._learned}

    @property
    def given(self) -> dict[str, nn.Parameter]:
        """What training leaves as it was, by name."""
        learned = set(self._learned)
        return {name: parameter for name, parameter in self.model.named_parameters() if name not in learned}

    def published(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What training changes, as weights of the bare model: adapters added, a tied matrix under both its names."""
        if is_adapted(self.model):
            for name, layer in adapted(self.model):
                with self.part(list(self.model.get_submodule(name).parameters())):
                    yield f"{name}.weight", merged(layer)
            return
        embeddings = self.model.get_input_embeddings().weight
        for name, parameter in self.passed():
            yield name, parameter
            if parameter is embeddings is self._head.weight:
                yield "lm_head.weight", parameter

    @property
    def shares_prefixes(self) -> bool:
        """Whether it can score packed batches: with any attention but transformers' eager one."""
        return bool(self.model.get_decoder().config._attn_implementation == TREE)

    def frozen_copy(self) -> Policy:
        """The policy as it is now, never to change: a reference for the KL penalty. Frozen weights are shared.

        Of a policy that is divided among ranks, each gets a whole copy that shares nothing.
        """
        frozen = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        with self.whole():
            copied = copy.deepcopy(
                self.model, {} if self._runner else {id(parameter): parameter for parameter in frozen}
            )
        if self._runner:
            _unhook(copied)
        reference = Policy(copied, logits_chunk=self._logits_chunk, vision=self._vision)
        reference.model.requires_grad_(False)
        return reference

    def without_adapter(self) -> Policy:
        """The policy as its adapter found it: a reference that takes no memory, unless the policy is divided."""
        if self._runner:
            return self.frozen_copy().without_adapter()
        return Policy(without_adapter(self.model), logits_chunk=self._logits_chunk, vision=self._vision)

    def score(self, batch: Batch) -> TokenScores:
        """Score every learned token of a batch under the law it was drawn from."""
        batch = batch.to(self.device)
        # transformers recomputes activations, and peft drops out, in training mode only.
        self.model.train(torch.is_grad_enabled())
        # A row is causal, padded on the right or packed along `tree`: neither needs a mask. With 4 rows of positions
        # transformers would take restarts for other sequences and hide the prompt; 3 say nothing of the kind.
        packed = {} if batch.tree is None else {"tree": batch.tree}
        request = Request(
            ids_N=batch.ids_N,
            source_N=batch.source_N,
            temperature_N=batch.temperature_N,
            banned=batch.banned,
            chunk=self._logits_chunk,
        )
        with self._head.scoring(request), self._seeing(batch.media):
            scores_2N = (self._runner or self.model)(
                input_ids=batch.ids_BL,
                position_ids=batch.positions_3BL,
                mm_token_type_ids=batch.types_BL,
                **_media(batch.media),
                **packed,
                use_cache=False,
            ).logits
        return TokenScores(*scores_2N)

    @torch.no_grad()
    def prefill(self, batch: PromptBatch) -> tuple[Cache, torch.Tensor]:
        """Encode prompts; returns their key-value cache and the logits of the next token, [B, V]."""
        self.model.eval()
        cache = DynamicCache(config=self.model.config.get_text_config())
        return cache, self.append(cache, batch, batch.keep_BP)

    @torch.no_grad()
    def append(self, cache: Cache, batch: PromptBatch, keep_RK: torch.Tensor) -> torch.Tensor:
        """Append tokens and media, padded on the left, to cached rows; returns the logits of the next, [R, V]."""
        batch = batch.to(self.device)
        with self._seeing(batch.media):
            output = self.model(
                input_ids=batch.ids_BP,
                attention_mask=keep_RK.to(self.device),
                position_ids=batch.positions_3BP,
                mm_token_type_ids=batch.types_BP,
                **_media(batch.media),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits_RV: torch.Tensor = output.logits[:, -1]
        return logits_RV

    @torch.no_grad()
    def extend(
        self, cache: Cache, ids_RS: torch.Tensor, keep_RK: torch.Tensor, positions_RS: torch.Tensor
    ) -> torch.Tensor:
        """Append text tokens to cached rows; returns the logits of the next, [R, V]."""
        output = self.model(
            input_ids=ids_RS,
            attention_mask=keep_RK,
            position_ids=positions_RS.expand(3, -1, -1),
            mm_token_type_ids=torch.zeros_like(ids_RS),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_RV: torch.Tensor = output.logits[:, -1]
        return logits_RV

    def _seeing(self, media: Media) -> AbstractContextManager[None]:
        return nullcontext() if self._vision is None else self._vision.serving(self.model.model.visual, media)


def _unhook(model: nn.Module) -> None:
    """Make an ordinary model of the copy of one that somebody else runs."""
    for module in model.modules():
        module._parameters = dict(dict.items(module._parameters))
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks):
            hooks.clear()


def _media(media: Media) -> dict[str, torch.Tensor]:
    """Arguments of the model's forward; it wants none for what is not there."""
    arguments: dict[str, torch.Tensor] = {}
    if len(media.image_grids_I3):
        arguments |= {"pixel_values": media.images_ND, "image_grid_thw": media.image_grids_I3}
    if len(media.video_grids_V3):
        arguments |= {"pixel_values_videos": media.videos_ND, "video_grid_thw": media.video_grids_V3}
    return arguments


def banned_ids(tokenizer: PreTrainedTokenizerBase, embeddings: int) -> tuple[int, ...]:
    """What a response must never contain: structural and vision tokens, and rows of the embedding that are no token.

    The end-of-sequence token stays allowed, although it is structural.
    """
    vocabulary = tokenizer.get_vocab()
    structural = {vocabulary[token] for token in _STRUCTURAL if token in vocabulary} - {tokenizer.eos_token_id}
    return tuple(sorted(structural | set(range(len(tokenizer), embeddings))))


def gradient_of(loss: torch.Tensor, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """The gradient of a loss, 0 where it does not reach."""
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]

"""The model in training: frozen components, log-probabilities of responses, and generation on a key-value cache.

`VisionCache` keeps the outputs of a frozen vision tower, computed once for each image or video, while there is room.

Suffixes of tensor names: B rows, L columns, P prompt columns, N trained tokens, R sampled rows, S new columns,
K cached columns, V tokens of the vocabulary, M patches, D values of a patch. In `routes_XTK`: X layers with experts, T
tokens of all rows, K experts of a token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from mmrl.config.schema import COMPONENTS, Component
from mmrl.distributed.ranks import Ranks, balanced_range
from mmrl.policy.batch import Batch, BatchMedia, LeftPaddedBatch, collect_media
from mmrl.policy.expert_routing import find_routers, set_routes
from mmrl.policy.families import FAMILIES, ModelFamily, get_family
from mmrl.policy.logprobs import LogprobHead, LogprobRequest
from mmrl.policy.lora import has_adapter, iter_adapted_layers, merged_weight, without_adapter
from mmrl.policy.picklable_lock import PicklableLock
from mmrl.policy.shared_prefix_attention import ATTENTION_NAME
from mmrl.types import UserError
from mmrl.utils.byte_cache import ByteCache
from mmrl.utils.torch_transfer import send_numbers

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from mmrl.policy.decode_cache import DecodeCache

_VISION_COMPONENTS: tuple[Component, Component] = ("vision", "projector")
VISION_CACHE_BYTES = 2**30  # features of images and videos that a frozen tower has seen
_NO_MEDIA = collect_media([])


class TokenLogprobs(NamedTuple):
    """Log-probability and entropy of each trained token, in nats, float32 [N]; both carry gradients."""

    logprobs_N: torch.Tensor
    entropies_N: torch.Tensor


class ModelRunner:
    """Calls a model and reads its weights, which this process holds whole.

    `mmrl.learner.optimizer_deepspeed.DeepspeedModel` does the same for weights that may be sharded over ranks; then
    every call is collective.
    """

    uses_deepspeed = False  # if so, ranks must run the same layers, and copies of the model need care

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, **arguments: object) -> Any:  # noqa: ANN401  (transformers' ModelOutput)
        """Return the output of the model's forward."""
        return self.model(**arguments)

    def gather_all(self) -> AbstractContextManager[None]:
        """Hold the whole model on every rank inside this block; each rank may then call it on its own."""
        return nullcontext()

    def gather_params(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Hold these weights whole on every rank inside this block."""
        return nullcontext()

    def copy_model(self, shared: Iterable[nn.Parameter]) -> PreTrainedModel:
        """Return a copy of the model that shares these of its weights."""
        # `deepcopy` takes what its memo holds as already copied.
        return copy.deepcopy(self.model, {id(parameter): parameter for parameter in shared})

    def iter_params(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield weights one by one in full shape, each valid until the next one. All ranks must take all of them."""
        yield from parameters.items()

    def local_shard(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks) -> dict[str, torch.Tensor]:
        """Return this rank's share of the weights by name, each in its full shape."""
        share = balanced_range(list(map(torch.numel, parameters.values())), ranks)
        return dict(list(parameters.items())[share.start : share.stop])

    def compute_gradient(
        self, loss: Callable[[], torch.Tensor], parameters: Sequence[nn.Parameter]
    ) -> list[torch.Tensor]:
        """Return the gradient of a scalar loss in each parameter, in its shape and dtype; no update uses it.

        If the weights are sharded, return this rank's piece of each gradient, [elements].
        """
        # Zeros where the loss does not depend on the parameter, such as the vision tower's without an image.
        return list(torch.autograd.grad(loss(), parameters, materialize_grads=True))


class PolicyModel:
    """The model in training. Every forward goes through the model's own top-level call, so its hooks run."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        family: ModelFamily | None = None,
        freeze: tuple[Component, ...] = (),
        freeze_router: bool = False,
        logits_chunk: int = 1024,
        vision_cache: VisionCache | None = None,
        cache_vision: bool = True,
        float32_output_layer: bool = False,
    ) -> None:
        """Take over a model: freeze components, and replace its output layer and attention in place.

        Args:
            model: the model, with or without an adapter.
            family: its family; None for the built-in family of its config.
            freeze: components that are not trained.
            freeze_router: do not train the weights that decide which experts a token goes to.
            logits_chunk: tokens whose logits exist at a time while log-probabilities are computed.
            vision_cache: cache of vision features; None for a new one if tower and projector are frozen.
            cache_vision: make that new cache. False under ZeRO-3, where every rank must run the tower every time.
            float32_output_layer: compute logits in float32, whatever the dtype of the model.

        Raises:
            UserError: with `freeze_router`, if the model has no experts.
        """
        self.model = model
        self.family = family or get_family(model.config)
        self._logits_chunk = logits_chunk
        for name, parameter in model.named_parameters():
            if self.family.component_of(name) in freeze or (freeze_router and self.family.is_router(name)):
                parameter.requires_grad_(False)
        self.routers = find_routers(model)
        if freeze_router and not self.routers:
            raise UserError(f"model.freeze_router: this {self.family.model_type} has no experts; leave it out")
        self._may_cache_vision = cache_vision and self.family.takes_patches
        self._vision_cache = vision_cache or self._make_vision_cache(freeze)
        # In a copy of a policy, the output layer is a `LogprobHead` already.
        head = model.get_output_embeddings()
        self._head = head if isinstance(head, LogprobHead) else LogprobHead(head)
        self._head.is_float32 = float32_output_layer
        model.set_output_embeddings(self._head)
        self.family.prepare(model)
        # Packed batches can be scored with any attention but transformers' eager one.
        self.supports_shared_prefix = model.get_decoder().config._attn_implementation == ATTENTION_NAME
        self._trainable_names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.runner = ModelRunner(model)  # a `DeepspeedModel` while DeepSpeed runs the model

    @property
    def logits_dtype(self) -> torch.dtype:
        """Type that logits are computed in."""
        return torch.float32 if self._head.is_float32 else self.model.dtype

    @property
    def patch_dim(self) -> int:
        """Number of values in a patch."""
        vision = self.model.config.vision_config
        return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """Weights that some stage trains, by name. A frozen copy has the same names."""
        return {name: self.model.get_parameter(name) for name in self._trainable_names}

    @property
    def frozen(self) -> dict[str, nn.Parameter]:
        """Weights that no stage trains, by name."""
        trainable = set(self._trainable_names)
        return {name: parameter for name, parameter in self.model.named_parameters() if name not in trainable}

    @property
    def trained_by_component(self) -> dict[Component, list[nn.Parameter]]:
        """Weights of each component that are trained now; a component without any has an empty list."""
        by_component: dict[Component, list[nn.Parameter]] = {component: [] for component in COMPONENTS}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                by_component[self.family.component_of(name)].append(parameter)
        return by_component

    @contextmanager
    def freeze(self, components: Collection[Component]) -> Iterator[None]:
        """Compute no gradient for these components inside this block. Their weights stay among `trainable`."""
        for name, parameter in self.trainable.items():
            parameter.requires_grad_(self.family.component_of(name) not in components)
        # Training before or after this block may change the tower, so features cached inside it are dropped.
        before = self._vision_cache
        self._vision_cache = before or self._make_vision_cache(components)
        try:
            yield
        finally:
            self._vision_cache = before
            for parameter in self.trainable.values():
                parameter.requires_grad_()

    def iter_export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield trained weights under the names of the model without adapter, as an engine loads them.

        Each has its full shape and the dtype of the model. Adapters are added to their matrices, fused experts come one
        by one, and a tied output matrix comes a second time as `lm_head.weight`.
        """
        if has_adapter(self.model):
            for module_name, layer in iter_adapted_layers(self.model):
                with self.runner.gather_params(list(self.model.get_submodule(module_name).parameters())):
                    yield from self.family.iter_engine_weights(*merged_weight(module_name, layer))
            return
        embeddings = self.model.get_input_embeddings().weight
        for name, parameter in self.runner.iter_params(self.trainable):
            yield from self.family.iter_engine_weights(name, parameter)
            if parameter is embeddings is self._head.weight:
                yield "lm_head.weight", parameter

    def frozen_copy(self) -> PolicyModel:
        """Return a copy that the learner does not train, such as a reference. It shares the frozen weights.

        If DeepSpeed runs the policy, each rank gets a whole copy that shares nothing.
        """
        reference = self._with_model(self.runner.copy_model(shared=self.frozen.values()))
        # Its own list would lack the weights of components that a stage freezes at the moment.
        reference._trainable_names = self._trainable_names
        reference.model.requires_grad_(False)
        return reference

    def without_adapter(self) -> PolicyModel:
        """Return the policy without its adapter, which takes no memory unless DeepSpeed runs the policy."""
        if self.runner.uses_deepspeed:
            return self.frozen_copy().without_adapter()
        return self._with_model(without_adapter(self.model))

    def _with_model(self, model: PreTrainedModel) -> PolicyModel:
        """Return a policy of another model, a copy of this one's, with the same options and vision cache."""
        return PolicyModel(
            model,
            family=self.family,
            logits_chunk=self._logits_chunk,
            vision_cache=self._vision_cache,
            float32_output_layer=self._head.is_float32,
        )

    def compute_logprobs(self, batch: Batch, routes_XTK: torch.Tensor | None = None) -> TokenLogprobs:
        """Return the log-prob of every trained token of a batch, at the temperature that it was sampled at.

        `routes_XTK` has the experts that each router sends each token to, numbers of any integer type. With None, or
        `UNKNOWN_EXPERT` for all experts of a token, the routers choose.
        """
        set_routes(self.routers, routes_XTK)
        batch = batch.to(self.model.device)
        # Only training mode recomputes activations and applies the adapter's dropout; the reference needs neither.
        self.model.train(torch.is_grad_enabled())
        # No attention mask: a row is causal, and either padded on the right or packed along its packed groups. Position
        # ids have 3 rows: with a 4th, transformers takes restarts for other sequences and hides the prompt from them.
        packed = {} if batch.packed_groups is None else {"packed_groups": batch.packed_groups}
        request = LogprobRequest(
            target_ids_N=batch.target_ids_N,
            predictor_index_N=batch.predictor_index_N,
            temperature_N=batch.temperature_N,
            banned_token_ids=send_numbers(batch.banned_token_ids, self.model.device),
            chunk_tokens=self._logits_chunk,
        )
        with self._head.use_request(request), self._use_vision_cache(batch.media):
            computed = self.runner(
                input_ids=batch.input_ids_BL,
                **self.family.model_arguments(batch.position_ids_3BL, batch.token_types_BL, batch.media),
                **packed,
                use_cache=False,
            ).logits
        return TokenLogprobs(*computed)

    @torch.no_grad()
    def prefill(self, batch: LeftPaddedBatch) -> tuple[Cache, torch.Tensor]:
        """Encode prompts; return their key-value cache and the logits of the next token, [B, V]."""
        from transformers import DynamicCache

        # Scoring leaves the model in training mode, where a checkpointed model ignores the cache; and may leave routes.
        self.model.eval()
        set_routes(self.routers, None)
        cache = DynamicCache(config=self.model.config.get_text_config())
        batch = batch.to(self.model.device)
        with self._use_vision_cache(batch.media):
            logits_BV: torch.Tensor = self.model(
                input_ids=batch.input_ids_BP,
                attention_mask=batch.attention_mask_BP,
                **self.family.model_arguments(batch.position_ids_3BP, batch.token_types_BP, batch.media),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
        return cache, logits_BV

    @torch.no_grad()
    def append(self, cache: DecodeCache, batch: LeftPaddedBatch) -> torch.Tensor:
        """Append tokens with images and videos to cached rows; return the logits of the next token, [R, V].

        The new tokens are padded on the left. The cache is extended in place.
        """
        batch = batch.to(self.model.device)
        with self._use_vision_cache(batch.media):
            logits_RV: torch.Tensor = self.model(
                input_ids=batch.input_ids_BP,
                attention_mask=cache.extend_mask(batch.attention_mask_BP),
                **self.family.model_arguments(batch.position_ids_3BP, batch.token_types_BP, batch.media),
                **cache.forward_arguments(),
                logits_to_keep=1,
            ).logits[:, -1]
        return logits_RV

    @torch.no_grad()
    def append_text(self, cache: DecodeCache, input_ids_R: torch.Tensor, positions_R: torch.Tensor) -> torch.Tensor:
        """Append a text token to each cached row; return the logits of the next token, [R, V].

        `positions_R` are equal on all three axes of M-RoPE, int64.
        """
        input_ids_R1 = input_ids_R[:, None]
        positions_3R1 = positions_R[:, None].expand(3, -1, -1)
        logits_RV: torch.Tensor = self.model(
            input_ids=input_ids_R1,
            attention_mask=cache.extend_mask_by_token(),
            **self.family.model_arguments(positions_3R1, torch.zeros_like(input_ids_R1), _NO_MEDIA),
            **cache.forward_arguments(),
            logits_to_keep=1,
        ).logits[:, -1]
        return logits_RV

    def _make_vision_cache(self, frozen: Collection[Component]) -> VisionCache | None:
        is_frozen = self._may_cache_vision and set(_VISION_COMPONENTS) <= set(frozen)
        return VisionCache(VISION_CACHE_BYTES) if is_frozen else None

    def _use_vision_cache(self, media: BatchMedia) -> AbstractContextManager[None]:
        if self._vision_cache is None:
            return nullcontext()
        return self._vision_cache.cached_forward(self.model.get_submodule(self.family.vision_module), media)


def banned_ids(
    tokenizer: PreTrainedTokenizerBase, num_embeddings: int, family: ModelFamily | None = None
) -> tuple[int, ...]:
    """Return the ids that a response must never contain, in ascending order.

    These are structural and vision tokens except end-of-sequence, and embedding rows that belong to no token.
    `family` names the structural tokens; None for the tokens of all built-in families.
    """
    structural_tokens = (family or FAMILIES["qwen2_vl"]).structural_tokens
    vocabulary = tokenizer.get_vocab()
    # Without end-of-sequence, which a list of chat tokens contains but every response needs.
    structural = {vocabulary[token] for token in structural_tokens if token in vocabulary} - {tokenizer.eos_token_id}
    return tuple(sorted(structural | set(range(len(tokenizer), num_embeddings))))


class VisionFeatures(NamedTuple):
    """The vision tower's output for one image or video, [tokens, W] with W the language model's hidden size."""

    tokens: torch.Tensor  # features that replace the embeddings of the placeholders, [tokens, W]
    # Features that Qwen3-VL adds in its first language layers, a [tokens, W] each; empty in other families.
    deepstack: tuple[torch.Tensor, ...]
    output_class: type[ModelOutput]  # class of the tower's output, whose fields the model reads

    @staticmethod
    def from_output(output: ModelOutput) -> VisionFeatures:
        """Return what the tower computed for one image or video, without its activations."""
        deepstack = [layer.detach() for layer in output.get("deepstack_features") or ()]
        return VisionFeatures(output.pooler_output.detach(), tuple(deepstack), type(output))

    @property
    def nbytes(self) -> int:
        """Memory of all tensors, in bytes."""
        return sum(tensor.nbytes for tensor in (self.tokens, *self.deepstack))


class VisionCache:
    """Vision features by the key of their image or video; the least recently used leave when it is full."""

    def __init__(self, max_bytes: int) -> None:
        """Keep at most `max_bytes` of features, but always the last one."""
        self._features: ByteCache[str, VisionFeatures] = ByteCache(max_bytes)
        # Asynchronous rollouts encode in a separate thread.
        self._lock = PicklableLock()

    @contextmanager
    def cached_forward(self, tower: nn.Module, media: BatchMedia) -> Iterator[None]:
        """Replace the tower's forward inside this block by one that looks its images and videos up in this cache."""
        encode = tower.forward
        # A Qwen-VL forward calls the tower first for a batch's images, then for its videos, and not for a kind of which
        # `media` has none.
        keys_of_calls = iter([keys for keys in (media.image_keys, media.video_keys) if keys])

        def forward(patches_MD: torch.Tensor, grid_thw: torch.Tensor, **options: object) -> ModelOutput:
            """Return the features of patches [M, D], float32, cut by grids [media, 3], int64."""
            keys = next(keys_of_calls)
            return _join_features(self._get_or_encode(keys, patches_MD, grid_thw, partial(encode, **options)))

        # Only `forward` is replaced, so hooks on the module still run.
        tower.forward = forward
        try:
            yield
        finally:
            tower.forward = encode

    def _get_or_encode(
        self, keys: Sequence[str], patches_MD: torch.Tensor, grids: torch.Tensor, encode: Callable[..., ModelOutput]
    ) -> list[VisionFeatures]:
        """Return the features of these images or videos; encode and cache the missing ones."""
        patches_by_medium = torch.split(patches_MD, grids.prod(dim=-1).tolist())
        found = []
        for key, patches, grid in zip(keys, patches_by_medium, grids, strict=True):
            with self._lock:
                features = self._features.get(key)
                if features is None:
                    # Each is encoded alone: its features must not depend, not even in the last bit, on what else is in
                    # the batch or the cache, or a resumed run would differ from an uninterrupted one.
                    features = VisionFeatures.from_output(encode(patches, grid_thw=grid[None]))
                    self._features.put(key, features, features.nbytes)
            found.append(features)
        return found


def _join_features(features: Sequence[VisionFeatures]) -> ModelOutput:
    """Return the features of several images or videos as one output of the tower."""
    output_class = features[0].output_class
    tokens = torch.cat([item.tokens for item in features])
    if not features[0].deepstack:
        return output_class(pooler_output=tokens)
    layers = zip(*(item.deepstack for item in features), strict=True)
    return output_class(pooler_output=tokens, deepstack_features=list(map(torch.cat, layers)))

"""Work and memory of one micro-batch of the learner, counted while its real code runs on the pretended device.

Blocks of a model are alike, so a model of few blocks runs, and one of a few more; from their difference follow work and
memory of all blocks. What is extrapolated is a straight line, and tests compare it with whole models.

Suffixes of tensor names as in `mmrl.policy.batch`.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mmrl.config.schema import Component, ModelConfig
from mmrl.plan.attention import attend_in_one_call
from mmrl.plan.pretended_device import pretend_device
from mmrl.plan.shapes import build_meta_model
from mmrl.policy.batch import Batch, BatchMedia, PrefixGroup
from mmrl.policy.build import enable_gradient_checkpointing
from mmrl.policy.families import Grid, ModelFamily, PlaceholderRun
from mmrl.policy.lora import create_adapter
from mmrl.policy.policy import Policy
from mmrl.policy.shared_prefix_attention import attention_blocks

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Blocks that run. The recurrent families repeat a pattern of four; DeepStack feeds the first three language blocks.
_LANGUAGE_DEPTHS = (4, 8)
_VISION_DEPTHS = (4, 6)
_ATTENTION = ("mmrl_plan.attention", "torch_attn._varlen_attn")  # operators that `Meter` counts by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchShape:
    """Sizes of a micro-batch in which all groups are alike."""

    num_groups: int  # groups, each of one prompt
    text_tokens: int  # tokens of a prompt that are text
    grids: tuple[Grid, ...]  # grids of a prompt's images, in patches
    responses: tuple[int, ...]  # tokens of each response of a group

    def prompt_tokens(self, merge_size: int) -> int:
        """Return the tokens of a prompt, placeholders included."""
        return self.text_tokens + sum(prod(grid) for grid in self.grids) // merge_size**2

    def prefix_tree(self, merge_size: int) -> tuple[PrefixGroup, ...]:
        """Return the lengths in the packed row."""
        return (PrefixGroup(self.prompt_tokens(merge_size), self.responses),) * self.num_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerOptions:
    """What decides the work of a forward and backward pass, besides its tokens."""

    model: ModelConfig
    freeze: tuple[Component, ...]  # components that are not trained
    gradient: bool = True  # False for a pass without gradient, such as that of a reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Work and memory of one micro-batch."""

    flops: Mapping[tuple[str, str], float]  # by part (vision, language, attention, logits) and pass
    peak: Mapping[str, float]  # bytes above weights and gradients when most are in use, by part
    peak_phase: str  # where that is, such as `language backward`

    def total_flops(self, *parts: str, passes: Sequence[str] = ("forward", "backward")) -> float:
        """Return the FLOPs of these parts, or of all."""
        return sum(
            flops for (part, name), flops in self.flops.items() if name in passes and (not parts or part in parts)
        )

    @property
    def peak_bytes(self) -> float:
        """All bytes at the peak."""
        return sum(self.peak.values())


class Meter(TorchDispatchMode):
    """Counts FLOPs and live memory by part while operators run inside it. The model's hooks tell it the part."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Begin with nothing counted. `read` returns the values of a small tensor."""
        super().__init__()
        self.part, self.pass_name = "rest", "forward"
        self.flops: Counter[tuple[str, str]] = Counter()
        self.vision_attention: list[float] = []
        """FLOPs of attention in each vision block, forward."""
        self.peaks: dict[str, Counter[str]] = {}
        """Live bytes by part when they were most, of each phase."""
        self._read = read
        self._live: Counter[str] = Counter()
        self._storages: dict[int, ref[Any]] = {}

    def ignore(self, model: torch.nn.Module) -> None:
        """Leave weights, buffers and gradients out of the memory, which are counted apart."""
        for tensor in (*model.parameters(), *model.buffers()):
            for owner in (tensor, tensor.grad):
                if owner is not None:
                    storage = owner.untyped_storage()
                    self._storages[id(storage)] = ref(storage)

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operator, and count it."""
        out = func(*args, **(kwargs or {}))
        self._count_flops(func._overloadpacket, args, kwargs or {}, out)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
                self._hold(leaf.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._storages:
            return
        part, size = self.part, storage.nbytes()
        self._storages[key] = ref(storage, partial(self._free, key, part, size))
        self._live[part] += size
        phase = f"{self.part} {self.pass_name}"
        if self._live.total() > self.peaks.get(phase, Counter()).total():
            self.peaks[phase] = self._live.copy()

    def _free(self, key: int, part: str, size: int, _: ref[Any]) -> None:
        self._live[part] -= size
        self._storages.pop(key, None)

    def _count_flops(self, packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:  # noqa: ANN401
        name = str(packet)
        if name.startswith(_ATTENTION):
            self._count_attention(name, args)
        elif packet in flop_registry:
            self.flops[self.part, self.pass_name] += flop_registry[packet](*args, **kwargs, out_val=out)

    def _count_attention(self, name: str, args: Sequence[Any]) -> None:
        """Count attention by the pairs of query and key that see each other, which a kernel's shapes do not show."""
        is_backward = "backward" in name
        query = args[1] if is_backward else args[0]
        heads, width = (query.shape[1], query.shape[-1])
        if "varlen_attn" in name:
            borders = next(arg for arg in args if isinstance(arg, torch.Tensor) and arg.dtype == torch.int32)
            pairs = int(self._read(borders).diff().square().sum())
        else:
            pairs = args[-1]
        # Two products forward; backward five, because the probabilities are computed again.
        flops = (10 if is_backward else 4) * pairs * heads * width
        if self.part == "vision" and self.pass_name == "forward":
            self.vision_attention.append(flops)
        part = "attention" if self.part == "language" else "vision attention"
        self.flops[part, self.pass_name] += flops


def measure(
    family: ModelFamily, shapes: PretrainedConfig, options: LearnerOptions, batch_shape: MicroBatchShape
) -> Measurement:
    """Return work and memory of a micro-batch of a model with these shapes.

    Raises:
        UserError: this torch cannot pretend a device.
    """
    layers, depth = shapes.text_config.num_hidden_layers, shapes.vision_config.depth
    language = [min(layers, blocks) for blocks in _LANGUAGE_DEPTHS]
    vision = [min(depth, blocks) for blocks in _VISION_DEPTHS]
    small, large = (
        _run(family, trim_shapes(shapes, *blocks), options, batch_shape)
        for blocks in zip(language, vision, strict=True)
    )
    # How many times the difference of the two runs is still missing above the larger one.
    left = {"vision": _steps_left(depth, vision), "language": _steps_left(layers, language)}
    flops = {key: _extend(small.flops[key], count, left, key[0]) for key, count in large.flops.items()}
    for pass_name in ("forward", "backward"):
        flops["vision", pass_name] = flops.get(("vision", pass_name), 0.0) + _vision_attention(
            large, shapes.vision_config, pass_name
        )
        flops.pop(("vision attention", pass_name), None)
    peaks = {}
    for phase, parts in large.peaks.items():
        before = small.peaks.get(phase, Counter())
        peaks[phase] = {part: _extend(before[part], count, left, part) for part, count in parts.items()}
    phase = max(peaks, key=lambda name: sum(peaks[name].values()))
    return Measurement(flops=flops, peak=peaks[phase], peak_phase=phase)


def visible_pairs(tree: Sequence[PrefixGroup]) -> int:
    """Return how many pairs of a query and a key see each other in a packed row."""
    pairs = 0
    for block in attention_blocks(tuple(tree)):
        queries, keys = block.queries.stop - block.queries.start, block.keys.stop - block.keys.start
        pairs += queries * (queries + 1) // 2 if block.causal else queries * keys
    return pairs


def trim_shapes(shapes: PretrainedConfig, layers: int, depth: int) -> PretrainedConfig:
    """Return shapes with so many language blocks and vision blocks, of the same kinds."""
    trimmed = copy.deepcopy(shapes)
    text, vision = trimmed.text_config, trimmed.vision_config
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    if depth < vision.depth:
        # One block with full attention, whose work is counted apart.
        if getattr(vision, "fullatt_block_indexes", None):
            vision.fullatt_block_indexes = [0]
        if getattr(vision, "deepstack_visual_indexes", None):
            vision.deepstack_visual_indexes = list(range(len(vision.deepstack_visual_indexes)))
    vision.depth = depth
    return trimmed


def make_batch(family: ModelFamily, shapes: PretrainedConfig, batch_shape: MicroBatchShape) -> Batch:
    """Return a packed batch of these sizes, on the CPU: every token the same word, every patch grey."""
    vision, image_id = shapes.vision_config, shapes.image_token_id
    merge_size = vision.spatial_merge_size
    runs = {image_id: list(map(PlaceholderRun, batch_shape.grids))}
    prompt = [1] * batch_shape.text_tokens
    for grid in batch_shape.grids:
        prompt += [1, *[image_id] * (prod(grid) // merge_size**2)]
    # Text between images takes the place of as much text at the start.
    prompt = prompt[len(batch_shape.grids) :]
    prompt_positions = family.position_ids(prompt, runs, merge_size=merge_size)
    ids: list[int] = []
    positions, predictors = [], []
    for _ in range(batch_shape.num_groups):
        last = len(ids) + len(prompt) - 1
        ids += prompt
        positions.append(prompt_positions)
        for length in batch_shape.responses:
            predictors += [last, *range(len(ids), len(ids) + length - 1)]
            ids += [1] * length
            positions.append((prompt_positions.max() + 1 + torch.arange(length)).expand(3, -1))
    grids = batch_shape.grids * batch_shape.num_groups
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    input_ids_BL, num_scored = torch.tensor([ids]), len(predictors)
    return Batch(
        input_ids_BL=input_ids_BL,
        token_types_BL=(input_ids_BL == image_id).long(),
        position_ids_3BL=torch.cat(positions, dim=1).unsqueeze(1),
        prefix_tree=batch_shape.prefix_tree(merge_size),
        media=BatchMedia(
            image_patches_MD=torch.zeros(sum(map(prod, grids)), patch),
            image_grids_I3=torch.tensor(grids, dtype=torch.int64).view(-1, 3),
            image_keys=tuple(map(str, range(len(grids)))),
            video_patches_MD=torch.zeros(0, patch),
            video_grids_V3=torch.zeros(0, 3, dtype=torch.int64),
            video_keys=(),
        ),
        target_ids_N=torch.ones(num_scored, dtype=torch.int64),
        predictor_index_N=torch.tensor(predictors),
        temperature_N=torch.ones(num_scored),
        banned_token_ids=(),
    )


def make_policy(family: ModelFamily, shapes: PretrainedConfig, options: LearnerOptions) -> Policy:
    """Return the policy as a stage trains it, without memory."""
    model = build_meta_model(family, shapes, options.model.dtype)
    create_adapter(model, options.model.lora, seed=0, family=family)
    enable_gradient_checkpointing(model, options.model.gradient_checkpointing, family)
    return Policy(
        model,
        family=family,
        freeze=options.freeze,
        freeze_router=options.model.freeze_router,
        logits_chunk=options.model.logits_chunk_tokens,
        float32_output_layer=options.model.float32_output_layer,
    )


def _run(family: ModelFamily, shapes: PretrainedConfig, options: LearnerOptions, batch_shape: MicroBatchShape) -> Meter:
    """Run one forward and backward pass on the pretended device."""
    batch = make_batch(family, shapes, batch_shape)
    tree = batch_shape.prefix_tree(shapes.vision_config.spatial_merge_size)
    with pretend_device() as device, attend_in_one_call(visible_pairs(tree)):
        policy = make_policy(family, shapes, options)
        device.place(policy.model)
        for parameter in policy.trained.values():
            # As after the first micro-batch of an update: gradients are there, and are added to.
            parameter.grad = torch.zeros_like(parameter)
        return run_metered(policy, batch, options, Meter(device.read))


def run_metered(policy: Policy, batch: Batch, options: LearnerOptions, meter: Meter) -> Meter:
    """Score a batch, and compute the gradient of its log-probs, inside a meter; return the meter."""
    _watch_parts(policy, meter)
    meter.ignore(policy.model)
    with meter, torch.set_grad_enabled(options.gradient):
        scores = policy.compute_logprobs(batch)
        if options.gradient:
            meter.part, meter.pass_name = "logits", "backward"
            (scores.logprobs_N.sum()).backward()
    return meter


def _watch_parts(policy: Policy, meter: Meter) -> None:
    """Tell a meter which part of the model runs: by hooks in the forward pass, by gradients in the backward pass."""

    def enter(part: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if meter.pass_name == "forward":
                meter.part = part

        return hook

    def leave(part: str) -> Callable[..., None]:
        def begin_backward(_: torch.Tensor) -> None:
            meter.part = part

        def hook(module: object, arguments: object, output: object) -> None:
            if meter.pass_name == "backward":
                return
            meter.part = "rest"
            for leaf in tree_leaves(dict(output) if isinstance(output, Mapping) else output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(begin_backward)

        return hook

    modules = {
        "vision": policy.model.get_submodule(policy.family.vision_module),
        "language": policy.model.get_submodule(policy.family.language_module),
        "logits": policy.model.get_output_embeddings(),
    }
    for part, module in modules.items():
        module.register_forward_pre_hook(enter(part))
        module.register_forward_hook(leave(part))


def _steps_left(blocks: int, run: Sequence[int]) -> float:
    small, large = run
    return (blocks - large) / (large - small) if large > small else 0.0


def _extend(small: float, large: float, left: Mapping[str, float], part: str) -> float:
    """Continue the line through two runs to the whole model."""
    blocks = "vision" if part.startswith("vision") else "language" if part in ("language", "attention") else ""
    return large + (large - small) * left.get(blocks, 0.0)


def _vision_attention(meter: Meter, vision: Any, pass_name: str) -> float:  # noqa: ANN401
    """Return the FLOPs of attention in all vision blocks, some of which see whole images and others windows."""
    forward = meter.vision_attention
    if not forward:
        return 0.0
    num_full = len(getattr(vision, "fullatt_block_indexes", None) or range(vision.depth))
    total = num_full * max(forward) + (vision.depth - num_full) * min(forward)
    return total * meter.flops["vision attention", pass_name] / sum(forward)

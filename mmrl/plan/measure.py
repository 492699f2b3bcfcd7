"""Work and memory of one micro-batch of the learner, counted while its real code runs on the pretended device.

Blocks of a model are equal, so two models with few blocks run, one with more than the other. Their difference gives the
work and memory of each further block. The extrapolation is linear, and tests compare it with whole models.

Suffixes of tensor names as in `mmrl.policy.batch`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mmrl.config.schema import ModelConfig
from mmrl.learner.micro_batches import dummy_batch
from mmrl.plan.pretended_device import pretend_device
from mmrl.plan.shapes import ModelShapes
from mmrl.plan.workload import MicroBatchSizes
from mmrl.policy.batch import Batch, PackedGroup
from mmrl.policy.build import enable_gradient_checkpointing
from mmrl.policy.families import PlaceholderRun
from mmrl.policy.lora import create_adapter
from mmrl.policy.policy import PolicyModel
from mmrl.types import UserError

_Operator = Any  # torch gives operators no type
# Blocks that run: DeepStack feeds the first three, and families with recurrent layers repeat a pattern of four.
_DEPTHS, _RECURRENT_DEPTHS = (3, 4), (4, 8)


class Measurement(NamedTuple):
    """Work and memory of one micro-batch."""

    flops: Mapping[tuple[str, str], float]  # by part (vision, language, attention, logits, rest) and pass
    peak: Mapping[str, float]  # by part: bytes in use at the peak, besides weights and gradients

    def total_flops(self, *parts: str, passes: Sequence[str] = ("forward", "backward")) -> float:
        """Return the FLOPs of these parts, or of all."""
        return sum(count for (part, name), count in self.flops.items() if name in passes and part in (parts or (part,)))


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs and live memory by part while operators run inside it. Hooks of the model set the part."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor], visible_frac: float) -> None:
        """Start at zero. `read` returns the values of a small tensor; `visible_frac` of the pairs in a row attend."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.part, self.pass_name = "rest", "forward"
        self.flops: Counter[tuple[str, str]] = Counter()
        self.peaks: dict[str, Counter[str]] = {}
        """For each part and pass that ran, the live bytes by part at the moment of their largest sum."""
        self._read, self._visible_frac = read, visible_frac
        self._live: Counter[str] = Counter()
        self._storages: dict[int, ref[Any]] = {}

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leave a tensor out of the memory, such as a weight."""
        storage = tensor.untyped_storage()
        self._storages[id(storage)] = ref(storage)

    def __torch_dispatch__(
        self, func: _Operator, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> _Operator:
        """Run an operator, and count it."""
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if "_attention" in func.__name__ or "varlen_attn" in func.__name__:
            self._count_attention(func.__name__, args)
        elif packet in flop_registry:
            self.flops[self.part, self.pass_name] += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
                self._hold(leaf.untyped_storage())
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, part, size = id(storage), self.part, storage.nbytes()
        if key in self._storages:
            return
        self._storages[key] = ref(storage, partial(self._free, key, part, size))
        self._live[part] += size
        phase = f"{self.part} {self.pass_name}"
        if self._live.total() > self.peaks.get(phase, Counter()).total():
            self.peaks[phase] = self._live.copy()

    def _free(self, key: int, part: str, size: int, _: ref[Any]) -> None:
        self._live[part] -= size
        self._storages.pop(key, None)

    def _count_attention(self, name: str, args: Sequence[Any]) -> None:
        """Count attention by the pairs of query and key that see each other, which a kernel's shapes do not show."""
        is_backward = "backward" in name
        query, key = args[is_backward : is_backward + 2]
        if "varlen" in name:
            borders = next(arg for arg in args if isinstance(arg, torch.Tensor) and arg.dtype == torch.int32)
            pairs = query.shape[1] * float(self._read(borders).diff().square().sum())
        else:
            pairs = prod(query.shape[:3]) * key.shape[2]
        if self.part == "language":
            part, pairs = "attention", pairs * self._visible_frac
        else:
            part = "vision attention"
        # Two products forward; backward five, because the probabilities are computed again.
        self.flops[part, self.pass_name] += (10 if is_backward else 4) * pairs * query.shape[-1]


def measure(model: ModelShapes, options: ModelConfig, micro_batch: MicroBatchSizes) -> Measurement:
    """Return work and memory of a micro-batch of a model with these shapes.

    Raises:
        UserError: this torch cannot pretend a device, or the memory of a part would be negative.
    """
    blocks = {"vision": model.config.vision_config.depth, "language": model.config.text_config.num_hidden_layers}
    depths = {"vision": _DEPTHS, "language": _RECURRENT_DEPTHS if model.num_recurrent_layers else _DEPTHS}
    if model.num_recurrent_layers:
        # In each process, the first forward of such layers keeps its tensors alive, so a run on few tokens comes first.
        short = MicroBatchSizes(num_groups=1, prompt_tokens=16, grids=((1, 4, 4),), responses=(8,))
        _run(model.trim(language=min(blocks["language"], 4), vision=1), options, short)
    few, more = ({part: min(count, depths[part][number]) for part, count in blocks.items()} for number in (0, 1))
    small = _run(model.trim(**few), options, micro_batch)
    large = small if few == more else _run(model.trim(**more), options, micro_batch)
    # Number of extra (high - low) increments needed to cover all blocks.
    left = {part: max(0, blocks[part] - high) / (high - low) for part, (low, high) in depths.items()}
    left |= {"attention": left["language"], "vision attention": left["vision"]}

    def extend(part: str, before: float, after: float) -> float:
        return float(after + (after - before) * left.get(part, 0.0))

    flops = {key: extend(key[0], small.flops[key], count) for key, count in large.flops.items()}
    num_full = len(getattr(model.config.vision_config, "fullatt_block_indexes", None) or ())
    for key in [key for key in flops if key[0] == "vision attention"]:
        vision = "vision", key[1]
        flops[vision] += flops.pop(key)
        if num_full and left["vision"]:
            # One block of a trimmed model sees whole images. The others, and every added block, see windows.
            window = large.flops[key] - small.flops[key]
            flops[vision] += (num_full - 1) * (small.flops[key] - _DEPTHS[0] * window)
    peaks = []
    for phase, parts in large.peaks.items():
        before = small.peaks.get(phase, Counter())
        peaks.append({part: extend(part, before[part], count) for part, count in parts.items()})
    peak = max(peaks, key=lambda parts: sum(parts.values()))
    if min(peak.values()) < 0:
        # Memory did not grow in a straight line, so the whole model's is unknown.
        raise UserError(f"the memory of this model could not be counted ({peak}); please report it with the config")
    return Measurement(flops=flops, peak=peak)


def visible_pairs(prompt: int, responses: Sequence[int]) -> int:
    """Return how many pairs of a query and a key of a packed group see each other."""
    # A response token sees the prompt, and its response up to itself.
    return prompt * (prompt + 1) // 2 + sum(length * prompt + length * (length + 1) // 2 for length in responses)


def make_batch(model: ModelShapes, micro_batch: MicroBatchSizes) -> Batch:
    """Return a packed batch of these sizes, on the CPU: every token the same word, every patch grey."""
    vision, image_id = model.config.vision_config, model.config.image_token_id
    prompt: list[int] = []
    for grid in micro_batch.grids:
        prompt += [1, *[image_id] * model.image_tokens((grid,))]
    prompt += [1] * (micro_batch.prompt_tokens - len(prompt))
    runs = {image_id: list(map(PlaceholderRun, micro_batch.grids))}
    positions = [model.family.position_ids(prompt, runs, merge_size=vision.spatial_merge_size)]
    ids, predictors = list(prompt), list[int]()
    for length in micro_batch.responses:
        predictors += [len(prompt) - 1, *range(len(ids), len(ids) + length - 1)]
        ids += [1] * length
        positions.append((positions[0].max() + 1 + torch.arange(length)).expand(3, -1))
    num_groups, grids = micro_batch.num_groups, micro_batch.grids * micro_batch.num_groups
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    input_ids_BL, group_starts = torch.tensor([ids * num_groups]), len(ids) * torch.arange(num_groups)
    predictor_index_N = (group_starts[:, None] + torch.tensor(predictors)).flatten()
    empty = dummy_batch(pad_id=1, patch_dim=patch, shared_prefix=True)
    return replace(
        empty,
        input_ids_BL=input_ids_BL,
        token_types_BL=(input_ids_BL == image_id).long(),
        position_ids_3BL=torch.cat(positions * num_groups, dim=1).unsqueeze(1),
        packed_groups=(PackedGroup(len(prompt), micro_batch.responses),) * num_groups,
        media=replace(
            empty.media,
            image_patches_MD=torch.zeros(sum(map(prod, grids)), patch),
            image_grids_I3=torch.tensor(grids, dtype=torch.int64).view(-1, 3),
            image_keys=tuple(map(str, range(len(grids)))),
        ),
        target_ids_N=torch.ones_like(predictor_index_N),
        predictor_index_N=predictor_index_N,
        temperature_N=torch.ones(len(predictor_index_N)),
    )


def make_policy(model: ModelShapes, options: ModelConfig, device: str = "meta") -> PolicyModel:
    """Return the policy as a stage trains it. The `meta` device has no memory."""
    module = model.build(options.dtype, device)
    create_adapter(module, options.lora, seed=0, family=model.family)
    enable_gradient_checkpointing(module, options.gradient_checkpointing, model.family)
    return PolicyModel(
        module,
        family=model.family,
        freeze=options.freeze,
        freeze_router=options.freeze_router,
        logits_chunk=options.logits_chunk_tokens,
        float32_output_layer=options.float32_output_layer,
    )


def _run(model: ModelShapes, options: ModelConfig, micro_batch: MicroBatchSizes) -> Meter:
    """Score a batch, and compute the gradient of its log-probs, on the pretended device."""
    batch, size = make_batch(model, micro_batch), micro_batch
    pairs = size.num_groups * visible_pairs(size.prompt_tokens, size.responses)
    with pretend_device() as device:
        policy, meter = make_policy(model, options), Meter(device.read, pairs / size.num_tokens**2)
        device.place(policy.model)
        for tensor in (*policy.model.parameters(), *policy.model.buffers()):
            meter.ignore(tensor)
            if tensor.requires_grad:
                # Like a later micro-batch of an update: gradients exist already, and are added to.
                tensor.grad = torch.zeros_like(tensor)
                meter.ignore(tensor.grad)
        _watch_parts(policy, meter)
        with meter:
            computed = policy.compute_logprobs(batch)
            meter.part, meter.pass_name = "logits", "backward"
            computed.logprobs_N.sum().backward()  # type: ignore[no-untyped-call]
        return meter


def _watch_parts(policy: PolicyModel, meter: Meter) -> None:
    """Set the meter's part as the model runs: by module hooks in the forward pass, by tensor hooks in the backward."""

    def enter(part: str, *_: object) -> None:
        if meter.pass_name == "forward":
            meter.part = part

    def leave(part: str, module: object, arguments: object, output: object) -> None:
        if meter.pass_name == "backward":
            return
        meter.part = "rest"
        for leaf in tree_leaves(dict(output) if isinstance(output, Mapping) else output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: setattr(meter, "part", part))  # type: ignore[no-untyped-call]

    modules = {
        "vision": policy.model.get_submodule(policy.family.vision_module),
        "language": policy.model.get_submodule(policy.family.language_module),
        "logits": policy.model.get_output_embeddings(),
    }
    for part, module in modules.items():
        module.register_forward_pre_hook(partial(enter, part))
        module.register_forward_hook(partial(leave, part))

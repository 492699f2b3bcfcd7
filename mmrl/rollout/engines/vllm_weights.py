"""The policy's weights as vLLM holds them: their names there, checks that they arrived, and files of an adapter.

Imports without vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from mmrl import checkpoint
from mmrl.distributed.exchanges import raise_on_all_ranks
from mmrl.rollout.engines.base import EngineContext
from mmrl.rollout.weight_sync import TensorFingerprint, WeightStream
from mmrl.types import UserError

_VLLM_PREFIXES = (
    ("model.language_model.", "language_model.model."),
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
)
"""Prefixes of weight names in transformers, and of the same tensors in vLLM."""
_VLLM_FUSED_NAMES = (
    (r"\.experts\.\d+\.(gate|up)_proj\.", ".experts.routed_experts.w13_"),
    (r"\.experts\.\d+\.down_proj\.", ".experts.routed_experts.w2_"),
    (r"\.[qkv]_proj\.", ".qkv_proj."),
    (r"\.(gate|up)_proj\.", ".gate_up_proj."),
    (r"\.in_proj_(qkv|z)\.", ".in_proj_qkvz."),
    (r"\.in_proj_[ab]\.", ".in_proj_ba."),
)
"""Parts of the names of weights that vLLM fuses, and of the fused weights."""


def check_same_model(weights: WeightStream, engine_fingerprints: Mapping[str, TensorFingerprint]) -> None:
    """Raise UserError if an engine holds norms of other names or shapes. No engine fuses or splits norms."""
    for name, _, shape in weights.specs():
        if not name.endswith("norm.weight"):
            continue
        found = engine_fingerprints.get(vllm_name(name))
        if found is None or found.shape != shape:
            has = "none of that name" if found is None else f"one of {list(found.shape)}"
            raise UserError(
                f"the rollout engine runs another model: {name} is {list(shape)} here, and it has {has}; start it "
                "with the model that is trained"
            )


def check_weights_arrived(
    sent_fingerprints: Mapping[str, TensorFingerprint], engine_fingerprints: Mapping[str, TensorFingerprint]
) -> None:
    """Compare weights that were sent with those that an engine holds now.

    Weights that the engine fuses, splits or packs have another name or shape there, and are skipped.

    Raises:
        UserError: one of them differs, or none could be compared and the engine has no place for one of them.
    """
    num_compared, missing = 0, []
    for name, sent in sent_fingerprints.items():
        found = engine_fingerprints.get(vllm_name(name))
        if found is None:
            if _fused_name(vllm_name(name)) not in engine_fingerprints:
                missing.append(name)
        elif found.shape == sent.shape:
            num_compared += 1
            if found.digest != sent.digest:
                raise UserError(
                    f"after a sync of weights the rollout engine holds another {name} than the learner, so it would "
                    "sample from another policy. The same command resumes from the last checkpoint; if servers of "
                    "rollout.server.urls were used, see first that no other run sends them weights"
                )
    # A tied matrix may be missing under one of its names, so this alone is not an error.
    if missing and not num_compared:
        raise UserError(
            f"nothing shows that the rollout engine has received the learner's weights: it has no {missing[0]} (one of "
            f"{len(missing)}), and others are fused, split or packed there; install the vLLM that mmrl asks for, also "
            "where servers run, or set rollout.engine: hf"
        )


def vllm_name(name: str) -> str:
    """Return the name in vLLM of a weight that transformers calls `name`."""
    for prefix, vllm_prefix in _VLLM_PREFIXES:
        if name.startswith(prefix):
            return vllm_prefix + name.removeprefix(prefix)
    return name


def _fused_name(name: str) -> str:
    """Return the name in vLLM of the fused weight that `name` is a part of, or `name` if vLLM does not fuse it."""
    for part, fused in _VLLM_FUSED_NAMES:
        name = re.sub(part, fused, name)
    return name


def export_adapter(context: EngineContext) -> Path:
    """Write the policy's adapter as peft reads it, and return its folder. Collective."""
    assert context.adapter is not None, "only a policy with an adapter has files of one"
    folder = context.work_dir / "adapter"
    with context.policy.runner.gather_params(list(context.policy.trainable.values())):
        # Each rank writes a folder of its own, and its disk may be full alone.
        raise_on_all_ranks(partial(checkpoint.export_hf_folder, folder, context.adapter), context.ranks)
    return folder.absolute()

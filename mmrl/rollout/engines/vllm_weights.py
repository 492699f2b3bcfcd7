"""The policy's weights as vLLM holds them: their names there, checks that they arrived, and files of an adapter.

Imports without vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mmrl import checkpoint
from mmrl.rollout.engines.base import EngineContext
from mmrl.rollout.weight_sync import TensorFingerprint, WeightStream
from mmrl.types import UserError

_VLLM_PREFIXES = (
    ("model.language_model.", "language_model.model."),
    ("model.visual.", "visual."),
    ("lm_head.", "language_model.lm_head."),
)
"""Prefixes of weight names in transformers, and of the same tensors in vLLM."""


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
) -> int:
    """Compare weights that were sent with those that an engine holds now.

    Weights that the engine fuses or packs have another name or shape there, and are skipped.

    Returns:
        The number of weights that could be compared.

    Raises:
        RuntimeError: one of them differs.
    """
    num_compared = 0
    for name, sent in sent_fingerprints.items():
        found = engine_fingerprints.get(vllm_name(name))
        if found is None or found.shape != sent.shape:
            continue
        num_compared += 1
        if found.digest != sent.digest:
            raise RuntimeError(f"after a sync of weights the rollout engine holds another {name} than the learner")
    return num_compared


def vllm_name(name: str) -> str:
    """Return the name in vLLM of a weight that transformers calls `name`."""
    for prefix, vllm_prefix in _VLLM_PREFIXES:
        if name.startswith(prefix):
            return vllm_prefix + name.removeprefix(prefix)
    return name


def export_adapter(context: EngineContext) -> Path:
    """Write the policy's adapter as peft reads it, and return its folder. Collective."""
    assert context.adapter is not None, "only a policy with an adapter has files of one"
    folder = context.work_dir / "adapter"
    with context.policy.runner.gather_params(list(context.policy.trained.values())):
        checkpoint.export_hf_folder(folder, context.adapter)
    return folder.absolute()

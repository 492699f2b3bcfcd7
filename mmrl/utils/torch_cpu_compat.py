"""Lets a CPU build of torch live beside a CUDA build of torchvision, torchaudio or torchcodec.

The registries carry no CPU builds of these three. Beside a CPU torch, `import torchvision` raises `operator
torchvision::nms does not exist`, and torchaudio and torchcodec fail to load shared libraries; transformers imports
all three wherever they are installed. Their compiled parts are of no use here, so the two operators torchvision
registers unguarded are declared, and the other two packages are made to look absent. DeepSpeed, which transformers
imports at every export, is told what it would warn of: that there is no GPU.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import metadata

import torch

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _is_cpu_only(package: str) -> bool:
    try:
        return metadata.version(package).endswith("+cpu")
    except metadata.PackageNotFoundError:
        return True


@cache
def tolerate_cuda_builds() -> tuple[torch.library.Library, ...]:
    """Apply the remedy once; does nothing unless torch is a CPU build. Returns what must stay alive."""
    if not _is_cpu_only("torch"):
        return ()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for package in ("torchaudio", "torchcodec"):
        if not _is_cpu_only(package):
            sys.modules[package] = None  # type: ignore[assignment]
    if _is_cpu_only("torchvision"):
        return ()
    library: torch.library.Library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in _OPERATORS:
        library.define(operator)  # type: ignore[no-untyped-call]
    return (library,)


def vllm_platform_plugin() -> None:
    """Apply the remedy in every process that vLLM starts; pyproject.toml names it. None says that it is no platform.

    vLLM inspects models in processes of its own and spawns its engine, and neither imports our code. Its general
    plugins are called when its own imports have failed already, its platform plugins before them.
    """
    tolerate_cuda_builds()

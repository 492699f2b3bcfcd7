"""A run as a folder for transformers, peft and vLLM: from its checkpoints and base model, without its data."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from mmrl import checkpoint
from mmrl.checkpoint.model_card import Facts, card
from mmrl.config import Config, dump, load
from mmrl.log.comparison import compare
from mmrl.log.metrics import records
from mmrl.log.run_dir import RunDir
from mmrl.policy.build import model_of
from mmrl.policy.lora import Adapter, adapter_of
from mmrl.policy.pretrained import Loaded, load_reader
from mmrl.policy.qwen_vl import Policy
from mmrl.types import State, UserError

SETTINGS: Final = "mmrl.yaml"
"""In the folder of an exported model: the config of its run, so that it is asked and read as in training."""


def export(run: RunDir, to: Path, *, name: str | None, merge: bool, warn: Callable[[str], None]) -> Path:
    """Write a checkpoint of a run to a new folder; returns the checkpoint.

    An adapter is written alone, or merged into its model. `name` is that of a checkpoint, or `best`; the newest when
    left out.

    Raises:
        UserError: there is no such run or checkpoint, the folder exists, or the base model is not what it was.
    """
    if to.exists():
        raise UserError(f"{to} exists; export to a new folder")
    if not run.config.is_file():
        raise UserError(f"{run.path} holds no run of mmrl")
    folder = checkpoint.find(run.checkpoints, name, load(run.config).config.checkpoints.best, warn)
    config = load(folder / checkpoint.CONFIG).config
    if merge and not config.model.lora:
        raise UserError(f"{run.path} trains no adapter: there is nothing to merge; leave out --merge-lora")
    loaded, adapter, _ = restored(run, folder, config)
    facts = facts_of(run, config, checkpoint.load_state(folder), folder.name)
    if adapter is not None and not merge:
        write_adapter(to, adapter, facts)
        return folder
    if adapter is not None:
        adapter.merge()
    write_model(to, loaded, facts)
    return folder


class Restored(NamedTuple):
    """A model as a checkpoint has it, and its adapter if it has one."""

    loaded: Loaded
    adapter: Adapter | None
    policy: Policy


def restored(run: RunDir, folder: Path, config: Config) -> Restored:
    """The model of a checkpoint, made as `config` says.

    Raises:
        UserError: the base model is not what it was.
    """
    loaded = model_of(config, partial(load_reader, config.model.model_copy(update={"path": str(run.reader)})))
    adapter = adapter_of(loaded.model, config.model.lora, config.run.seed)
    policy = Policy(loaded.model, freeze=config.model.freeze)
    given = checkpoint.fingerprint(policy.given.items())
    checkpoint.load_weights(folder, checkpoint.Weights(learned=policy.learned, given=given))
    return Restored(loaded, adapter, policy)


def facts_of(run: RunDir, config: Config, state: State, name: str) -> Facts:
    """What the card of a checkpoint tells."""
    evals = state.evals
    steps = [record for record in records(run.metrics, state.metrics_bytes) if "learner/lr" in record]
    return Facts(
        config=config,
        manifest=json.loads(run.manifest.read_text()),
        rows=compare(evals["before"], evals["after"]) if evals.keys() >= {"before", "after"} else (),
        record=steps[-1] if steps else {},
        checkpoint=name,
    )


def write_model(folder: Path, loaded: Loaded, facts: Facts) -> None:
    """A folder that transformers and vLLM load; replaces an earlier one whole.

    Raises:
        UserError: the disk is full or not writable.
    """
    generation, tokenizer = loaded.model.generation_config, loaded.processor.tokenizer
    if generation.eos_token_id is None:
        generation.eos_token_id = tokenizer.eos_token_id
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
    checkpoint.export_hf(folder, loaded.model, loaded.processor, finish=partial(_introduce, facts, False))


def write_adapter(folder: Path, adapter: Adapter, facts: Facts) -> None:
    """A folder that peft and vLLM load onto the base model; replaces an earlier one whole.

    Raises:
        UserError: the disk is full or not writable.
    """
    checkpoint.export_hf(folder, adapter, finish=partial(_introduce, facts, True))


def _introduce(facts: Facts, adapter: bool, folder: Path) -> None:
    """What a reader is told, and what `mmrl eval` goes by."""
    (folder / "README.md").write_text(card(facts, adapter=adapter), encoding="utf-8")
    (folder / SETTINGS).write_text(dump(facts.config), encoding="utf-8")

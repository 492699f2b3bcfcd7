"""Export of a run as a folder for transformers, peft and vLLM, with a model card.

An export needs the run's checkpoints and its base model, but not its data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mmrl import checkpoint
from mmrl.config import Config, dump_yaml, load_config
from mmrl.config.schema import RlStage, SftStage
from mmrl.log.comparison import TaskComparison, compare_rewards
from mmrl.log.logger import read_records
from mmrl.log.run_dir import EXPORTED_CONFIG_FILE, RunDir
from mmrl.policy.build import build_model, find_untrained_components
from mmrl.policy.lora import LoraAdapter, create_adapter
from mmrl.policy.policy import PolicyModel
from mmrl.policy.pretrained import ModelBundle, ModelExport, load_processor
from mmrl.types import TrainingState, UserError

_USAGE = """\
```python
from transformers import AutoModelForImageTextToText, AutoProcessor

model = AutoModelForImageTextToText.from_pretrained("{name}")
processor = AutoProcessor.from_pretrained("{name}")
```

`vllm serve {name}` serves it."""
_ADAPTER_USAGE = """\
```python
from peft import PeftModel
from transformers import AutoModelForImageTextToText

base = AutoModelForImageTextToText.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, "{name}")
```

`vllm serve {base} --enable-lora --lora-modules {name}=PATH` serves it."""

_WITHOUT_MTP = """\
It lacks the {} weights for predicting several tokens at once (`mtp.*`) of its base model, which transformers does not
load: engines cannot use them for speculative decoding."""


class RestoredModel(NamedTuple):
    """A model with the weights of a checkpoint."""

    model_bundle: ModelBundle  # the model with its processor
    adapter: LoraAdapter | None  # the adapter, if the run trains one; the model's own weights are then the base model's
    policy: PolicyModel  # the model as mmrl calls it


class ModelCardFacts(NamedTuple):
    """Facts about a run that the model card of an export states."""

    config: Config  # the run's settings
    stages: Sequence[SftStage | RlStage]  # the stages that have trained the weights
    manifest: Mapping[str, Any]  # content of manifest.json: versions, and hashes of the data
    comparison: Sequence[TaskComparison]  # rewards before and after training; empty before the run has ended
    last_metrics: Mapping[str, Any]  # metrics of the last training step
    checkpoint: str  # name of the checkpoint
    num_mtp_weights: int = 0  # weights for predicting several tokens at once that the export lacks


def export_checkpoint(run_dir: RunDir, to: Path, *, name: str | None, merge: bool, warn: Callable[[str], None]) -> Path:
    """Export a checkpoint of a run to the new folder `to`, and return the checkpoint's folder.

    `name` is a checkpoint's name, `best`, or None for the newest; `warn` is called for each damaged one that is
    skipped. With `merge` the adapter is merged into its base model instead of written by itself.

    Raises:
        UserError: there is no such run or checkpoint, the folder exists, or the base model has changed since.
    """
    if to.exists():
        raise UserError(f"{to} exists; export to a new folder")
    if not run_dir.config.is_file():
        raise UserError(f"{run_dir.path} is not an mmrl run directory")
    best = load_config(run_dir.config).config.checkpoints.best
    folder = checkpoint.find_checkpoint(run_dir.checkpoints, name, best, warn)
    config = load_config(folder / checkpoint.CONFIG_FILE).config
    if merge and not config.model.lora:
        raise UserError(f"{run_dir.path} trains no adapter: there is nothing to merge; leave out --merge-lora")
    restored = restore_model(run_dir, folder, config)
    facts = collect_card_facts(run_dir, config, checkpoint.load_state(folder), folder.name)
    if restored.adapter is not None and not merge:
        write_adapter(to, restored.adapter, facts)
        return folder
    if restored.adapter is not None:
        restored.adapter.merge()
    write_model(to, restored.model_bundle, facts)
    return folder


def restore_model(run_dir: RunDir, folder: Path, config: Config) -> RestoredModel:
    """Build the model that `config` describes, with the weights of the checkpoint in `folder`.

    Raises:
        UserError: the base model has changed since the run began.
    """
    processor_config = config.model
    if config.model.from_scratch is not None:
        # No hub has its processor; the run's own copy is the one that it trained with.
        processor_config = config.model.model_copy(update={"path": str(run_dir.processor)})
    model_bundle = build_model(config, load_processor(processor_config, run_dir.find_config_folder()))
    adapter = create_adapter(model_bundle.model, config.model.lora, config.run.seed, model_bundle.family)
    policy = PolicyModel(
        model_bundle.model,
        family=model_bundle.family,
        freeze=find_untrained_components(config),
        freeze_router=config.model.freeze_router,
        float32_output_layer=config.model.float32_output_layer,
    )
    fingerprint = checkpoint.fingerprint_weights(policy.frozen.items())
    weights = checkpoint.CheckpointWeights(trainable=policy.trainable, frozen_fingerprint=fingerprint)
    # Raises if the base model has changed, because the fingerprint of its frozen weights then differs.
    checkpoint.load_weights(folder, weights)
    return RestoredModel(model_bundle, adapter, policy)


def collect_card_facts(run_dir: RunDir, config: Config, state: TrainingState, name: str) -> ModelCardFacts:
    """Collect what the card of a checkpoint says; `name` is the checkpoint's."""
    rewards = state.eval_rewards
    is_compared = rewards.keys() >= {"before", "after"}
    last_metrics: Mapping[str, Any] = {}
    # Up to the checkpoint's own position: the run may have continued since.
    for record, end in read_records(run_dir.metrics):
        if end > state.metrics_bytes:
            break
        # Only training steps have a learning rate; benchmarks and `sample` stages write records too.
        if "learner/lr" in record:
            last_metrics = record
    # At step 0 of a stage, only the stages before it have changed the weights.
    begun = config.stages[: state.stage_index + bool(state.step)]
    return ModelCardFacts(
        config=config,
        stages=[stage for stage in config.training_stages if stage in begun],
        manifest=json.loads(run_dir.manifest.read_text()),
        comparison=compare_rewards(rewards["before"], rewards["after"]) if is_compared else (),
        last_metrics=last_metrics,
        checkpoint=name,
    )


def write_model(folder: Path, model_bundle: ModelBundle, facts: ModelCardFacts) -> None:
    """Write a folder that transformers and vLLM load; an earlier one is replaced. Raises as `atomic_folder`."""
    generation, tokenizer = model_bundle.model.generation_config, model_bundle.processor.tokenizer
    # A model made from scratch has no generation config, and would not stop at its end token.
    if generation.eos_token_id is None:
        generation.eos_token_id = tokenizer.eos_token_id
    if generation.pad_token_id is None:
        generation.pad_token_id = tokenizer.pad_token_id
    facts = facts._replace(num_mtp_weights=model_bundle.num_mtp_weights)
    add_files = partial(_write_card_and_config, facts, is_adapter=False)
    model = ModelExport(model_bundle.model, model_bundle.family)
    checkpoint.export_hf_folder(folder, model, model_bundle.processor, add_files=add_files)


def write_adapter(folder: Path, adapter: LoraAdapter, facts: ModelCardFacts) -> None:
    """Write a folder that peft and vLLM load onto the base model, like `write_model`."""
    checkpoint.export_hf_folder(folder, adapter, add_files=partial(_write_card_and_config, facts, is_adapter=True))


def _write_card_and_config(facts: ModelCardFacts, folder: Path, *, is_adapter: bool) -> None:
    card = "\n\n".join(_card_sections(facts, is_adapter)) + "\n"
    (folder / "README.md").write_text(card, encoding="utf-8")
    (folder / EXPORTED_CONFIG_FILE).write_text(dump_yaml(facts.config), encoding="utf-8")


def _card_sections(facts: ModelCardFacts, is_adapter: bool) -> Iterator[str]:
    config, base = facts.config, facts.config.model.path
    header = [f"library_name: {'peft' if is_adapter else 'transformers'}", "pipeline_tag: image-text-to-text"]
    if base:
        header.append(f"base_model: {json.dumps(base)}")
    yield "\n".join(["---", *header, "tags: [mmrl, reinforcement-learning]", "---"])
    yield f"# {config.run.name}"
    what = "An adapter" if is_adapter else "A model"
    origin = f"`{base}`" if base else "a model made from nothing"
    stages = []
    for stage in facts.stages:
        method = stage.algorithm if isinstance(stage, RlStage) else "imitation"
        stages.append(f"{method} ({stage.name})")
    yield (
        f"{what} from {origin}, trained by mmrl {facts.manifest['mmrl']}: {', then '.join(stages) or 'no stage yet'}. "
        f"Checkpoint {facts.checkpoint}."
    )
    yield (_ADAPTER_USAGE if is_adapter else _USAGE).format(name=config.run.name, base=base)
    if facts.num_mtp_weights:
        yield _WITHOUT_MTP.format(facts.num_mtp_weights)
    if facts.comparison:
        yield "## Held-out reward\n\nGreedy, with 95 % intervals; the rise is paired over samples."
        yield "\n".join(_comparison_table(facts.comparison))
    yield f"## Last step\n\n```json\n{json.dumps(facts.last_metrics, indent=1)}\n```"
    yield "## Data\n\nsha256 over the samples and media of each part:"
    yield "\n".join(f"- {part}: `{digest}`" for part, digest in facts.manifest["data"].items())
    libraries = [f"{name} {version}" for name, version in facts.manifest["libraries"].items() if version]
    yield "## Made with\n\n" + ", ".join(libraries)
    yield f"## Config\n\n```yaml\n{dump_yaml(config)}```"


def _comparison_table(rows: Sequence[TaskComparison]) -> Iterator[str]:
    yield "| task | n | before | after | rise |"
    yield "|---|---|---|---|---|"
    for row in rows:
        cells = []
        for mean in (row.before, row.after, row.improvement):
            cells.append(f"{mean.value:.3f} [{mean.low:.3f}, {mean.high:.3f}]")
        yield f"| {row.task} | {row.after.n} | {' | '.join(cells)} |"

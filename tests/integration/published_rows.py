"""Rows in the layouts in which data is published, written as the files that a recipe reads.

`tests/data/recipe_rows/NAME.yaml` has the rows of a recipe: `source` says where the layout was read; `files` holds, by
path below the data folder, a list of rows or the content of one file; `media` names pictures and videos; `id` names a
column that is numbered, since the rows of lists are repeated, unless `once` names the file; `same_as` names a recipe
with the same data; `encoders` names folders that get a small CLIP; `left_out` has further rows of `files` that the
recipe cannot use and leaves out.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from harness import TINY
from PIL import Image
from ruamel.yaml import YAML
from tiny_clip import write_clip
from videos import SMALL, write_video

from mmrl.checkpoint import export_hf_folder
from mmrl.config import Config
from mmrl.config.schema import FromScratchConfig, RlStage, SampleStage, SftStage
from mmrl.data.context import make_dataset_context
from mmrl.data.rows import read_filtered_source
from mmrl.policy.tiny_models import make_model, make_processor, train_tokenizer
from mmrl.types import RejectedRow, Sample

FOLDER = Path(__file__).parents[1] / "data" / "recipe_rows"
NUM_ROWS = 8
SHORT = 8  # tokens
SMALLER = {
    "rethink": {"min_free_tokens": 0, "min_new_tokens": 0, "max_new_tokens": SHORT},
    "tools": {"max_total_tokens": 2048},  # those of demonstrations, too
    "probe": {"rollouts_per_prompt": 1},
    "environment": {"max_tokens": 1024},
}
"""Of the steps of a program."""


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_rows(name: str) -> dict[str, Any]:
    rows = YAML(typ="safe", pure=True).load(FOLDER / f"{name}.yaml")
    return load_rows(rows["same_as"]) if "same_as" in rows else rows


def write_data(name: str, folder: Path, *, with_left_out: bool = False) -> Path:
    """Write the files of a recipe into a folder, with rows that are repeated, and return it."""
    rows = load_rows(name)
    left_out = rows.get("left_out", {}) if with_left_out else {}
    for medium in rows["media"]:
        write_medium(folder / medium)
    for encoder in rows.get("encoders", ()):
        write_clip(folder / encoder, longest=64)
    for path, table in rows["files"].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        repeated = isinstance(table, list) and path not in rows.get("once", ())
        written = list(repeat(table, rows.get("id"))) if repeated else table
        write_table(folder / path, [*written, *left_out[path]] if path in left_out else written)
    return folder


def read_samples(config: Config, work_dir: Path) -> list[Sample]:
    """Return the training samples of a recipe whose data is written."""
    context = make_dataset_context(config, work_dir, work_dir / "work")
    samples = []
    for source in config.data.train:
        for row in read_filtered_source(source, work_dir, context, "train"):
            assert not isinstance(row, RejectedRow), row
            samples.append(row)
    return samples


def repeat(rows: list[dict[str, Any]], column: str | None) -> Iterator[dict[str, Any]]:
    """Yield as many rows as a tiny run needs, with a number in a column."""
    for index in range(NUM_ROWS):
        row = rows[index % len(rows)]
        value = row.get(column)
        yield row if value is None else {**row, column: index if isinstance(value, int) else f"{value}{index}"}


def write_medium(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() in (".mp4", ".mkv", ".avi", ".webm"):
        write_video(path, range(24), size=(32, 32))
    else:
        Image.effect_noise((32, 32), 60).convert("RGB").save(path)


def write_table(path: Path, table: Any) -> None:
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(embed(table, path.parent)), path)
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in table))
        case ".csv" | ".tsv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(table[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
                writer.writeheader()
                writer.writerows(table)
        case _:
            path.write_text(json.dumps(table))


def embed(value: Any, folder: Path) -> Any:
    """Return rows with the bytes of a picture in place of `{bytes: PNG}`, as Hugging Face embeds images."""
    if isinstance(value, list):
        return [embed(item, folder) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("bytes") == "PNG":
        write_medium(folder / "embedded.png")
        return {**value, "bytes": (folder / "embedded.png").read_bytes()}
    return {key: embed(inner, folder) for key, inner in value.items()}


def export_tiny_model(folder: Path) -> Path:
    """Write a tiny Qwen2.5-VL into a folder, as a recipe's own model would be."""
    spec = FromScratchConfig.model_validate(TINY)
    tokenizer = train_tokenizer(["<think>One and one.</think><answer>2</answer>"], spec.language.vocab_size)
    export_hf_folder(folder, make_model(spec, tokenizer, seed=0), make_processor(spec, tokenizer, (1024, 1024)))
    return folder


def make_small(config: Config) -> dict[str, Any]:
    """Return overrides that make media, and what a step does, small, and nothing else."""
    values: dict[str, Any] = {"model.dtype": "float32", "model.device": "cpu", "run.cpu_threads": 1}
    values |= {"model.min_pixels": 1024, "model.max_pixels": 1024}
    values["model.video"] = {**SMALL.model_dump(), "max_frames": 4}
    held_out = [source.model_dump(mode="json") for source in config.data.validation]
    for index, source in enumerate(config.data.train):
        if "size" in source.args:
            values[f"data.train.{index}.args.size"] = 8  # what a recipe makes
        if source.validation_share:
            # Of few rows a share may be none, or all that a stage needs.
            values[f"data.train.{index}.validation_share"] = 0.0
            changed = {"name": f"held_out_{index}", "validation_share": 0.0, "weight": None}
            held_out.append({**source.model_dump(mode="json"), **changed})
    for settings in held_out:
        settings["args"]["size" if "size" in settings["args"] else "limit"] = 2
    values["data.validation"] = held_out
    values["evaluation.max_new_tokens"] = SHORT
    for stage in config.stages:
        at = f"stages.{stage.name}"
        if isinstance(stage, RlStage | SftStage) and stage.validation:
            values[f"{at}.validation.every"] = 2
        if stage.kind != "select":
            values[f"{at}.prompts_per_step"] = 2
        if isinstance(stage, RlStage | SampleStage):
            values[f"{at}.sampling.max_new_tokens"] = SHORT
        if isinstance(stage, RlStage):
            values |= {
                f"{at}.group_size": min(2, stage.group_size),
                f"{at}.num_mini_batches": min(2, stage.num_mini_batches),
            }
            values |= {f"{at}.dynamic_sampling.max_rounds": 2} if stage.dynamic_sampling else {}
        if isinstance(stage, RlStage | SftStage):
            values |= small_steps(at, stage.rollout_steps)
        if stage.kind == "sample":
            values[f"{at}.group_size"] = 5
        if stage.kind == "select" and stage.output == "responses":
            values[f"{at}.threshold"] = 0.0  # a tiny model is never right
    return values | small_steps("evaluation", config.evaluation.rollout_steps)


def small_steps(owner: str, steps: Sequence[Any]) -> dict[str, Any]:
    values = {}
    for index, step in enumerate(steps):
        for key, number in SMALLER.get(step.kind, {}).items():
            values[f"{owner}.rollout_steps.{index}.{key}"] = number
    return values

"""`mmrl explain`: every setting with its origin, the meaning of the set ones, and each stage's objective."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from pydantic import BaseModel

from mmrl.config.formulas import format_rl_objective, format_sft_objective
from mmrl.config.load import DEFAULT_ORIGIN, LoadedConfig, flatten_settings
from mmrl.config.schema import Config, RlStage, SftStage
from mmrl.config.schema.rollout_steps import RethinkConfig

_WIDTH = 120
_SELF_EVIDENT = ("name", "kind", "fn", "args")  # keys whose values speak for themselves
_MAX_VALUE_WIDTH = 40  # a longer value pushes only its own origin to the right


def explain(loaded: LoadedConfig) -> str:
    """Return every resolved setting with its origin, what the set ones mean, and the objective of each stage."""
    files = [f"# {loaded.files[0]}"]
    files += [f"# builds on {file}" for file in loaded.files[1:]]
    meanings = "\n".join(_explain_section(loaded.config, ""))
    blocks = ["\n".join(files), _list_settings(loaded), meanings]
    for index in range(len(loaded.config.stages)):
        blocks.append(_explain_stage(loaded.config, index))
    blocks += [f"WARNING: {warning}" for warning in loaded.warnings]
    return "\n\n".join(blocks) + "\n"


def _list_settings(loaded: LoadedConfig) -> str:
    """Return one line per setting, with a blank line between sections."""
    values = {}
    for path, value in flatten_settings(loaded.config.model_dump(mode="json")).items():
        values[path] = _format_value(value)
    path_width = max(map(len, values))
    value_width = min(_MAX_VALUE_WIDTH, max(map(len, values.values())))
    lines: list[str] = []
    section = ""
    for path, value in values.items():
        if lines and path.split(".")[0] != section:
            lines.append("")
        section = path.split(".")[0]
        origin = loaded.origins[path]
        mark = "·" if origin == DEFAULT_ORIGIN else origin
        lines.append(f"{path:<{path_width}}  {value:<{value_width}}  {mark}")
    return "\n".join([*lines, "", "· is the schema's default"])


def _format_value(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            return f"[{', '.join(map(_format_value, value))}]"
        case dict():
            return "{" + ", ".join(f"{key}: {_format_value(inner)}" for key, inner in value.items()) + "}"
        case str() if not value.isprintable():
            return repr(value)  # line breaks would end a row of the table
        case _:
            return str(value) or "''"


def _explain_section(section: BaseModel, path: str) -> Iterator[str]:
    """Yield a line for each key of a section that differs from its default, with its value and description."""
    values = section.model_dump(mode="json")
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if key in _SELF_EVIDENT or value == field.get_default(call_default_factory=True):
            continue
        key_path = f"{path}.{key}" if path else key
        entries = {key_path: value}
        if isinstance(value, tuple):
            entries = {f"{key_path}.{index}": entry for index, entry in enumerate(value)}
        sections = {name: entry for name, entry in entries.items() if isinstance(entry, BaseModel)}
        for name, entry in sections.items():
            yield from _wrap(f"{name}: {type(entry).__doc__}")
            yield from _explain_section(entry, name)
        if not sections:
            yield from _wrap(f"{key_path} {_format_value(values[key])}: {field.description}")


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), _WIDTH, subsequent_indent="    ")


def _explain_stage(config: Config, index: int) -> str:
    stage = config.stages[index]
    lines = [f"Stage {index + 1} of {len(config.stages)}, {stage.name}: {stage.kind}"]
    match stage:
        case RlStage():
            lines[0] += f", {stage.algorithm}"
            num_rollouts = stage.prompts_per_step * stage.group_size
            num_updates = stage.ppo_epochs * stage.num_mini_batches
            lines.append(
                f"each step: {stage.prompts_per_step} prompts x {stage.group_size} rollouts = {num_rollouts} rollouts, "
                f"updates: {num_updates}"
            )
            lines += format_rl_objective(stage, config.rewards)
        case SftStage():
            lines.append(f"each step: {stage.batch_size} samples, updates: 1")
            lines += format_sft_objective(stage)
    steps = () if stage.kind == "select" else stage.rollout_steps
    for step in steps:
        if isinstance(step, RethinkConfig):
            lines += [f"WARNING: {bias}" for bias in step.list_biases()]
    return "\n  ".join(lines)

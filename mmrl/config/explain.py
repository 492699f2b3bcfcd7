"""`mmrl explain`: every setting with its origin, then each stage in words and formulas.

Formulas are written by the `describe` methods of the schema. All other sections are explained by the docstrings of
their class and fields: first the keys that are set, then the names and values of those that have their default.
"""

from __future__ import annotations

import re
import textwrap

from pydantic import BaseModel

from mmrl.config.load import DEFAULT_ORIGIN, LoadedConfig, flatten_settings
from mmrl.config.schema import Config, RlStage, SampleStage, SelectStage, SftStage
from mmrl.config.schema.rollout_steps import GENERATE_ONLY, RethinkConfig, step_name

_LABEL_WIDTH = 11  # of the longest label, "benchmarks", and a space
_SHOWN_ELSEWHERE = ("name", "kind", "sampling", "rollout_steps")  # keys of a stage or step that have facts of their own
_WIDTH = 107  # of a line of words
_MAX_VALUE_WIDTH = 40  # a longer value pushes its own origin to the right, and no other


def explain(loaded: LoadedConfig) -> str:
    """Return every resolved setting with its origin, then the objective of each stage."""
    files = [f"# {loaded.files[0]}"]
    files += [f"# builds on {file}" for file in loaded.files[1:]]
    blocks = ["\n".join(files), _list_settings(loaded)]
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


def _explain_stage(config: Config, index: int) -> str:
    stage = config.stages[index]
    title: str
    match stage:
        case RlStage():
            title, facts = stage.algorithm, _explain_rl(config, stage)
        case SftStage():
            title, facts = "supervised", [*stage.describe(), *_explain_steps(stage), *_explain_training(config, stage)]
        case SampleStage():
            title, facts = "rollouts, written down", [*_explain_rollouts(stage), ("stage", _explain_section(stage))]
        case SelectStage():
            title, facts = "a choice of samples", [("stage", _explain_section(stage))]
    lines = [f"Stage {index + 1} of {len(config.stages)}, {stage.name}: {title}"]
    for label, text in facts:
        # Further lines of a fact are under its first one, without a label.
        first, *more = text.split("\n")
        lines.append(f"  {label:<{_LABEL_WIDTH}}{first}")
        lines += [f"  {'':<{_LABEL_WIDTH}}{line}" for line in more]
    return "\n".join(lines)


def _explain_rl(config: Config, stage: RlStage) -> list[tuple[str, str]]:
    facts = [("each step", stage.describe_step()), *_explain_rollouts(stage)]
    off_policy = stage.describe_off_policy()
    if off_policy:
        facts.append(("off-policy", off_policy))
    facts.append(("reward", config.rewards.describe()))
    if stage.dynamic_sampling:
        facts.append(("filter", _explain_section(stage.dynamic_sampling)))
    facts.append(("advantage", stage.advantage.describe(stage.group_size)))
    if stage.replay:
        facts.append(("replay", _explain_section(stage.replay)))
    facts.append(("objective", stage.describe_objective()))
    facts.append(("KL", stage.loss.kl.describe(stage.reference)))
    return facts + _explain_training(config, stage)


def _explain_rollouts(stage: RlStage | SampleStage) -> list[tuple[str, str]]:
    return [("sampling", _explain_section(stage.sampling)), *_explain_steps(stage)]


def _explain_steps(stage: SftStage | RlStage | SampleStage) -> list[tuple[str, str]]:
    """Return a fact for each rollout step but plain generation."""
    facts: list[tuple[str, str]] = []
    for step in stage.rollout_steps:
        if step in GENERATE_ONLY:
            continue
        text = f"{step_name(step) or step.kind}: {_explain_section(step)}"
        if isinstance(step, RethinkConfig):
            text += "".join(f"\nWARNING: {bias}" for bias in step.list_biases())
        facts.append(("" if facts else "steps", text))
    return facts


def _explain_section(section: BaseModel) -> str:
    """Return what a section is for, each of its keys that is set with its description, and the others with defaults."""
    values = section.model_dump(mode="json")
    lines = [_first_sentence(type(section).__doc__)]
    defaults = []
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if key in _SHOWN_ELSEWHERE:
            continue
        if value == field.get_default(call_default_factory=True):
            defaults.append(f"{key} {_format_value(values[key])}")
            continue
        lines += textwrap.wrap(
            f"{key} {_format_value(values[key])}: {_first_sentence(field.description)}",
            _WIDTH,
            initial_indent="  ",
            subsequent_indent="    ",
        )
    if defaults:
        text = f"by default: {', '.join(defaults)}"
        lines += textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _first_sentence(text: str | None) -> str:
    return re.split(r"(?<=\.)\s", " ".join((text or "").split()))[0]


def _explain_training(config: Config, stage: SftStage | RlStage) -> list[tuple[str, str]]:
    facts = [
        ("samples", stage.describe_samples()),
        ("order", _explain_section(stage.data_order)),
        ("trains", config.model.with_freeze(stage.freeze).describe_training()),
        ("optimizer", _explain_section(stage.optimizer)),
        ("ends", stage.describe_end()),
    ]
    benchmarks = []
    for benchmark in config.evaluation.benchmarks:
        temperature = config.evaluation.benchmark_temperature(benchmark)
        # Benchmarks are taken before training once in a run, in front of its first stage that trains.
        is_first = stage is config.training_stages[0]
        benchmarks.append(benchmark.describe(temperature=temperature, before_training=is_first))
    if benchmarks:
        facts.append(("benchmarks", "\n".join(benchmarks)))
    return facts

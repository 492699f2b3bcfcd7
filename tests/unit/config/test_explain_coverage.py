"""Every option is described by `mmrl explain`, or listed here as not worth a line."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache

import pytest
from config_samples import models_in
from pydantic import BaseModel

from mmrl.config import explain as explain_function
from mmrl.config import schema
from mmrl.config.explain import _explain_section, _format_value
from mmrl.config.schema import BenchmarkConfig, Config

# Names and selectors, which appear as titles; mechanics that do not change what is optimised.
NOT_DESCRIBED = {
    "TrainingStage": {"name", "micro_batch_tokens", "shared_prefix", "max_nonfinite_steps"},
    "SftStage": {"kind", "micro_batch_sequences"},
    "RlStage": {"kind", "micro_batch_groups", "track_rewards", "health", "max_steps_without_signal"},
    "CustomPolicyLossConfig": {"fn", "args"},  # matched by a pattern
    "ScoringConfig": {"workers", "custom_rewards", "timeout_s", "worker_limits"},
    "WorkerLimitsConfig": {"memory_mib", "processes"},
    "BaseRewardConfig": {"args"},
    "RewardTermConfig": {"fallback", "timeout_s"},
    "BenchmarkConfig": {"data", "args", "split", "media_root", "coordinates", "allow_missing", "subsets"}
    | {"temperature"},  # an argument, since that of the evaluation may take its place
    "ModelConfig": {
        *("path", "from_scratch", "dtype", "device", "attn_implementation", "gradient_checkpointing"),
        *("logits_chunk_tokens", "min_pixels", "max_pixels", "video", "max_prompt_tokens", "family"),
        *("float32_output_layer", "chat"),
    },
}
# Sections whose keys are all printed with their values, by the docstrings of their fields.
GENERATED = (
    *("SamplingConfig", "OptimizerConfig", "ComponentLrConfig", "DynamicSamplingConfig", "GroupRewardRangeConfig"),
    *("ReplayConfig", "SampleStage", "SelectStage", "ShuffledOrderConfig", "SortedOrderConfig", "MixtureOrderConfig"),
    *("CurriculumOrderConfig", "CurriculumPhaseConfig", "PlateauConfig", "PriorityOrderConfig", "GenerateConfig"),
    *("RethinkConfig", "RethinkTriggerConfig", "ToolsConfig", "ToolConfig", "BlindProbeConfig", "CustomStepConfig"),
)
DESCRIBED_SECTIONS = ("stages", "rewards")


def sections_of(model: type[BaseModel]) -> set[type[BaseModel]]:
    found = set()
    for field in model.model_fields.values():
        for section in models_in(field.annotation):
            if section not in found:
                found |= {section} | sections_of(section)
    return found


def described_sections() -> list[type[BaseModel]]:
    found = set()
    for key in DESCRIBED_SECTIONS:
        for section in models_in(Config.model_fields[key].annotation):
            found |= {section} | sections_of(section)
    found |= {BenchmarkConfig, schema.ModelConfig, schema.LoraConfig}
    found -= {schema.HealthConfig}
    return sorted((each for each in found if each.__name__ not in GENERATED), key=lambda section: section.__name__)


def attributes_in(source: str) -> tuple[set[str], set[str]]:
    """The attributes that a source reads of `self`, and of anything else."""
    own, others = set(), set()
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            (own if is_own else others).add(node.attr)
    return own, others


def description_sources(section: type[BaseModel]) -> Iterator[str]:
    """The sources of a section's `describe` methods and of the properties they use."""
    for owner in section.__mro__:
        for name, member in vars(owner).items():
            function = member.fget if isinstance(member, property) else member
            is_description = "describe" in name or isinstance(member, property) or name.startswith("_list")
            if is_description and inspect.isfunction(function) and owner.__module__.startswith("mmrl"):
                yield inspect.getsource(function)


@cache
def attributes_read_of_other_objects() -> frozenset[str]:
    """Attributes that descriptions read from objects other than `self`: entries of a list, nested sections."""
    own, others = attributes_in(inspect.getsource(inspect.getmodule(explain_function)))
    read = own | others
    for section in described_sections():
        for source in description_sources(section):
            read |= attributes_in(source)[1]
    return frozenset(read)


@pytest.mark.parametrize("section", described_sections())
def test_every_option_is_described_or_listed(section):
    described = set(attributes_read_of_other_objects())
    for source in description_sources(section):
        described |= attributes_in(source)[0]
    for owner in section.__mro__:
        described |= NOT_DESCRIBED.get(owner.__name__, set())
    forgotten = section.model_fields.keys() - described
    assert not forgotten, f"describe {forgotten} in {section.__name__}.describe(), or list them here"


@pytest.mark.parametrize("section", [schema.ReplayConfig(), schema.RethinkConfig(kind="rethink", correct=("a",))])
def test_a_generated_text_has_every_key_with_its_value_and_what_is_set_with_its_description(section):
    changed = section.model_copy(update={"max_kept_per_group": 3, "capacity": 77})
    words = " ".join(_explain_section(changed).split())
    for key, value in section.model_dump(mode="json").items():
        if key not in ("kind", "name", "triggers", "correct", "capacity", "max_kept_per_group"):
            assert f"{key} {_format_value(value)}" in words
    one, other = "capacity 77: Rollouts that the buffer holds", "max_kept_per_group 3: At most this many"
    assert one in words or other in words

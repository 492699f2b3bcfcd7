"""Keys of other frameworks and of mmrl 0.1 are refused with our key for them."""

from typing import get_args, get_origin

import pytest
from config_samples import SMALL, refused, write
from pydantic import BaseModel

from mmrl.config import schema
from mmrl.config.schema import data, eval_command, root
from mmrl.config.synonyms import MOVED_SINCE_0_1, OTHER_FRAMEWORKS, RENAMED_SINCE_0_1


def models_in(annotation) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is dict:
        return []
    return [model for choice in get_args(annotation) for model in models_in(choice)]


def has_key(path: str) -> bool:
    sections = [schema.Config]
    *way, last = path.replace("[]", "").split(".")
    for key in way:
        sections = [
            model
            for section in sections
            if key in section.model_fields
            for model in models_in(section.model_fields[key].annotation)
        ]
    return any(last in section.model_fields for section in sections)


def section_named(name: str) -> type[BaseModel]:
    for module in (schema, root, data, eval_command):
        if name in vars(module):
            return vars(module)[name]
    raise AssertionError(f"no section {name}")


@pytest.mark.parametrize("synonym", OTHER_FRAMEWORKS.values())
def test_a_synonym_leads_to_a_key_that_exists(synonym):
    assert has_key(synonym.path), synonym.path


def test_there_are_enough_synonyms():
    assert len(OTHER_FRAMEWORKS) >= 60
    assert sum(map(len, RENAMED_SINCE_0_1.values())) > 150


@pytest.mark.parametrize("name", RENAMED_SINCE_0_1)
def test_a_key_of_0_1_leads_to_a_key_of_its_section(name):
    section = section_named(name)
    for old, new in RENAMED_SINCE_0_1[name].items():
        assert new in section.model_fields, (name, old, new)
        assert old not in section.model_fields, (name, old)


def test_a_moved_key_leads_to_a_key_that_exists():
    assert all(has_key(path) for path in MOVED_SINCE_0_1.values())


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "stages.rl.num_generations=8",
            "stages.1.num_generations: unknown key; the key for it is `stages[].group_size`",
        ),
        ("learning_rate=1e-6", "learning_rate: unknown key; the key for it is `stages[].optimizer.lr`"),
        ("stages.rl.loss.beta=0.1", "the key for it is `stages[].loss.kl.coef` (0 keeps no reference model)"),
        ("rollout.n=8", "rollout.n: unknown key; the key for it is `stages[].group_size`"),
        ("max_completion_length=512", "the key for it is `stages[].sampling.max_new_tokens`"),
        ("stages.rl.epsilon_high=0.28", "the key for it is `stages[].loss.clip_high`"),
        ("stages.rl.program=[]", "stages.1.program: unknown key; the key for it is `rollout_steps`"),
        ("stages.cold.micro_batch=4", "the key for it is `micro_batch_sequences`"),
        ("stages.rl.micro_batch=4", "the key for it is `micro_batch_groups`"),
        ("stages.rl.overlap=true", "the key for it is `async_rollouts`"),
        ("answer={think: none}", "answer: unknown key; the key for it is `response_format`"),
        ("run.keep_rollouts_every=3", "the key for it is `logging.save_rollouts_every`"),
    ],
)
def test_a_foreign_key_is_refused_with_ours(tmp_path, override, expected):
    assert expected in refused(write(tmp_path, SMALL), override)

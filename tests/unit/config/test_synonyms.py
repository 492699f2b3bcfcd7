"""Keys of other frameworks and of mmrl 0.1 are refused with our key for them."""

import pytest
from config_samples import SMALL, has_key, refused, write
from pydantic import BaseModel

from mmrl.config.errors import read_synonyms
from mmrl.config.schema.base import StrictModel

SYNONYMS = read_synonyms()
OTHER_FRAMEWORKS, RENAMED_SINCE_0_1 = SYNONYMS["other_frameworks"], SYNONYMS["renamed"]


def sections_below(base: type[BaseModel]) -> dict[str, type[BaseModel]]:
    sections = {}
    for section in base.__subclasses__():
        sections |= {section.__name__: section} | sections_below(section)
    return sections


def test_there_are_enough_synonyms_and_none_is_listed_twice():
    theirs = [key for synonym in OTHER_FRAMEWORKS for key in synonym["theirs"]]
    assert len(theirs) >= 60
    assert len(set(theirs)) == len(theirs)
    assert sum(map(len, RENAMED_SINCE_0_1.values())) > 150


@pytest.mark.parametrize("name", RENAMED_SINCE_0_1)
def test_a_removed_key_of_release_0_1_suggests_a_key_of_its_section(name):
    section = sections_below(StrictModel)[name]
    for old, new in RENAMED_SINCE_0_1[name].items():
        assert new in section.model_fields, (name, old, new)
        assert old not in section.model_fields, (name, old)


def test_a_synonym_leads_to_a_key_that_exists():
    ours = [*(synonym["ours"] for synonym in OTHER_FRAMEWORKS), *SYNONYMS["moved"].values()]
    assert [path for path in ours if not has_key(path)] == []


@pytest.mark.parametrize("name", SYNONYMS["removed"])
def test_a_removed_key_or_value_is_none_of_its_section(name):
    section = sections_below(StrictModel)[name]
    for setting in SYNONYMS["removed"][name]:
        key, _, value = setting.partition("=")
        assert (key in section.model_fields) == bool(value), setting
        assert not value or value not in str(section.model_fields[key].annotation), setting


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stages.rl.num_generations=8", "num_generations: unknown key; the key for it is `stages[].group_size`"),
        ("learning_rate=1e-6", "learning_rate: unknown key; the key for it is `stages[].optimizer.lr`"),
        ("stages.rl.loss.beta=0.1", "the key for it is `stages[].loss.kl.coef` (0 keeps no reference model)"),
        ("rollout.n=8", "rollout.n: unknown key; the key for it is `stages[].group_size`"),
        ("max_completion_length=512", "the key for it is `stages[].sampling.max_new_tokens`"),
        ("stages.rl.epsilon_high=0.28", "the key for it is `stages[].loss.clip_high`"),
        ("stages.rl.program=[]", "stages.1.program: unknown key; the key for it is `rollout_steps`"),
        ("stages.cold.micro_batch=4", "the key for it is `micro_batch_groups`"),
        ("stages.cold.batch_size=4", "the key for it is `prompts_per_step`"),
        ("stages.rl.micro_batch=4", "the key for it is `micro_batch_groups`"),
        (
            "stages.rl.rollout_steps=[{kind: generate}, {kind: environment, fn: a:b, max_turns: 9}]",
            "max_turns: unknown key; the key for it is `turns`",
        ),
        ("stages.rl.overlap=true", "the key for it is `async_rollouts`"),
        ("answer={think: none}", "answer: unknown key; the key for it is `response_format`"),
        ("distributed.heartbeat_s=3", "distributed.heartbeat_s: this key is gone; a process without progress reports"),
        ("stages.rl.health.max_kl=3", "stages.1.health.max_kl: this key is gone; this threshold of a warning is fixed"),
        ("rewards.combine=lexicographic", "rewards.combine: this value is gone; give earlier terms weights that"),
        ("report_to=wandb", "the key for it is `logging.trackers` (a list of tensorboard, wandb, trackio and mlflow;"),
        ("logger=[console]", "the key for it is `logging.trackers`"),
        ("run.keep_rollouts_every=3", "the key for it is `logging.rollouts.every`"),
        ("logging.save_rollouts_every=3", "the key for it is `logging.rollouts.every`"),
    ],
)
def test_a_foreign_key_is_refused_with_ours(tmp_path, override, expected):
    assert expected in refused(write(tmp_path, SMALL), override)

"""Settings that a resumed run may change: those that no result depends on, such as how long it waits."""

import pytest
from config_samples import SMALL, write
from factories import make_config

from mmrl.config import diff_configs, dump_yaml, flatten_settings, load_config, read_flat_settings
from mmrl.config.schema.base import NO_EFFECT, ROUNDING_EFFECT


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"distributed": {"timeout_s": 7200}}, "distributed.timeout_s"),
        ({"rollout": {"server": {"timeout_s": 1200}}}, "rollout.server.timeout_s"),
        ({"rollout": {"server": {"startup_timeout_s": 1800}}}, "rollout.server.startup_timeout_s"),
        ({"rollout": {"vllm": {"max_restarts": 5}}}, "rollout.vllm.max_restarts"),
    ],
)
def test_a_run_that_ended_for_want_of_time_may_continue_with_more(sections, key):
    before = flatten_settings(make_config().model_dump(mode="json"))
    (change,) = diff_configs(before, make_config(**sections))
    assert (change.key, change.effect) == (key, "no result depends on it")


def test_a_deadline_that_decides_about_scores_may_not_change():
    before = flatten_settings(make_config().model_dump(mode="json"))
    rewards = {"terms": [{"fn": "mmrl_rewards.number:exact"}], "timeout_s": 20}
    (change,) = diff_configs(before, make_config(rewards=rewards))
    assert (change.key, change.effect) == ("rewards.timeout_s", None)


def test_a_marked_section_marks_all_its_keys_also_in_lists():
    before = flatten_settings(make_config().model_dump(mode="json"))
    changed = make_config(
        checkpoints={"every": 7}, logging={"rollouts": {"every": 3}}, run={"name": "r", "cpu_threads": 3}
    )
    effects = {change.key: change.effect for change in diff_configs(before | {"stages.0.health.window": 9}, changed)}
    no_effect = dict.fromkeys(
        ("checkpoints.every", "logging.rollouts.every", "stages.0.health.window"), NO_EFFECT.effect
    )
    assert no_effect.items() <= effects.items()
    assert effects["run.cpu_threads"] == ROUNDING_EFFECT.effect


def test_trackers_may_change_when_a_run_resumes(tmp_path):
    source = write(tmp_path, SMALL)
    old = load_config(source, ["logging.trackers=[tensorboard]"]).config
    write(tmp_path, dump_yaml(old), "old.yaml")
    for trackers in ("[]", "[wandb, tensorboard]"):
        new = load_config(source, [f"logging.trackers={trackers}", "logging.project=p"]).config
        changes = diff_configs(read_flat_settings(tmp_path / "old.yaml"), new)
        assert changes
        assert all(change.effect for change in changes)

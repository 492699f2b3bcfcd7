"""Trackers by name; a secret is refused without being repeated."""

import pytest
from config_samples import SMALL, refused, write

from mmrl.config import diff_configs, dump_yaml, load_config, read_flat_settings

CHOICES = "must be 'tensorboard', 'wandb', 'trackio' or 'mlflow', got"


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("logging.trackers=[tensorbord]", f"logging.trackers.0: {CHOICES} the text 'tensorbord'"),
        ("logging.trackers=[wandb, wandb]", "logging.trackers: two trackers are named 'wandb'; leave one out"),
        ("logging.trackers=[{kind: wandb, api_key: hush}]", f"logging.trackers.0: {CHOICES} a mapping"),
        ("logging={trackers: [wandb], api_key: hush}", "logging.api_key: unknown key"),
        ("wandb_project=vlm", "the key for it is `logging.project`"),
    ],
)
def test_a_wrong_tracker_is_refused(tmp_path, setting, expected):
    message = refused(write(tmp_path, SMALL), setting)
    assert expected in message
    assert "hush" not in message


def test_trackers_may_change_when_a_run_resumes(tmp_path):
    source = write(tmp_path, SMALL)
    old = load_config(source, ["logging.trackers=[tensorboard]"]).config
    write(tmp_path, dump_yaml(old), "old.yaml")
    for trackers in ("[]", "[wandb, tensorboard]"):
        new = load_config(source, [f"logging.trackers={trackers}", "logging.project=p"]).config
        changes = diff_configs(read_flat_settings(tmp_path / "old.yaml"), new)
        assert changes
        assert all(change.effect for change in changes)

"""Trackers by name and with options; a secret is refused without being repeated."""

import pytest
from config_samples import SMALL, refused, write

from mmrl.config import diff_configs, dump_yaml, flatten_settings, load_config, read_flat_settings


def test_a_name_stands_for_the_section_with_its_defaults(tmp_path):
    source = write(tmp_path, SMALL + "logging:\n  trackers: [tensorboard, {kind: wandb, tags: [a, b]}, mlflow]\n")
    loaded = load_config(source)
    assert [tracker.kind for tracker in loaded.config.logging.trackers] == ["tensorboard", "wandb", "mlflow"]
    assert loaded.config.logging.trackers[1].tags == ("a", "b")
    last_line = len(source.read_text().splitlines())
    assert loaded.origins["logging.trackers.0.kind"].endswith(f"c.yaml:{last_line}")
    assert loaded.origins["logging.trackers.2.project"] == "default"
    again = load_config(write(tmp_path, dump_yaml(loaded.config), "again.yaml"))
    assert again.config == loaded.config


@pytest.mark.parametrize(
    ("trackers", "expected"),
    [
        ("[tensorbord]", "trackers.0.kind: must be 'tensorboard', 'wandb', 'trackio' or 'mlflow', got the text"),
        ("[{project: x}]", "trackers.0.kind: missing"),
        ("[{kind: wandb, projct: x}]", "trackers.0.projct: unknown key; did you mean `project`?"),
        ("[{kind: wandb, tags: a}]", "trackers.0.tags: must be a list, got the text 'a'; write [a]"),
        ("[{kind: wandb}, wandb]", "logging.trackers: two trackers are named 'wandb'; leave one out"),
        ("[{kind: wandb, api_key: hush}]", "trackers.0: `api_key` would put a secret into a file that is copied to"),
        ("[{kind: wandb, api_key: hush}]", "set WANDB_API_KEY in the environment"),
        ("[{kind: trackio, hf_token: hush}]", "set HF_TOKEN in the environment"),
        ("[{kind: mlflow, tracking_uri: 'https://me:hush@host'}]", "tracking_uri: has a password in it; set MLFLOW_"),
    ],
)
def test_a_wrong_tracker_is_refused(tmp_path, trackers, expected):
    message = refused(write(tmp_path, SMALL), f"logging.trackers={trackers}")
    assert expected in message
    assert "hush" not in message


def test_trackers_may_change_when_a_run_resumes(tmp_path):
    source = write(tmp_path, SMALL)
    old = load_config(source, ["logging.trackers=[tensorboard]"]).config
    write(tmp_path, dump_yaml(old), "old.yaml")
    for trackers in ("[]", "[{kind: wandb, tags: [a]}, tensorboard]"):
        new = load_config(source, [f"logging.trackers={trackers}"]).config
        changes = diff_configs(read_flat_settings(tmp_path / "old.yaml"), new)
        assert changes
        assert all(change.effect for change in changes)
    assert "logging.trackers" in flatten_settings(load_config(source).config.model_dump(mode="json"))

"""The data of a run in an evaluation are read under the evaluation's settings."""

from contextlib import closing

import pytest
from config_samples import SMALL, write

from mmrl.config import load_config, load_eval_config
from mmrl.evaluation.eval_settings import inherit_settings
from mmrl.evaluation.question_set import question_set_of_run
from mmrl.types import UserError


def test_media_are_read_with_the_library_and_the_limits_of_the_evaluation(tmp_path):
    test = 'data.test=[{fn: "mmrl_datasets.generators.scenes:counting", args: {split: test, size: 2}}]'
    config = load_config(write(tmp_path, SMALL), [test]).config
    changes = ["media.video_reader=decord", "media_limits.max_image_bytes=7000000"]
    changes += ["media_limits.max_video_bytes=8000000", "media_limits.max_data_url_bytes=9000000"]
    eval_config = load_eval_config(inherit_settings(config, by_rule=False), "run", changes)
    with closing(question_set_of_run("run:test", config, eval_config, tmp_path, tmp_path / "out")) as question_set:
        policy = question_set.media_policy
        assert (policy.video_reader, policy.max_bytes) == ("decord", 7_000_000)
        assert (policy.max_video_bytes, policy.max_data_url_bytes) == (8_000_000, 9_000_000)
        assert len(question_set.questions.entries) == 2


def test_a_stream_is_refused_because_it_may_have_no_end(tmp_path):
    config = load_config(write(tmp_path, SMALL), ["data.streaming={shuffle_buffer_size: 4}"]).config
    eval_config = load_eval_config(inherit_settings(config, by_rule=False), "run", [])
    with pytest.raises(UserError, match=r"run:train: .* may have no end; write .* `canonical`"):
        question_set_of_run("run:train", config, eval_config, tmp_path, tmp_path / "out")

"""Mixtures, streams and prefetching processes, in whole runs."""

import os
import re
import signal
from collections import Counter
from pathlib import Path

import harness
import pytest
from fork_server import Forked
from waiting import PATIENCE_S, wait_for

import mmrl.media.cache as cache_module
import mmrl.policy.processor as processor_module
from mmrl.policy.encoder import PromptEncoder

STREAMED = {
    "train": [
        harness.counting("train", 40, label_miss_prob=0.2) | {"weight": 3.0},
        {"fn": "./mine.py:endless", "weight": 1.0},
    ],
    "streaming": {"shuffle_buffer_size": 8},
    "on_bad_sample": "skip",
}
ENDLESS = """
from itertools import count
from mmrl.types import AnswerType, RejectedRow, Sample, Target

def endless(context):
    for i in count():
        if i > 8 and i % 3 == 0:
            yield RejectedRow(f"n{i}", "unlucky")
        else:
            digit = Target(answer_type=AnswerType.NUMBER, value=i % 10)
            yield Sample(id=f"n{i}", task="say", parts=(f"Say {i % 10}",), target=digit, label=digit)
"""


def streamed(run_dir: Path, **data: object) -> dict[str, object]:
    """Imitation and reinforcement on a mixture of two streams, one of them endless and with bad rows."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    (run_dir.parent / "mine.py").write_text(ENDLESS)
    stages = [harness.sft_stage(steps=6), harness.rl_stage(steps=6, max_steps_without_signal=7)]
    return harness.experiment(run_dir, stages=stages, data=STREAMED | data)


@pytest.mark.slow
def test_prefetching_processes_change_no_byte(tmp_path, whole, in_process, monkeypatch):
    monkeypatch.setattr(processor_module, "_CACHE_BYTES", 1)  # so that every step has work for them
    config = harness.experiment(tmp_path / "run")
    config["data"]["media_workers"] = 1
    assert in_process("train", harness.write(config, tmp_path / "tiny.yaml")).code == 0
    assert harness.reproducible_files(tmp_path / "run") == harness.reproducible_files(whole)


def test_an_image_is_decoded_and_processed_once_a_step(tmp_path, in_process, monkeypatch):
    """However large the group, however many epochs, with a reference, and with no cache to help."""
    opened: Counter[str] = Counter()
    processed: list[str] = []
    open_image, process = cache_module.open_image, PromptEncoder.encode
    monkeypatch.setattr(processor_module, "_CACHE_BYTES", 1)
    monkeypatch.setattr(cache_module, "open_image", lambda ref, *a: opened.update([ref.path]) or open_image(ref, *a))
    monkeypatch.setattr(PromptEncoder, "encode", lambda self, s: processed.append(s.id) or process(self, s))
    stage = harness.rl_stage(steps=1, prompts_per_step=6, group_size=8, ppo_epochs=2)
    config = harness.experiment(tmp_path / "run", stages=[stage], data={"train": [harness.counting("train", 6)]})
    assert in_process("train", harness.write(config, tmp_path / "tiny.yaml")).code == 0
    assert "policy/reference_kl_nats" in harness.metrics(tmp_path / "run")[-1]
    assert len(processed) == len(set(processed)) == 6
    assert len(opened) == 6
    assert set(opened.values()) == {1}  # decoded at the start, and still in memory for the step


@pytest.mark.slow
def test_a_resumed_run_on_streams_mixed_by_weight_is_byte_equal(tmp_path, in_process):
    config = harness.write(streamed(tmp_path / "a" / "run"), tmp_path / "a" / "tiny.yaml")
    done = harness.succeed(in_process("train", config))
    records = harness.metrics(tmp_path / "a" / "run")
    assert sum(record.get("data/dropped", 0) for record in records) > 0
    assert {"reward/task/count", "reward/task/say"} <= set().union(*records)
    assert "left out: row n" in done.output

    again = harness.write(streamed(tmp_path / "b" / "run", media_workers=1), tmp_path / "b" / "tiny.yaml")
    done = harness.run_mmrl("train", again, fault=("mmrl.learner.learner:PolicyLearner.step", 10, "SIGKILL"))
    assert done.code == -signal.SIGKILL
    assert in_process("train", again).code == 0
    assert harness.reproducible_files(tmp_path / "b" / "run") == harness.reproducible_files(tmp_path / "a" / "run")


def test_a_bad_row_of_a_stream_stops_the_run_by_name(tmp_path, in_process):
    done = harness.refuse(
        in_process("train", harness.write(streamed(tmp_path / "run", on_bad_sample="stop"), tmp_path / "tiny.yaml"))
    )
    assert re.search(r"row n\d+: unlucky; repair it, or leave such rows out with data.on_bad_sample=skip", done.errors)


@pytest.mark.slow
@pytest.mark.parametrize("signal_sent", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_run(tmp_path, signal_sent):
    config = harness.experiment(
        tmp_path / "run", stages=[harness.rl_stage(steps=10_000, max_steps_without_signal=10_000)]
    )
    config["data"]["media_workers"] = 1
    run = Forked(["-m", "mmrl", "train", harness.write(config, tmp_path / "tiny.yaml")], session=True)
    wait_for(lambda: (tmp_path / "run" / "timings.jsonl").exists() and len(harness.metrics(tmp_path / "run")) > 3)
    if signal_sent is signal.SIGINT:
        os.killpg(run.pid, signal_sent)  # as a terminal does: every process gets it
    else:
        os.kill(run.pid, signal_sent)
    _, errors = run.communicate(PATIENCE_S)
    assert run.returncode == (128 + signal_sent if signal_sent is signal.SIGINT else -signal_sent)
    wait_for(lambda: not group_lives(run.pid))
    assert "Traceback" not in errors


def group_lives(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    return True

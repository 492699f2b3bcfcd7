"""A run of several processes: it ends together, however it ends, and continues with any number of them."""

import json
import re
import shutil
import signal
import subprocess
import sys

import pytest
from harness import (
    check_metrics_alike,
    counting,
    experiment,
    metrics,
    moved_parts,
    processes_in,
    refuse,
    rl_stage,
    run_mmrl,
    sft_stage,
    succeed,
    train_and_signal,
    write,
)
from waiting import PATIENCE_S

from mmrl.checkpoint import find_latest
from mmrl.distributed import launch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("engine", [None, {"zero_stage": 3}], ids=["torch", "zero3"])
def test_lost_rank_ends_the_run_and_one_process_continues(engine, whole, tmp_path, in_process):
    if engine:
        pytest.importorskip("deepspeed")
    config = write(experiment(tmp_path / "run", deepspeed=engine), tmp_path / "tiny.yaml")
    done = train_and_signal(config, tmp_path / "run", signal.SIGKILL, rank=1)
    assert done.code == 128 + signal.SIGKILL
    assert "rank 1 was ended by SIGKILL; all are stopped" in done.errors
    assert "mmrl: error: rank 0" in done.errors
    assert "it continues from the last checkpoint" in done.errors
    assert "Traceback" not in done.errors
    assert processes_in(tmp_path) == []
    done = (run_mmrl if engine else in_process)("train", config)  # DeepSpeed leaves traces in its process
    assert done.code == 0, done.errors
    assert "Resuming from" in done.output
    check_metrics_alike(metrics(tmp_path / "run"), metrics(whole))


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
DEEPSPEED = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port"]


@pytest.mark.parametrize(
    "engine", [None, {"zero_stage": 2}, {"zero_stage": 2, "offload_optimizer": True}, {"zero_stage": 3}]
)
def test_two_processes_leave_what_a_stage_freezes_as_it_is(tmp_path, engine):
    if engine:
        pytest.importorskip("deepspeed")
    optimizer = {"lr": 3e-3, "weight_decay": 0.1}  # decay would move weights that get no gradient
    options = {"loss": {"entropy": {"coef": 0.1}}, "optimizer": optimizer}
    stages = [sft_stage(steps=1), rl_stage(steps=2, freeze=["vision", "projector"], **options)]
    stages.append(rl_stage(name="tower", steps=2, freeze=["language"], **options))
    saving = {"every": 1, "keep_last": 9}
    sections = {"stages": stages, "deepspeed": engine, "checkpoints": saving}
    config = write(experiment(tmp_path / "run", **sections), tmp_path / "tiny.yaml")
    succeed(run_mmrl("train", config, "--nproc", 2))
    assert moved_parts(tmp_path / "run", "01-000000", "02-000000") == {"model.language_model"}
    assert moved_parts(tmp_path / "run", "02-000000", "03-000000") == {"model.visual"}
    norms = [record["learner/grad_norm/vision"] > 0 for record in metrics(tmp_path / "run") if "learner/loss" in record]
    assert norms == [True, False, False, True, True]
    # Stopped in the last stage, it resumes with the moments of what is trained there.
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    for folder in ("checkpoints/02-000002", "checkpoints/03-000000", "model"):
        shutil.rmtree(tmp_path / "run" / folder)
    done = succeed(run_mmrl("train", config, "--nproc", 2))
    assert "02-000001: stage tower, step 1" in done.output
    check_metrics_alike(metrics(tmp_path / "run"), metrics(tmp_path / "whole"))


@pytest.mark.parametrize(("launcher", "module"), [(TORCHRUN, ["-m"]), (DEEPSPEED, ["--module"])])
def test_other_launchers_start_the_same_run(launcher, module, tmp_path):
    data = {"train": [counting("train", 6)], "test": [counting("test", 2)]}
    stages = [sft_stage(steps=2), rl_stage(steps=2)]
    config = write(experiment(tmp_path / "run", data=data, stages=stages), tmp_path / "tiny.yaml")
    if "deepspeed" in launcher[1]:
        pytest.importorskip("deepspeed")
    words = [sys.executable, *launcher, str(launch.find_free_port()), *module, "mmrl", "train", str(config)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [(record["stage"], record["step"]) for record in metrics(tmp_path / "run") if "learner/lr" in record]
    assert steps == [("cold", 1), ("cold", 2), ("rl", 1), ("rl", 2)]  # once, though two processes made them
    assert done.stdout.count("Stage rl ended after 2 steps") == 1


def test_ranks_without_their_launcher_save_and_end(tmp_path):
    """They notice within a second, in a stage that lasts much longer."""
    stages = [sft_stage(steps=100_000)]
    config = write(experiment(tmp_path / "run", checkpoints={"every": 50}, stages=stages), tmp_path / "tiny.yaml")
    done = train_and_signal(config, tmp_path / "run", signal.SIGKILL, rank=None)
    assert done.code == -signal.SIGKILL
    # The output ends with the ranks, which hold the launcher's pipes.
    assert f"Saved. Continue with: mmrl train {config} --nproc 2\n" in done.output
    assert processes_in(tmp_path) == []
    assert find_latest(tmp_path / "run" / "checkpoints", pytest.fail) is not None


def test_stopped_run_is_saved_and_two_processes_continue(whole, tmp_path):
    """Under ZeRO-2: stopped by a signal, continued by a single process, stopped again, finished by two."""
    pytest.importorskip("deepspeed")
    sections = {"deepspeed": {"zero_stage": 2}, "checkpoints": {"every": 50, "keep_last": 2}}
    config = write(experiment(tmp_path / "run", **sections), tmp_path / "tiny.yaml")
    done = train_and_signal(config, tmp_path / "run", signal.SIGTERM, rank=None, lines=2)
    assert done.code == 128 + signal.SIGTERM, done.errors
    assert f"Saved. Continue with: mmrl train {config} --nproc 2\n" in done.output
    assert processes_in(tmp_path) == []
    done = run_mmrl("train", config, fault=("mmrl.learner.learner:PolicyLearner.step", 4, "SIGINT"))
    assert done.code == 128 + signal.SIGINT, done.errors
    succeed(run_mmrl("train", config, "--nproc", 2))
    check_metrics_alike(metrics(tmp_path / "run"), metrics(whole))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["tasks"]


def test_user_error_is_reported_and_ends_all_ranks(tmp_path):
    config = experiment(tmp_path / "run")
    config["data"]["train"][0]["args"]["size"] = 2
    done = refuse(run_mmrl("train", write(config, tmp_path / "tiny.yaml"), "--nproc", 2), "mmrl: error: ")
    assert "Traceback" not in done.errors
    assert not (tmp_path / "run").exists()


def test_error_of_one_rank_in_a_step_ends_the_other_without_waiting_for_its_deadline(tmp_path):
    """The connection that closes with the first process fails the exchange in which the second one waits."""
    lines = [
        "import os",
        "from mmrl import RewardValue, reward",
        "@reward(name='fails')",
        "def fails(response, sample):",
        "    if os.environ['RANK'] == '1' and response.text:",
        "        raise KeyError('only here')",
        "    return RewardValue(1.0, 'fine')",
    ]
    (tmp_path / "rewards.py").write_text("\n".join(lines))
    config = experiment(tmp_path / "run", stages=[rl_stage(steps=2)])
    config["rewards"] |= {"terms": [{"fn": "./rewards.py:fails"}], "on_error": "stop"}
    done = refuse(run_mmrl("train", write(config, tmp_path / "tiny.yaml"), "--nproc", 2), "KeyError: 'only here'")
    # The launcher would kill it after some seconds, before it could say this.
    assert re.search(r"mmrl: error: rank 0, waiting in all_gather after: .*, lost another", done.errors)
    assert "Traceback" not in done.errors

"""Runs that generate the next step's rollouts while this one learns: a stopped one ends with the same bytes."""

import shutil
import signal
from pathlib import Path
from typing import Any

import harness
import pytest
from interrupts import train_until_signal
from rounding import LOGPROBS
from zoom_runs import check_all_occurred, learned_steps, logprob_checks

from mmrl.checkpoint.snapshot import load_state
from mmrl.rollout.engine_sampler import EngineSampler
from mmrl.training.async_rollouts import AsyncRollouts, PendingBatch

pytestmark = pytest.mark.slow

RETHINK = {"kind": "rethink", "correct": ["count"], "max_new_tokens": 6, "triggers": [{"text": " Wait."}]}
COLD = harness.sft_stage(validation={"every": 4, "stop_at_mean_reward": 0.8})
STEPS = 6
RECOMPUTED = {"old_logprobs": "recomputed", "rollout_correction": {"method": "tis"}}


def async_config(run_dir: Path, **options: Any) -> dict[str, Any]:
    """A cold start, then asynchronous steps; the entropy bonus moves the weights, whatever is rewarded."""
    loss = {"kl": {"coef": 0.05}, "entropy": {"coef": 0.02}, **options.pop("loss", {})}
    rl = harness.rl_stage(
        steps=STEPS, async_rollouts=True, loss=loss, **{"optimizer": harness.scheduled(3e-3, STEPS), **options}
    )
    return harness.experiment(run_dir, stages=[COLD, rl], checkpoints={"every": 2, "keep_last": 20})


def full_config(run_dir: Path) -> dict[str, Any]:
    """Everything that reads or changes what a step is made of."""
    config = async_config(
        run_dir,
        rollout_steps=[
            {"kind": "generate"},
            {**RETHINK, "fraction": 0.5},
            {"kind": "probe", "corruption": "grey", "every": 2},
        ],
        dynamic_sampling={"ranges": [{"term": "format", "low": 0.0, "high": 1.0}], "max_rounds": 2},
        optimizer=harness.scheduled(1e-3, STEPS),
        replay={"capacity": 32},
        track_rewards=["count"],
        data_order={"kind": "priority"},
        validation={"every": 3},
    )
    # By default the copy that samples is not checked.
    return {**config, "rollout": {"logprob_check": {"every": 2, "max_new_tokens": 2}}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The directory of a run that was not interrupted."""
    return harness.undisturbed(tmp_path_factory, "async", full_config)


def test_rollouts_are_one_version_old_from_the_second_step_on(whole):
    steps = learned_steps(whole)
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    staleness = [record["rollout/staleness_max"] for record in steps if "rollout/staleness_max" in record]
    assert staleness[0] == 0.0 and 1.0 in staleness and max(staleness) <= 2.0  # 2: carried over by the filter
    assert any("validation/mean" in record for record in harness.metrics(whole))
    harness.check_records(whole)
    assert len((whole / "rollouts" / "rl-000003-validation.jsonl").read_text().splitlines()) > 0
    is_stale = ["rollout/stale_logprob_diff_mean" in record for record in steps if record["learner/loss"]]
    assert not is_stale[0] and all(is_stale[1:])
    checks = logprob_checks(whole)
    assert len(checks) >= STEPS // 2 and max(checks) < LOGPROBS
    assert any(name.startswith("probe/blind_gap/grey/") for record in steps for name in record)
    check_all_occurred(steps, "rethink/attempted")


def test_checkpoints_have_the_next_batch_except_the_last(whole):
    assert load_state(whole / "checkpoints" / "01-000006").next_batch is None
    next_batch = load_state(whole / "checkpoints" / "01-000004").next_batch
    assert next_batch is not None and len(next_batch.groups) == 4


@pytest.mark.parametrize(
    ("owner", "method", "nth", "signals"),
    [(AsyncRollouts, "start", 4, (signal.SIGTERM,)), (PendingBatch, "wait", 5, (signal.SIGINT,) * 2)],
    ids=["before the fifth step is generated", "twice after the sixth is generated"],
)
def test_run_stopped_while_steps_overlap_ends_like_the_whole_one(
    tmp_path, whole, in_process, owner, method, nth, signals
):
    config = harness.write(full_config(tmp_path / "run"), tmp_path / "tiny.yaml")
    train_until_signal(in_process, config, owner, method, nth, *signals)
    assert max(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == "01-000004"
    done = harness.succeed(in_process("train", config))
    assert "01-000004: stage rl, step 4" in done.output
    assert harness.reproducible_files(tmp_path / "run") == harness.reproducible_files(whole)


def resume_with_two_ranks(in_process: harness.Command, config: Path, owner: type, method: str, nth: int) -> None:
    """Stop a run of one process at a call, and end it with two ranks."""
    train_until_signal(in_process, config, owner, method, nth, signal.SIGINT)
    harness.succeed(harness.run_mmrl("train", config, "--nproc", 2))


def test_two_ranks_share_what_one_process_generated_ahead(tmp_path, in_process):
    replay, sampling = {"capacity": 32, "old_logprobs": "recomputed"}, {"max_new_tokens": 6, "temperature": 0.6}
    options = {"num_mini_batches": 2, "loss": RECOMPUTED, "replay": replay, "sampling": sampling}
    once, twice = (
        harness.write(async_config(tmp_path / name, **options), tmp_path / f"{name}.yaml") for name in ("1", "2")
    )
    assert in_process("train", once).code == 0
    steps = learned_steps(tmp_path / "1")
    for name in ("rollout/staleness_max", "rollout/staleness_mean"):
        assert [record[name] for record in steps] == [0.0] + [1.0] * (STEPS - 1)
    assert ["rollout/logprob_diff_mean" in record for record in steps] == [True] + [False] * (STEPS - 1)
    assert ["rollout/stale_logprob_diff_mean" in record for record in steps] == [False] + [True] * (STEPS - 1)
    check_all_occurred(steps, "replay/frac")
    resume_with_two_ranks(in_process, twice, AsyncRollouts, "start", 3)
    harness.check_metrics_alike(harness.metrics(tmp_path / "2"), harness.metrics(tmp_path / "1"))


def test_two_ranks_share_what_one_process_left_unfinished(tmp_path, in_process):
    """Then they continue as one process does, whichever rank opens the images."""
    rl = harness.rl_stage(
        steps=STEPS,
        rollout_steps=[
            {"kind": "generate", "partial_rollout_tokens": 2, "oversampling": 1.5, "max_tokens_per_step": 60}
        ],
        group_size=2,
        sampling={"max_new_tokens": 16, "temperature": 1.2},
        loss={"entropy": {"coef": 0.02}, **RECOMPUTED},
        num_mini_batches=2,
        optimizer=harness.scheduled(3e-3, STEPS),
    )
    once, twice = (harness.experiment(tmp_path / name, stages=[COLD, rl]) for name in ("once", "twice"))
    twice["data"]["media_workers"] = 1
    assert in_process("train", harness.write(once, tmp_path / "once.yaml")).code == 0
    steps = learned_steps(tmp_path / "once")
    assert steps[0]["rollout/unfinished_groups"] > 0
    staleness = [record["rollout/staleness_max"] for record in steps]
    assert staleness[0] == 0.0 and max(staleness) >= 1.0
    resume_with_two_ranks(in_process, harness.write(twice, tmp_path / "twice.yaml"), EngineSampler, "sync", 1)
    harness.check_metrics_alike(harness.metrics(tmp_path / "twice"), harness.metrics(tmp_path / "once"))


def test_lengthened_run_says_whether_it_ends_like_a_longer_one(tmp_path, in_process):
    """The last step of the shorter run generates nothing ahead; from an earlier checkpoint both are the same."""
    longer, run_dir = "stages.rl.steps=7", tmp_path / "run"
    config = harness.write(full_config(run_dir), tmp_path / "tiny.yaml")
    assert in_process("train", config).code == 0
    shutil.copytree(run_dir, tmp_path / "short")
    done = harness.succeed(in_process("train", config, longer))
    assert "Stage rl will end with other bytes than one that had 7 steps from the start" in done.output
    shutil.rmtree(run_dir)
    shutil.copytree(tmp_path / "short", run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "01-000006")
    done = harness.succeed(in_process("train", config, longer))
    assert "01-000004: stage rl, step 4" in done.output
    assert "The stage will end like one that had so many steps from the start." in done.output
    assert in_process("train", config, longer, "--run-dir", tmp_path / "fresh").code == 0
    assert harness.reproducible_files(run_dir) == harness.reproducible_files(tmp_path / "fresh")

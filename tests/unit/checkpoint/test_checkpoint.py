"""Checkpoints: complete or absent, whatever the disk does, and exact."""

import json
import os
import resource
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from thread_ranks import run_on_ranks
from torch import nn
from waiting import wait_for

from mmrl import checkpoint
from mmrl.checkpoint import CheckpointManager, CheckpointWeights, Snapshot
from mmrl.checkpoint.atomic_folder import atomic_folder, find_damage, merge_part_hashes
from mmrl.checkpoint.snapshot import part_file_names, write_part
from mmrl.config.schema import BestCheckpointConfig, CheckpointsConfig
from mmrl.distributed.ranks import SingleProcess, balanced_range
from mmrl.types import TrainingState, UserError

FILES = (
    *("hashes.json", "model.safetensors", "optimizer.pt", "rng.pt", "state.json", "ranking_metric.json"),
    "config.yaml",
)
ASYNC = CheckpointsConfig(async_save=True)
BEST = BestCheckpointConfig(metric="m")


def train_net(seed):
    """Return a small net with tied weights, and an optimizer that has moments."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7, bias=False))
    net[1].weight = net[0].weight
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(3):
        net(torch.arange(7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def weights_of(net):
    return CheckpointWeights(trainable=dict(net.named_parameters()))


def make_snapshot(seed=0, score=None, **state):
    net, optimizer = train_net(seed)
    return Snapshot(
        weights=weights_of(net),
        optimizer={"moments": optimizer.state_dict()["state"]},
        rng=checkpoint.read_rng_states(),
        state=TrainingState(**state),
        config_yaml="run:",
        ranking_metric=score,
    )


def write_checkpoint(folder, snapshot):
    """Write a checkpoint of one process under any name."""
    with atomic_folder(folder) as partial_folder:
        write_part(partial_folder, snapshot, SingleProcess())
        merge_part_hashes(partial_folder, part_file_names(1))


def save(folder, seed=0, **state):
    """Write a checkpoint and return its net."""
    write_checkpoint(folder, make_snapshot(seed, **state))
    return train_net(seed)[0]


def save_two(folder):
    """Write two checkpoints; return the folder of the newer one."""
    for name in ("00-000001", "00-000002"):
        save(folder / name)
    return folder / "00-000002"


def refuse_warnings(text):
    raise AssertionError(text)


def do_nothing():
    pass


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def step_of(folder):
    return checkpoint.load_state(folder).step


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x81
    path.write_bytes(content)


# What a checkpoint holds


def test_loaded_checkpoint_equals_the_saved_one_bit_for_bit(tmp_path):
    net, optimizer = train_net(1)
    state = TrainingState(
        stage_index=1,
        step=7,
        data_position=70,
        version=9,
        steps_without_signal=2,
        metrics_bytes=11,
        eval_rewards={"before": {"count": {"a": 0.1 + 0.2, "b": 1 / 3}}},
    )
    tables = {"moments": optimizer.state_dict()["state"], "masters": {}}
    snapshot = replace(make_snapshot(), weights=weights_of(net), optimizer=tables, state=state)
    write_checkpoint(tmp_path / "c", replace(snapshot, rng=checkpoint.read_rng_states()))
    random_numbers = torch.rand(4)
    other, _ = train_net(2)
    found_state, found_tables = checkpoint.load_checkpoint(tmp_path / "c", weights=weights_of(other))
    assert found_state == state
    assert torch.equal(torch.rand(4), random_numbers)
    assert torch.equal(other[0].weight, net[0].weight)
    assert other[1].weight is other[0].weight
    assert found_tables.keys() == tables.keys() and found_tables["masters"] == {}
    saved, found = tables["moments"][0], found_tables["moments"][0]
    assert saved.keys() == found.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(saved[key], found[key]) for key in saved)


def test_optimizer_table_of_another_version_is_refused(tmp_path):
    write_checkpoint(tmp_path / "c", replace(make_snapshot(), optimizer={"optimizer": {"state": {}}}))
    with pytest.raises(UserError, match=r"optimizer.pt holds 'optimizer'.* version"):
        checkpoint.load_checkpoint(tmp_path / "c", weights=weights_of(train_net(1)[0]))


def test_mapped_weights_are_memory_of_the_files_and_outlive_them(tmp_path):
    net, other = save(tmp_path / "c"), train_net(1)[0]
    _, tables = checkpoint.load_checkpoint(tmp_path / "c", weights=weights_of(other), mmap=True)
    moments = tables["moments"]
    assert mapped_file(other[0].weight) == str(tmp_path / "c" / "model.safetensors")
    assert mapped_file(moments[0]["exp_avg"]) == str(tmp_path / "c" / "optimizer.pt")
    shutil.rmtree(tmp_path / "c")
    assert torch.equal(other[0].weight, net[0].weight)
    moments[0]["exp_avg"].add_(1.0)


def mapped_file(tensor):
    """Return the file that a tensor's memory is a map of."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        extent, *_, name = line.split(maxsplit=5)
        start, end = (int(edge, 16) for edge in extent.split("-"))
        if start <= tensor.data_ptr() < end:
            return name
    raise AssertionError("the tensor is not in a map")


def test_snapshot_on_the_cpu_does_not_change_with_the_run(tmp_path):
    net, optimizer = train_net(1)
    state = TrainingState(step=1, eval_rewards={"before": {"count": {"a": 0.5}}})
    tables = {"moments": optimizer.state_dict()["state"]}
    live = Snapshot(weights=weights_of(net), optimizer=tables, rng=checkpoint.read_rng_states(), state=state)
    copied = checkpoint.copy_to_cpu(live)
    write_checkpoint(tmp_path / "before", live)
    with torch.no_grad():
        net[0].weight.add_(1.0)
    optimizer.state_dict()["state"][0]["exp_avg"].add_(1.0)
    state.step, state.eval_rewards["before"]["count"]["a"] = 2, 0.0
    write_checkpoint(tmp_path / "after", copied)
    before, after = ((tmp_path / name / "hashes.json").read_text() for name in ("before", "after"))
    assert before == after


# Finding and pruning


@pytest.mark.parametrize(
    ("saved", "newest"),
    [
        (("00-000100", "01-000000", "00-000200"), "01-000000"),
        (("00-999999", "00-1000000", "00-20000000"), "00-20000000"),  # compared as numbers
        (("99-000005", "100-000000"), "100-000000"),
    ],
)
def test_newest_checkpoint_is_found_and_kept(tmp_path, saved, newest):
    for name in saved:
        save(tmp_path / name)
    (tmp_path / "mine").mkdir()  # not named like a checkpoint, so it must stay
    assert checkpoint.find_latest(tmp_path, refuse_warnings) == tmp_path / newest
    checkpoint.prune_checkpoints(tmp_path, CheckpointsConfig(keep_last=1))
    assert names(tmp_path) == [newest, "mine"]


def test_no_checkpoints_are_none(tmp_path):
    assert checkpoint.find_latest(tmp_path / "nowhere", refuse_warnings) is None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-9]), flip_last_byte])
def test_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, name, damage):
    damage(save_two(tmp_path) / name)
    warnings = []
    assert checkpoint.find_latest(tmp_path, warnings.append) == tmp_path / "00-000001"
    [warning] = warnings
    assert "00-000002 is damaged" in warning


@pytest.mark.parametrize("name", FILES)
def test_checkpoint_that_a_disk_does_not_return_is_skipped_on_all_ranks(tmp_path, name):
    """The first bytes of a process's memory cannot be read, as on a disk that fails."""
    path = save_two(tmp_path) / name
    path.unlink()
    path.symlink_to("/proc/self/mem")

    def find(ranks):
        warnings = []
        return checkpoint.find_latest(tmp_path, warnings.append, ranks), warnings

    for found, [warning] in run_on_ranks(2, find):
        assert found == tmp_path / "00-000001"
        assert f"00-000002 is damaged ({name} cannot be read: Input/output error)" in warning


def test_damaged_checkpoint_that_was_skipped_does_not_push_out_new_ones(tmp_path):
    for name in ("00-000002", "00-000006", "01-000000"):
        save(tmp_path / name)
    for name in ("00-000006", "01-000000"):
        flip_last_byte(tmp_path / name / "rng.pt")
    resumed = checkpoint.find_latest(tmp_path, [].append)
    assert resumed == tmp_path / "00-000002"
    with CheckpointManager(tmp_path, CheckpointsConfig(keep_last=1), refuse_warnings) as manager:
        assert checkpoint.set_aside_later(tmp_path, resumed) == tmp_path / "damaged"
        manager.save(make_snapshot(step=4), before_write=do_nothing)
    assert names(tmp_path) == ["00-000004", "damaged"]
    assert names(tmp_path / "damaged") == ["00-000006", "01-000000"]
    assert checkpoint.find_latest(tmp_path, refuse_warnings) == tmp_path / "00-000004"
    assert checkpoint.set_aside_later(tmp_path, tmp_path / "00-000004") is None


@pytest.mark.parametrize("content", ["{}", "[]", '"hashes"', "", "null", None])
def test_checkpoint_without_hashes_is_damaged(tmp_path, content):
    newest = save_two(tmp_path)
    if content is None:
        shutil.rmtree(newest)
        newest.mkdir()
    else:
        (newest / "hashes.json").write_text(content)
    warnings = []
    assert checkpoint.find_latest(tmp_path, warnings.append) == tmp_path / "00-000001"
    assert "hashes.json" in warnings[0] or "does not match its hash" in warnings[0]


def test_run_does_not_start_over_because_every_checkpoint_is_damaged(tmp_path):
    save_two(tmp_path)
    for folder in list(tmp_path.iterdir()):
        (folder / "rng.pt").unlink()
    warnings = []
    with pytest.raises(UserError, match=r"00-000002 is damaged \(rng.pt is missing\)"):
        checkpoint.find_latest(tmp_path, warnings.append)
    assert len(warnings) == 2


SCORES = (0.2, None, 0.9, 0.9, 0.1, 0.5)


@pytest.fixture(scope="module")
def six_checkpoints(tmp_path_factory):
    """A folder of six checkpoints with SCORES."""
    folder = tmp_path_factory.mktemp("six")
    for step, score in enumerate(SCORES):
        save(folder / f"00-{step:06d}", score=score)
    return folder


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep_last": 2}, [4, 5]),
        ({"keep_last": 9}, [0, 1, 2, 3, 4, 5]),
        ({"keep_last": 1, "keep_every": 2}, [2, 4, 5]),
        ({"keep_last": 1, "best": BEST}, [2, 5]),
        ({"keep_last": 1, "best": BestCheckpointConfig(metric="m", mode="min")}, [4, 5]),
        ({"keep_last": 1, "keep_every": 3, "best": BestCheckpointConfig(metric="m", mode="min")}, [3, 4, 5]),
    ],
)
def test_pruning_keeps_the_last_the_best_and_every_nth(tmp_path, six_checkpoints, options, kept):
    folder = Path(shutil.copytree(six_checkpoints, tmp_path / "checkpoints"))
    (folder / ".00-000009.partial").mkdir()
    (folder / ".00-000004.retired").mkdir()
    checkpoint.prune_checkpoints(folder, CheckpointsConfig(**options))
    assert names(folder) == [f"00-{step:06d}" for step in kept]


@pytest.mark.parametrize(("name", "step"), [(None, 5), ("00-000001", 1), ("best", 2)])
def test_checkpoint_is_found_by_its_name(six_checkpoints, name, step):
    assert checkpoint.find_checkpoint(six_checkpoints, name, BEST, refuse_warnings).name == f"00-{step:06d}"


@pytest.mark.parametrize(("name", "best"), [("00-000007", BEST), ("best", None)])
def test_unknown_checkpoint_is_refused_with_those_that_exist(six_checkpoints, name, best):
    with pytest.raises(UserError, match=rf"no checkpoint '{name}'.* 00-000000, .*00-000005"):
        checkpoint.find_checkpoint(six_checkpoints, name, best, refuse_warnings)


def test_checkpoint_with_a_damaged_score_is_not_the_best_or_refused(tmp_path, six_checkpoints):
    folder = Path(shutil.copytree(six_checkpoints, tmp_path / "checkpoints"))
    for step, content in ((2, "0."), (3, '"high"')):
        (folder / f"00-00000{step}" / "ranking_metric.json").write_text(content)
    assert checkpoint.find_checkpoint(folder, "best", BEST, refuse_warnings).name == "00-000005"
    (folder / "00-000002" / "ranking_metric.json").write_text("0.95")
    with pytest.raises(UserError, match=r"00-000002 is damaged \(ranking_metric.json"):
        checkpoint.find_checkpoint(folder, "best", BEST, refuse_warnings)


# Saving in the background


def test_run_continues_during_a_write_in_the_background_and_the_next_write_waits(tmp_path):
    may_write, events = Event(), []
    with CheckpointManager(tmp_path, ASYNC, refuse_warnings) as manager:
        manager.save(make_snapshot(step=1), before_write=lambda: events.append(may_write.wait(10)))
        manager.commit_if_written()
        assert names(tmp_path) == [".00-000001.partial"] and not names(tmp_path / ".00-000001.partial")
        may_write.set()
        manager.save(make_snapshot(step=2), before_write=lambda: events.append(names(tmp_path)))
    assert events == [True, [".00-000002.partial", "00-000001"]]
    assert names(tmp_path) == ["00-000001", "00-000002"]


def test_failure_in_the_background_is_raised_at_the_next_step(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    folder.parent.mkdir()
    with pytest.raises(UserError, match=r"cannot save .*00-000002"), CheckpointManager(folder, ASYNC, print) as manager:
        manager.save(make_snapshot(step=1), before_write=do_nothing)
        manager.wait()
        manager.save(make_snapshot(step=2), before_write=(folder / ".00-000002.partial").rmdir)
        while True:  # as the loop does, step after step
            manager.commit_if_written()
    assert checkpoint.find_latest(folder, refuse_warnings) == folder / "00-000001"


def test_failure_in_the_background_does_not_hide_what_ended_the_run(tmp_path):
    warnings = []
    with pytest.raises(KeyboardInterrupt), CheckpointManager(tmp_path, ASYNC, warnings.append) as manager:
        manager.save(make_snapshot(step=2), before_write=(tmp_path / ".00-000002.partial").rmdir)
        raise KeyboardInterrupt
    [warning] = warnings
    assert "cannot save" in warning


def test_deleted_run_directory_is_not_made_again(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    with pytest.raises(UserError, match="run was deleted"), CheckpointManager(folder, ASYNC, print) as manager:
        manager.save(make_snapshot(step=1), before_write=do_nothing)
    assert names(tmp_path) == []


# Several ranks

SIZES, RNG = (5, 1, 40, 3, 3, 30, 2), checkpoint.read_rng_states()


def part_of(ranks, step):
    """Return this rank's part of seven weights; the values of each are its index."""
    own = balanced_range(SIZES, ranks)
    weights = {f"w{index}": torch.full((SIZES[index],), float(index)) for index in own}
    moments = {index: {"exp_avg": torch.full((SIZES[index],), index / 2)} for index in own}
    tables = {"moments": moments, "masters": {}}
    own_weights = CheckpointWeights(trainable=weights)
    return Snapshot(weights=own_weights, optimizer=tables, rng=RNG, state=TrainingState(step=step))


def save_twice(folder, ranks, *, is_async=False):
    with CheckpointManager(folder, CheckpointsConfig(async_save=is_async), refuse_warnings, ranks) as manager:
        for step in (1, 2):
            manager.save(part_of(ranks, step), before_write=do_nothing)
        while manager._writing:  # as the loop does, step after step
            manager.commit_if_written()
        assert checkpoint.find_latest(folder, refuse_warnings).name == "00-000002"


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_each_rank_writes_its_part_and_any_number_of_ranks_can_continue(tmp_path, count, is_async):
    """Nine ranks are more than there are weights."""
    run_on_ranks(count, partial(save_twice, tmp_path, is_async=is_async))
    assert names(tmp_path) == ["00-000001", "00-000002"]
    assert len(names(tmp_path / "00-000002")) == 5 + 2 * count
    weights = {f"w{index}": torch.zeros(size) for index, size in enumerate(SIZES)}
    state, tables = checkpoint.load_checkpoint(tmp_path / "00-000002", weights=CheckpointWeights(trainable=weights))
    assert state.step == 2
    assert list(tables["moments"]) == list(range(len(SIZES))) and tables["masters"] == {}
    for index, size in enumerate(SIZES):
        assert torch.equal(weights[f"w{index}"], torch.full((size,), float(index)))
        assert torch.equal(tables["moments"][index]["exp_avg"], torch.full((size,), index / 2))


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "optimizer-00003-of-00003.pt", "state.json"])
def test_ranks_check_a_checkpoint_together_and_agree(tmp_path, name):
    run_on_ranks(3, partial(save_twice, tmp_path))
    warnings = []

    def find_on_two_ranks():
        found = run_on_ranks(2, lambda ranks: checkpoint.find_latest(tmp_path, warnings.append, ranks))
        return [folder.name for folder in found]

    assert find_on_two_ranks() == ["00-000002"] * 2 and not warnings
    flip_last_byte(tmp_path / "00-000002" / name)
    assert find_on_two_ranks() == ["00-000001"] * 2
    assert len(warnings) == 2 and f"00-000002 is damaged ({name}" in warnings[0]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
def test_rank_that_cannot_write_ends_all_and_leaves_the_checkpoint_before(tmp_path, failing, is_async):
    def save_and_fail(ranks):
        def fail():
            if ranks.rank == failing:
                raise OSError(28, "No space left on device")

        options = CheckpointsConfig(async_save=is_async)
        with CheckpointManager(tmp_path, options, refuse_warnings, ranks) as manager:
            manager.save(part_of(ranks, 1), before_write=do_nothing)
            with pytest.raises(UserError, match="00-000002: No space left on device .*free some space"):
                manager.save(part_of(ranks, 2), before_write=fail)
                manager.wait()

    run_on_ranks(2, save_and_fail)
    assert names(tmp_path) == ["00-000001"]


def test_write_of_several_ranks_is_abandoned_when_one_of_them_fails(tmp_path):
    """No rank waits for one that will not come."""
    failed = Event()

    def save_and_raise(ranks):
        with pytest.raises(ValueError, match="a bug"), CheckpointManager(tmp_path, ASYNC, print, ranks) as manager:
            manager.save(part_of(ranks, 1), before_write=do_nothing)
            manager.wait()
            manager.save(part_of(ranks, 2), before_write=lambda: failed.wait(60) if ranks.rank else None)
            raise ValueError("a bug, or its effect on the others")
        failed.set()

    run_on_ranks(2, save_and_raise)
    assert names(tmp_path) == [".00-000002.partial", "00-000001"]


def test_checkpoint_of_several_ranks_is_completed_in_the_background(tmp_path):
    def save_and_look(ranks):
        with CheckpointManager(tmp_path, ASYNC, refuse_warnings, ranks) as manager:
            manager.save(part_of(ranks, 1), before_write=do_nothing)
            wait_for((tmp_path / "00-000001").exists)

    run_on_ranks(3, save_and_look)
    assert checkpoint.find_latest(tmp_path, refuse_warnings) == tmp_path / "00-000001"
    assert not [name for name in names(tmp_path / "00-000001") if name.startswith("part")]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 48])
def test_no_rank_has_more_than_an_even_share_and_one_item(count):
    sizes = [7, 1, 1, 500, 20, 300, 0, 300, 2, 60, 60, 60, 0]
    parts = [balanced_range(sizes, SimpleNamespace(rank=rank, size=count)) for rank in range(count)]
    assert [index for part in parts for index in part] == list(range(len(sizes)))
    assert all(sum(sizes[index] for index in part) <= sum(sizes) / count + max(sizes) for part in parts)
    assert balanced_range([], SimpleNamespace(rank=0, size=count)) == range(0)


# Replacing a folder, and failures on the way


def test_checkpoint_of_the_same_name_is_replaced(tmp_path):
    save(tmp_path / "c", seed=1, step=1)
    (tmp_path / ".c.retired").mkdir()  # left by a save that was killed at its very end
    (tmp_path / ".c.retired" / "file").touch()
    net = save(tmp_path / "c", seed=2, step=2)
    other, _ = train_net(3)
    state, _ = checkpoint.load_checkpoint(tmp_path / "c", weights=weights_of(other))
    assert state.step == 2 and torch.equal(other[0].weight, net[0].weight)
    assert names(tmp_path) == ["c"]


def test_replacement_that_was_killed_between_its_renames_is_undone(tmp_path):
    save(tmp_path / "00-000001")
    (tmp_path / "00-000001").rename(tmp_path / ".00-000001.retired")
    (tmp_path / ".00-000001.partial").mkdir()
    assert checkpoint.find_latest(tmp_path, refuse_warnings) == tmp_path / "00-000001"


@pytest.mark.parametrize(
    ("failure", "raised"), [(OSError(5, "Input/output error"), UserError), (KeyboardInterrupt, KeyboardInterrupt)]
)
def test_replacement_that_fails_between_its_renames_is_undone(tmp_path, monkeypatch, failure, raised):
    save(tmp_path / "c", step=1)
    rename = Path.rename

    def failing(self, target):
        if self.name == ".c.partial":
            raise failure
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(raised):
        save(tmp_path / "c", step=2)
    assert names(tmp_path) == ["c"] and step_of(tmp_path / "c") == 1


def test_failed_write_leaves_the_old_checkpoint(tmp_path):
    save(tmp_path / "c", step=1)
    with pytest.raises(UserError, match="a checkpoint cannot hold 1j"):
        save(tmp_path / "c", eval_rewards={"before": {"x": 1j}})
    assert names(tmp_path) == ["c"] and step_of(tmp_path / "c") == 1
    assert find_damage(tmp_path / "c", FILES[1:]) is None


def run_in_fork(work, *arguments):
    """Call `work` in a fork of this process, which it may kill or limit; return the exit code and what it returned."""
    with tempfile.TemporaryFile("w+") as returned:
        pid = os.fork()
        if not pid:
            try:
                returned.write(json.dumps(work(*arguments)))
                returned.flush()
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        returned.seek(0)
        return code, returned.read()


class Killer:
    def __reduce__(self):
        os._exit(9)


class Model:
    def save_pretrained(self, folder):
        save_file({"w": torch.zeros(10_000)}, folder / "model.safetensors")


def write_zeros(folder, size=4, optimizer=None, **state):
    weights = CheckpointWeights(trainable={"w": torch.zeros(size)})
    snapshot = Snapshot(weights=weights, optimizer=optimizer or {}, rng={}, state=TrainingState(**state))
    with atomic_folder(folder) as partial_folder:
        write_part(partial_folder, snapshot, SingleProcess())


def fill_disk(folder):
    """Return what is said of writes that fail in the middle: a limit on the size of files, with EFBIG for ENOSPC."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    messages = []
    for attempt in (
        lambda: write_zeros(folder, size=10_000),
        lambda: write_zeros(folder, optimizer={"moments": {0: torch.zeros(10_000)}}),
        lambda: write_zeros(folder, eval_rewards={"before": {"task": {str(i): 0.5 for i in range(3000)}}}),
        lambda: checkpoint.export_hf_folder(folder, Model()),
    ):
        with pytest.raises(UserError) as refused:
            attempt()
        messages.append(str(refused.value))
    return messages


def test_kill_during_a_write_leaves_the_old_checkpoint(tmp_path):
    save(tmp_path / "c", step=1)
    assert run_in_fork(write_zeros, tmp_path / "c", 4, {"x": {0: Killer()}}) == (9, "")
    assert names(tmp_path) == [".c.partial", "c"]
    assert find_damage(tmp_path / "c", FILES[1:]) is None
    save(tmp_path / "c", step=3)
    assert names(tmp_path) == ["c"]


def test_full_disk_is_reported_and_leaves_the_old_checkpoint(tmp_path):
    save(tmp_path / "c", step=1)
    code, messages = run_in_fork(fill_disk, tmp_path / "c")
    assert code == 0
    for message in json.loads(messages):
        assert f"cannot save {tmp_path / 'c'}: File too large" in message and "free some space" in message
    assert names(tmp_path) == ["c"]
    assert find_damage(tmp_path / "c", FILES[1:]) is None


def test_place_that_cannot_hold_folders_is_reported(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "c", Path("/proc/c")):  # not even root may write to /proc
        with pytest.raises(UserError, match=f"cannot save {folder}: .*make the folder writable"):
            save(folder)


# Weights alone


def test_weights_alone_round_trip(tmp_path):
    (net, _), (other, _) = train_net(1), train_net(2)
    checkpoint.save_weights(tmp_path / "w", weights_of(net))
    checkpoint.load_weights(tmp_path / "w", weights_of(other))
    assert torch.equal(other[0].weight, net[0].weight)


def test_weights_of_another_model_are_refused_before_any_is_changed(tmp_path):
    net, _ = train_net(1)
    trained, frozen = {"1.weight": net[1].weight}, {"0.weight": net[0].weight.detach().clone()}
    saved = CheckpointWeights(trainable=trained, frozen_fingerprint=checkpoint.fingerprint_weights(frozen.items()))
    checkpoint.save_weights(tmp_path / "w", saved)
    checkpoint.load_weights(tmp_path / "w", saved)
    before = net[1].weight.detach().clone()
    frozen["0.weight"][3, 2] += 1e-4
    for other in (
        replace(saved, frozen_fingerprint=checkpoint.fingerprint_weights(frozen.items())),
        replace(saved, trainable={**trained, "more": torch.ones(1)}),
        replace(saved, trainable={"1.weight": torch.ones(5, 7)}),
        replace(saved, trainable={}),
    ):
        with pytest.raises(UserError, match=r"saved from another model: .* Restore model.path"):
            checkpoint.load_weights(tmp_path / "w", other)
    assert torch.equal(net[1].weight, before)


def test_fingerprint_depends_on_names_dtypes_shapes_and_values_but_not_on_order():
    weights = {"a": torch.arange(6.0), "b": torch.ones(2)}
    others = [{"c": weights["a"], "b": weights["b"]}, {"a": weights["a"]}]
    for changed in (weights["a"].double(), weights["a"].reshape(2, 3), weights["a"] + 1e-3):
        others.append({**weights, "a": changed})
    fingerprints = [checkpoint.fingerprint_weights(tensors.items()) for tensors in (weights, *others)]
    assert len(set(fingerprints)) == len(fingerprints)
    assert checkpoint.fingerprint_weights(reversed(weights.items())) == fingerprints[0]


def test_export_replaces_the_one_before(tmp_path):
    def part(name):
        return SimpleNamespace(save_pretrained=lambda folder: (folder / name).touch())

    checkpoint.export_hf_folder(tmp_path / "m", part("old"))
    checkpoint.export_hf_folder(tmp_path / "m", part("weights"), part("tokenizer"))
    assert names(tmp_path / "m") == ["tokenizer", "weights"]
    assert names(tmp_path) == ["m"]

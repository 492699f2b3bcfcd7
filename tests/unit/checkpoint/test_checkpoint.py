"""Checkpoints: whole or absent, whatever the disk does, and exact."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier, Event
from time import sleep
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmrl import checkpoint
from mmrl.checkpoint import CheckpointManager, CheckpointWeights, Snapshot, json_codec
from mmrl.checkpoint.atomic_folder import atomic_folder, find_damage, merge_part_hashes
from mmrl.checkpoint.snapshot import part_file_names, write_part
from mmrl.config.schema import BestCheckpointConfig, CheckpointsConfig
from mmrl.distributed.ranks import SingleProcess, balanced_range
from mmrl.types import TrainingState, UserError

FILES = ("hashes.json", "model.safetensors", "optimizer.pt", "rng.pt", "state.json", "score.json", "config.yaml")


def trained(seed):
    """A small net with tied weights, and an optimizer that has moments."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7, bias=False))
    net[1].weight = net[0].weight
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(3):
        net(torch.arange(7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def weights(net):
    return CheckpointWeights(trained=dict(net.named_parameters()))


def snapshot(seed=0, score=None, **state):
    net, optimizer = trained(seed)
    moments, rng = {"moments": optimizer.state_dict()["state"]}, checkpoint.read_rng_states()
    return Snapshot(
        weights=weights(net),
        optimizer=moments,
        rng=rng,
        state=TrainingState(**state),
        config_yaml="run:",
        best_metric=score,
    )


def write_down(folder, taken):
    """A checkpoint of one process under any name, as a shelf makes it."""
    with atomic_folder(folder) as aside:
        write_part(aside, taken, SingleProcess())
        merge_part_hashes(aside, part_file_names(1))


def save(folder, seed=0, **state):
    write_down(folder, snapshot(seed, **state))
    return trained(seed)[0]


def refuse_warnings(text):
    raise AssertionError(text)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_comes_back_bit_for_bit(tmp_path):
    net, optimizer = trained(1)
    evals = {"before": {"count": {"a": 0.1 + 0.2, "b": 1 / 3}}}
    state = TrainingState(
        stage_index=1, step=7, data_position=70, version=9, steps_without_signal=2, metrics_bytes=11, eval_rewards=evals
    )
    kept = {"moments": optimizer.state_dict()["state"], "masters": {}}
    taken = replace(snapshot(), weights=weights(net), optimizer=kept, state=state)
    write_down(tmp_path / "c", replace(taken, rng=checkpoint.read_rng_states()))
    expected = torch.rand(4)
    other, _ = trained(2)
    found, tables = checkpoint.load_checkpoint(tmp_path / "c", weights=weights(other))
    assert found == state
    assert torch.equal(torch.rand(4), expected)
    assert torch.equal(other[0].weight, net[0].weight)
    assert other[1].weight is other[0].weight
    assert tables.keys() == kept.keys() and tables["masters"] == {}
    theirs, ours = kept["moments"][0], tables["moments"][0]
    assert theirs.keys() == ours.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)


def test_what_another_version_saved_is_refused(tmp_path):
    write_down(tmp_path / "c", replace(snapshot(), optimizer={"optimizer": {"state": {}}}))
    with pytest.raises(UserError, match=r"c/optimizer.pt holds 'optimizer', which this version .* does not know"):
        checkpoint.load_checkpoint(tmp_path / "c", weights=weights(trained(1)[0]))


def test_weights_that_will_be_divided_are_the_files_own_and_outlive_it(tmp_path):
    net, other = save(tmp_path / "c"), trained(1)[0]
    _, tables = checkpoint.load_checkpoint(tmp_path / "c", weights=weights(other), mmap=True)
    moments = tables["moments"]
    assert file_behind(other[0].weight) == str(tmp_path / "c" / "model.safetensors")
    assert file_behind(moments[0]["exp_avg"]) == str(tmp_path / "c" / "optimizer.pt")
    shutil.rmtree(tmp_path / "c")
    assert torch.equal(other[0].weight, net[0].weight)
    moments[0]["exp_avg"].add_(1.0)


def file_behind(tensor):
    """What a tensor's memory is a map of."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        extent, *_, name = line.split(maxsplit=5)
        start, end = (int(edge, 16) for edge in extent.split("-"))
        if start <= tensor.data_ptr() < end:
            return name
    raise AssertionError("no memory of this process")


def test_the_newest_whole_checkpoint_is_found(tmp_path):
    for name in ("00-000100", "01-000000", "00-000200"):
        save(tmp_path / name)
    assert checkpoint.find_latest(tmp_path, refuse_warnings) == tmp_path / "01-000000"
    assert checkpoint.find_latest(tmp_path / "nowhere", refuse_warnings) is None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, name, damage):
    save(tmp_path / "00-000001")
    save(tmp_path / "00-000002")
    file = tmp_path / "00-000002" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x81
    match damage:
        case "missing":
            file.unlink()
        case "cut":
            file.write_bytes(content[: len(content) // 2])
        case "flipped":
            file.write_bytes(content)
    warnings = []
    assert checkpoint.find_latest(tmp_path, warnings.append) == tmp_path / "00-000001"
    assert len(warnings) == 1
    assert "00-000002 is damaged" in warnings[0]


def test_hashes_that_leave_a_file_out_do_not_vouch_for_it(tmp_path):
    save(tmp_path / "00-000001")
    save(tmp_path / "00-000002")
    (tmp_path / "00-000002" / "hashes.json").write_text("{}")
    assert checkpoint.find_latest(tmp_path, [].append) == tmp_path / "00-000001"


def test_a_run_does_not_begin_anew_because_every_checkpoint_is_damaged(tmp_path):
    for name in ("00-000001", "00-000002"):
        save(tmp_path / name)
        (tmp_path / name / "rng.pt").unlink()
    warnings = []
    with pytest.raises(UserError, match=r"00-000002 is damaged \(rng.pt is missing\), and no other is whole"):
        checkpoint.find_latest(tmp_path, warnings.append)
    assert len(warnings) == 2


@pytest.mark.parametrize("content", ["{}", "[]", '"hashes"', "", "null"])
def test_hashes_that_say_nothing_do_not_vouch(tmp_path, content):
    save(tmp_path / "00-000001")
    save(tmp_path / "00-000002")
    (tmp_path / "00-000002" / "hashes.json").write_text(content)
    warnings = []
    assert checkpoint.find_latest(tmp_path, warnings.append) == tmp_path / "00-000001"
    assert "hashes.json" in warnings[0] or "does not match its hash" in warnings[0]


def test_an_empty_folder_is_a_damaged_checkpoint(tmp_path):
    save(tmp_path / "00-000001")
    (tmp_path / "00-000002").mkdir()
    warnings = []
    assert checkpoint.find_latest(tmp_path, warnings.append) == tmp_path / "00-000001"
    assert "00-000002 is damaged (hashes.json is missing)" in warnings[0]


def test_what_is_no_checkpoint_is_left_alone(tmp_path):
    save(tmp_path / "00-000001")
    (tmp_path / "mine").mkdir()
    checkpoint.prune_checkpoints(tmp_path, CheckpointsConfig(keep_last=1))
    assert checkpoint.find_latest(tmp_path, refuse_warnings) == tmp_path / "00-000001"
    assert names(tmp_path) == ["00-000001", "mine"]


def test_steps_are_compared_as_numbers(tmp_path):
    for step in (999_999, 1_000_000, 20_000_000):
        save(tmp_path / str(checkpoint.StepId(0, step)))
    assert checkpoint.find_latest(tmp_path, refuse_warnings) == tmp_path / "00-20000000"
    checkpoint.prune_checkpoints(tmp_path, CheckpointsConfig(keep_last=1))
    assert names(tmp_path) == ["00-20000000"]
    save(tmp_path / str(checkpoint.StepId(100, 0)))
    save(tmp_path / str(checkpoint.StepId(99, 5)))
    assert checkpoint.find_latest(tmp_path, refuse_warnings) == tmp_path / "100-000000"


SCORES = (0.2, None, 0.9, 0.9, 0.1, 0.5)
POLICIES = [
    (CheckpointsConfig(keep_last=2), [4, 5]),
    (CheckpointsConfig(keep_last=9), [0, 1, 2, 3, 4, 5]),
    (CheckpointsConfig(keep_last=1, keep_every=2), [2, 4, 5]),
    (CheckpointsConfig(keep_last=1, best=BestCheckpointConfig(metric="m")), [2, 5]),
    (CheckpointsConfig(keep_last=1, best=BestCheckpointConfig(metric="m", mode="min")), [4, 5]),
    (CheckpointsConfig(keep_last=1, keep_every=3, best=BestCheckpointConfig(metric="m", mode="min")), [3, 4, 5]),
]


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """Six checkpoints with SCORES."""
    folder = tmp_path_factory.mktemp("six")
    for step, score in enumerate(SCORES):
        save(folder / f"00-{step:06d}", score=score)
    return folder


@pytest.mark.parametrize(("policy", "kept"), POLICIES)
def test_what_stays(tmp_path, six, policy, kept):
    manager = Path(shutil.copytree(six, tmp_path / "checkpoints"))
    (manager / ".00-000009.partial").mkdir()
    (manager / ".00-000004.retired").mkdir()
    checkpoint.prune_checkpoints(manager, policy)
    assert names(manager) == [f"00-{step:06d}" for step in kept]


def test_a_checkpoint_is_found_by_name_and_by_rank(tmp_path, six):
    best = BestCheckpointConfig(metric="m")
    assert checkpoint.find_checkpoint(six, None, best, refuse_warnings) == six / "00-000005"
    assert checkpoint.find_checkpoint(six, "00-000001", best, refuse_warnings) == six / "00-000001"
    assert checkpoint.find_checkpoint(six, "best", best, refuse_warnings) == six / "00-000002"
    for name, rank in (("00-000007", best), ("best", None)):
        with pytest.raises(UserError, match=rf"no checkpoint '{name}'; there is 00-000000, .*00-000005"):
            checkpoint.find_checkpoint(six, name, rank, refuse_warnings)
    manager = Path(shutil.copytree(six, tmp_path / "checkpoints"))
    (manager / "00-000002" / "score.json").write_text("0.95")
    with pytest.raises(UserError, match=r"00-000002 is damaged \(score.json does not match"):
        checkpoint.find_checkpoint(manager, "best", best, refuse_warnings)


def test_a_checkpoint_whose_score_is_damaged_is_not_the_best(tmp_path, six):
    manager = Path(shutil.copytree(six, tmp_path / "checkpoints"))
    for step, content in ((2, "0."), (3, '"high"')):
        (manager / f"00-00000{step}" / "score.json").write_text(content)
    assert (
        checkpoint.find_checkpoint(manager, "best", BestCheckpointConfig(metric="m"), refuse_warnings)
        == manager / "00-000005"
    )


BACKGROUND = CheckpointsConfig(async_save=True)


def test_a_snapshot_does_not_follow_the_run(tmp_path):
    net, optimizer = trained(1)
    state = TrainingState(step=1, eval_rewards={"before": {"count": {"a": 0.5}}})
    moments = {"moments": optimizer.state_dict()["state"]}
    live = Snapshot(weights=weights(net), optimizer=moments, rng=checkpoint.read_rng_states(), state=state)
    taken = checkpoint.copy_to_cpu(live)
    write_down(tmp_path / "00-000001", live)
    with torch.no_grad():
        net[0].weight.add_(1.0)
    optimizer.state_dict()["state"][0]["exp_avg"].add_(1.0)
    state.step, state.eval_rewards["before"]["count"]["a"] = 2, 0.0
    write_down(tmp_path / "00-000002", taken)
    one, two = ((tmp_path / f"00-00000{n}" / "hashes.json").read_text() for n in (1, 2))
    assert one == two


def test_a_write_in_the_background_lets_the_run_go_on_and_the_next_one_waits(tmp_path):
    may, order = Event(), []
    with CheckpointManager(tmp_path, BACKGROUND, refuse_warnings) as manager:
        manager.save(snapshot(step=1), before_write=lambda: order.append(may.wait(10)))
        manager.raise_if_failed()
        assert names(tmp_path) == [".00-000001.partial"]  # nothing is in it, and nobody waited
        assert names(tmp_path / ".00-000001.partial") == []
        may.set()
        manager.save(snapshot(step=2), before_write=lambda: order.append(names(tmp_path)))
    assert order == [True, [".00-000002.partial", "00-000001"]]
    assert names(tmp_path) == ["00-000001", "00-000002"]


def test_a_failure_in_the_background_surfaces_at_the_next_step(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    folder.parent.mkdir()
    with (
        pytest.raises(UserError, match=r"cannot save .*00-000002"),
        CheckpointManager(folder, BACKGROUND, print) as manager,
    ):
        manager.save(snapshot(step=1), before_write=lambda: None)
        manager.wait()
        manager.save(snapshot(step=2), before_write=(folder / ".00-000002.partial").rmdir)
        while True:  # as the loop does, step after step
            manager.raise_if_failed()
    assert checkpoint.find_latest(folder, refuse_warnings) == folder / "00-000001"


def test_a_deleted_run_directory_is_not_made_anew(tmp_path):
    with (
        pytest.raises(UserError, match="run was deleted or moved while the run was writing to it"),
        CheckpointManager(tmp_path / "run" / "checkpoints", BACKGROUND, refuse_warnings) as manager,
    ):
        manager.save(snapshot(step=1), before_write=lambda: None)
    assert names(tmp_path) == []


def test_a_failure_in_the_background_does_not_hide_what_ended_the_run(tmp_path):
    warnings = []
    with pytest.raises(KeyboardInterrupt), CheckpointManager(tmp_path, BACKGROUND, warnings.append) as manager:
        manager.save(snapshot(step=2), before_write=(tmp_path / ".00-000002.partial").rmdir)
        raise KeyboardInterrupt
    assert len(warnings) == 1 and "cannot save" in warnings[0]


class Together:
    """One of several ranks that are threads of this process."""

    def __init__(self, rank, meeting, places):
        self.rank, self.size = rank, meeting.parties
        self._meeting, self._places = meeting, places

    def all_gather(self, mine):
        self._places[self.rank] = mine
        self._meeting.wait(60)
        every = list(self._places)
        self._meeting.wait(60)
        return every

    def on_rank0(self, work):
        result = None
        if self.rank == 0:
            try:
                result = work()
            except UserError as error:
                result = error
        result = self.all_gather(result)[0]
        if isinstance(result, UserError):
            raise result
        return result


def by_ranks(count, work):
    """What `work` returns on each of so many ranks."""
    meeting, places = Barrier(count), [None] * count
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: work(Together(rank, meeting, places)), range(count)))


SIZES, RNG = (5, 1, 40, 3, 3, 30, 2), checkpoint.read_rng_states()


def part_of(ranks, **state):
    """This rank's part of seven weights, each as many times its place as it has values."""
    own = balanced_range(SIZES, ranks)
    learned = {f"w{place}": torch.full((SIZES[place],), float(place)) for place in own}
    moments = {place: {"exp_avg": torch.full((SIZES[place],), place / 2)} for place in own}
    optimizer = {"moments": moments, "masters": {}}
    return Snapshot(
        weights=CheckpointWeights(trained=learned), optimizer=optimizer, rng=RNG, state=TrainingState(**state)
    )


def save_twice(folder, ranks):
    """What each rank does to save its part of two checkpoints."""
    with CheckpointManager(folder, CheckpointsConfig(), refuse_warnings, ranks) as manager:
        for step in (1, 2):
            manager.save(part_of(ranks, step=step), before_write=lambda: None)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_each_rank_writes_its_part_and_any_number_goes_on(tmp_path, count, asynchronous):
    """Nine ranks are more than there are weights."""

    def keep(ranks):
        with CheckpointManager(tmp_path, CheckpointsConfig(async_save=asynchronous), refuse_warnings, ranks) as manager:
            for step in (1, 2):
                manager.save(part_of(ranks, step=step), before_write=lambda: None)
            while manager._writing:  # as the loop does, step after step
                manager.raise_if_failed()
                assert checkpoint.find_latest(tmp_path, refuse_warnings).name in ("00-000001", "00-000002")
            assert checkpoint.find_latest(tmp_path, refuse_warnings).name == "00-000002"

    by_ranks(count, keep)
    assert names(tmp_path) == ["00-000001", "00-000002"]
    assert len(names(tmp_path / "00-000002")) == 5 + 2 * count
    learned = {f"w{place}": torch.zeros(size) for place, size in enumerate(SIZES)}
    state, tables = checkpoint.load_checkpoint(tmp_path / "00-000002", weights=CheckpointWeights(trained=learned))
    assert state.step == 2
    assert list(tables["moments"]) == list(range(len(SIZES))) and tables["masters"] == {}
    for place, size in enumerate(SIZES):
        assert torch.equal(learned[f"w{place}"], torch.full((size,), float(place)))
        assert torch.equal(tables["moments"][place]["exp_avg"], torch.full((size,), place / 2))


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "optimizer-00003-of-00003.pt"])
def test_a_checkpoint_without_the_part_of_one_rank_is_damaged(tmp_path, name):
    by_ranks(3, partial(save_twice, tmp_path))
    (tmp_path / "00-000002" / name).unlink()
    flipped = tmp_path / "00-000001" / name
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"?")
    warnings = []
    with pytest.raises(UserError, match=f"00-000002 is damaged .{name} is missing., and no other is whole"):
        checkpoint.find_latest(tmp_path, warnings.append)
    assert f"00-000001 is damaged ({name} does not match its hash)" in warnings[1]


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "optimizer-00003-of-00003.pt", "state.json"])
def test_ranks_check_a_checkpoint_together(tmp_path, name):
    """Each reads a part of the files, and all hear of what is wrong with any."""
    by_ranks(3, partial(save_twice, tmp_path))
    assert (
        by_ranks(2, lambda ranks: checkpoint.find_latest(tmp_path, refuse_warnings, ranks))
        == [tmp_path / "00-000002"] * 2
    )
    flipped = tmp_path / "00-000002" / name
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"?")
    warnings = []
    found = by_ranks(2, lambda ranks: checkpoint.find_latest(tmp_path, warnings.append, ranks))
    assert found == [tmp_path / "00-000001"] * 2
    assert len(warnings) == 2 and f"00-000002 is damaged ({name} does not match" in warnings[0]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_rank_cannot_write_ends_all_and_leaves_the_checkpoint_before(tmp_path, failing, asynchronous):
    def keep(ranks):
        def first():
            if ranks.rank == failing:
                raise OSError(28, "No space left on device")

        with CheckpointManager(tmp_path, CheckpointsConfig(async_save=asynchronous), refuse_warnings, ranks) as manager:
            manager.save(part_of(ranks, step=1), before_write=lambda: None)
            with pytest.raises(UserError, match="cannot save .*00-000002: No space left on device .*free some space"):
                manager.save(part_of(ranks, step=2), before_write=first)
                manager.wait()

    by_ranks(2, keep)
    assert names(tmp_path) == ["00-000001"]


def test_what_ranks_were_writing_when_one_of_them_failed_is_given_up(tmp_path):
    """Nobody waits for a rank that will not come."""
    left = Event()

    def keep(ranks):
        with pytest.raises(ValueError, match="a bug"), CheckpointManager(tmp_path, BACKGROUND, print, ranks) as manager:
            manager.save(part_of(ranks, step=1), before_write=lambda: None)
            manager.wait()
            manager.save(part_of(ranks, step=2), before_write=lambda: left.wait(60) if ranks.rank else None)
            raise ValueError("a bug, or its effect on the others")
        left.set()

    by_ranks(2, keep)
    assert names(tmp_path) == [".00-000002.partial", "00-000001"]


def test_a_checkpoint_of_several_ranks_is_there_before_anybody_looks(tmp_path):
    def keep(ranks):
        with CheckpointManager(tmp_path, BACKGROUND, refuse_warnings, ranks) as manager:
            manager.save(part_of(ranks, step=1), before_write=lambda: None)
            for _ in range(1200):
                if (tmp_path / "00-000001").exists():
                    return
                sleep(0.05)

    by_ranks(3, keep)
    assert checkpoint.find_latest(tmp_path, refuse_warnings) == tmp_path / "00-000001"
    assert not [name for name in names(tmp_path / "00-000001") if name.startswith("part")]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 48])
def test_ranks_share_evenly(count):
    """No part is larger than an even one by more than the largest of its things."""
    sizes = [7, 1, 1, 500, 20, 300, 0, 300, 2, 60, 60, 60, 0]
    parts = [balanced_range(sizes, SimpleNamespace(rank=rank, size=count)) for rank in range(count)]
    assert [place for part in parts for place in part] == list(range(len(sizes)))
    assert all(sum(sizes[place] for place in part) <= sum(sizes) / count + 500 for part in parts)
    assert balanced_range([], SimpleNamespace(rank=0, size=count)) == range(0)


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path):
    save(tmp_path / "c", seed=1, step=1)
    net = save(tmp_path / "c", seed=2, step=2)
    other, _ = trained(3)
    state, _ = checkpoint.load_checkpoint(tmp_path / "c", weights=weights(other))
    assert state.step == 2
    assert torch.equal(other[0].weight, net[0].weight)
    assert names(tmp_path) == ["c"]
    (tmp_path / ".c.retired").mkdir()  # left by a save that was killed at its very end
    (tmp_path / ".c.retired" / "file").touch()
    save(tmp_path / "c", step=3)
    assert names(tmp_path) == ["c"]


def test_a_replacement_killed_between_its_renames_is_undone(tmp_path):
    save(tmp_path / "00-000001")
    (tmp_path / "00-000001").rename(tmp_path / ".00-000001.retired")
    (tmp_path / ".00-000001.partial").mkdir()
    assert checkpoint.find_latest(tmp_path, refuse_warnings) == tmp_path / "00-000001"


@pytest.mark.parametrize(("failure", "seen"), [(OSError(5, "Input/output error"), UserError), (KeyboardInterrupt,) * 2])
def test_a_replacement_that_fails_between_its_renames_is_undone(tmp_path, monkeypatch, failure, seen):
    save(tmp_path / "c", step=1)
    rename = Path.rename

    def failing(self, target):
        if self.name == ".c.partial":
            raise failure
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(seen):
        save(tmp_path / "c", step=2)
    assert names(tmp_path) == ["c"]
    assert json_codec.loads((tmp_path / "c" / "state.json").read_text(), TrainingState).step == 1


def test_what_fails_while_writing_leaves_the_old_checkpoint(tmp_path):
    save(tmp_path / "c", step=1)
    with pytest.raises(UserError, match="a checkpoint cannot hold 1j"):
        save(tmp_path / "c", eval_rewards={"before": {"x": 1j}})
    assert names(tmp_path) == ["c"]
    assert json_codec.loads((tmp_path / "c" / "state.json").read_text(), TrainingState).step == 1
    assert find_damage(tmp_path / "c", FILES[1:]) is None


def run(code, *arguments):
    """Run code in a process of its own, which may limit or kill itself."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


KILLED = """
import os, sys
from pathlib import Path
import torch
from mmrl import checkpoint
from mmrl.checkpoint.atomic_folder import atomic_folder
from mmrl.checkpoint.snapshot import write_part
from mmrl.distributed.ranks import SingleProcess
from mmrl.types import TrainingState
class Killer:
    def __reduce__(self):
        os._exit(9)
weights = checkpoint.CheckpointWeights(trained={"w": torch.ones(2)})
taken = checkpoint.Snapshot(weights=weights, optimizer={"x": {0: Killer()}}, rng={}, state=TrainingState(step=2))
with atomic_folder(Path(sys.argv[1])) as aside:
    write_part(aside, taken, SingleProcess())
"""


def test_a_kill_while_writing_leaves_the_old_checkpoint(tmp_path):
    save(tmp_path / "c", step=1)
    assert run(KILLED, tmp_path / "c").returncode == 9
    assert names(tmp_path) == [".c.partial", "c"]
    assert find_damage(tmp_path / "c", FILES[1:]) is None
    save(tmp_path / "c", step=3)
    assert names(tmp_path) == ["c"]


# A limit on the size of files stands for a full disk: writes fail in the middle, with EFBIG for ENOSPC.
FULL = """
import resource, sys
from pathlib import Path
import torch
from mmrl import checkpoint
from mmrl.checkpoint.atomic_folder import atomic_folder
from mmrl.checkpoint.snapshot import write_part
from mmrl.distributed.ranks import SingleProcess
from mmrl.types import TrainingState, UserError
class Model:
    def save_pretrained(self, folder):
        from safetensors.torch import save_file
        save_file({"w": torch.zeros(10_000)}, folder / "model.safetensors")
def save(size=4, optimizer={}, state=TrainingState()):
    weights = checkpoint.CheckpointWeights(trained={"w": torch.zeros(size)})
    taken = checkpoint.Snapshot(weights=weights, optimizer=optimizer, rng={}, state=state)
    with atomic_folder(folder) as aside:
        write_part(aside, taken, SingleProcess())
folder = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for attempt in (
    lambda: save(size=10_000),
    lambda: save(optimizer={"moments": {0: torch.zeros(10_000)}}),
    lambda: save(state=TrainingState(eval_rewards={"before": {"task": {str(i): 0.5 for i in range(3000)}}})),
    lambda: checkpoint.export_hf_folder(folder, Model()),
):
    try:
        attempt()
    except UserError as error:
        print(error)
"""


def test_a_full_disk_is_a_clear_error_and_leaves_the_old_checkpoint(tmp_path):
    save(tmp_path / "c", step=1)
    done = run(FULL, tmp_path / "c")
    assert done.returncode == 0, done.stderr
    messages = done.stdout.splitlines()
    assert len(messages) == 4  # weights, optimizer, state, export
    for message in messages:
        assert f"cannot save {tmp_path / 'c'}: File too large" in message
        assert "free some space" in message
    assert names(tmp_path) == ["c"]
    assert find_damage(tmp_path / "c", FILES[1:]) is None


def test_a_place_that_cannot_hold_folders_is_a_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot save .*file/c: .*make the folder writable"):
        save(tmp_path / "file" / "c")
    with pytest.raises(UserError, match="cannot save /proc/c"):  # nobody, root included, may write there
        save(Path("/proc/c"))


def test_weights_alone_round_trip(tmp_path):
    net, _ = trained(1)
    other, _ = trained(2)
    checkpoint.save_weights(tmp_path / "w", weights(net))
    checkpoint.load_weights(tmp_path / "w", weights(other))
    assert torch.equal(other[0].weight, net[0].weight)


def test_weights_of_another_shape_are_refused(tmp_path):
    checkpoint.save_weights(tmp_path / "w", CheckpointWeights(trained={"w": torch.ones(2, 3)}))
    with pytest.raises(UserError, match="another model: the weights that are trained differ"):
        checkpoint.load_weights(tmp_path / "w", CheckpointWeights(trained={"w": torch.ones(3, 2)}))


def test_weights_of_another_model_are_refused(tmp_path):
    net, _ = trained(1)
    learned, given = {"1.weight": net[1].weight}, {"0.weight": net[0].weight.detach().clone()}
    saved = CheckpointWeights(trained=learned, frozen_fingerprint=checkpoint.fingerprint_weights(given.items()))
    checkpoint.save_weights(tmp_path / "w", saved)
    checkpoint.load_weights(tmp_path / "w", saved)
    before = net[1].weight.detach().clone()
    given["0.weight"][3, 2] += 1e-4
    for other in (
        CheckpointWeights(trained=learned, frozen_fingerprint=checkpoint.fingerprint_weights(given.items())),
        CheckpointWeights(trained={**learned, "more": torch.ones(1)}, frozen_fingerprint=saved.frozen_fingerprint),
        CheckpointWeights(trained={}, frozen_fingerprint=saved.frozen_fingerprint),
    ):
        with pytest.raises(UserError, match="w was saved from another model: .* Restore model.path as it was"):
            checkpoint.load_weights(tmp_path / "w", other)
    assert torch.equal(net[1].weight, before)


def test_a_fingerprint_follows_names_types_shapes_and_values():
    weights = {"a": torch.arange(6.0), "b": torch.ones(2)}
    others = [
        {"c": weights["a"], "b": weights["b"]},
        {**weights, "a": weights["a"].double()},
        {**weights, "a": weights["a"].reshape(2, 3)},
        {**weights, "a": weights["a"] + 1e-3},
        {"a": weights["a"]},
    ]
    prints = [checkpoint.fingerprint_weights(each.items()) for each in (weights, *others)]
    assert len(set(prints)) == len(prints)
    assert checkpoint.fingerprint_weights(reversed(weights.items())) == prints[0]


def test_an_export_replaces_the_one_before(tmp_path):
    class Part:
        def __init__(self, name):
            self.name = name

        def save_pretrained(self, folder):
            (folder / self.name).touch()

    checkpoint.export_hf_folder(tmp_path / "m", Part("old"))
    checkpoint.export_hf_folder(tmp_path / "m", Part("weights"), Part("tokenizer"))
    assert names(tmp_path / "m") == ["tokenizer", "weights"]
    assert names(tmp_path) == ["m"]

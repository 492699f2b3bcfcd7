"""Ranks, one after the other in one process: whose part is whose, who learns what, and dummies that change nothing."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore
from waiting import wait_for

from mmrl.distributed import launch
from mmrl.distributed.exchanges import count_dropped_samples, measure_on_all_ranks, sum_metrics
from mmrl.distributed.ranks import MediaOwners, RankShard, SingleProcess, rank_slice
from mmrl.distributed.torch_ranks import Heartbeat
from mmrl.learner.micro_batches import add_dummy_media, assign_to_ranks, dummy_batch, rank_micro_batches
from mmrl.policy.batch import collate, group_by_prompt
from mmrl.policy.families import FAMILIES
from mmrl.types import EvalRewards, Experience, ImageRef, UserError, VideoRef


@dataclass(frozen=True)
class Rank:
    """One of several; what the others give is said here."""

    rank: int
    size: int
    others: tuple[Any, ...] = ()

    def all_gather(self, mine):
        gathered = list(self.others)
        gathered.insert(self.rank, mine)
        return gathered


class Nobody(Rank):
    """One whose fellows have nothing either."""

    def all_gather(self, mine):
        return [mine] * self.size


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 12])
def test_parts_follow_each_other(size, count):
    things = list(range(count))
    parts = [things[rank_slice(count, Rank(rank, size))] for rank in range(size)]
    assert [thing for part in parts for thing in part] == things
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_portion_keeps_the_cursor_of_the_whole():
    class Count:
        def take(self, position, count):
            return list(range(position, position + count))

    taken = [RankShard(Count().take, Rank(rank, 3), 7).take(10, 7) for rank in range(3)]
    assert [row for part in taken for row in part] == list(range(10, 17))
    assert RankShard(Count().take, SingleProcess(), 7).take(10, 7) == list(range(10, 17))


def test_groups_that_wait_have_the_first_places_of_a_round():
    """Rank by rank, what waits and what is asked come in the order of a single process, shared out evenly."""

    class Count:
        def take(self, position, count):
            return [f"asked-{place}" for place in range(position, position + count)]

    for waiting in range(8):
        waits = [f"waits-{place}" for place in range(waiting)]
        rounds = [
            [*waits[rank_slice(7, Rank(rank, 3))], *RankShard(Count().take, Rank(rank, 3), 7).take(20, 7 - waiting)]
            for rank in range(3)
        ]
        assert [each for own in rounds for each in own] == [*waits, *Count().take(20, 7 - waiting)]
        assert [len(own) for own in rounds] == [2, 2, 3]


def test_no_usable_sample_on_any_rank_is_a_mistake():
    with pytest.raises(UserError, match="none of the 4 samples of this round can be used on any rank"):
        count_dropped_samples(4, 0, Nobody(0, 2))
    assert count_dropped_samples(4, 1, Rank(0, 2, (2,))) == {"data/dropped": 1.0}


def test_metrics_are_summed_over_all_ranks():
    ranks = Rank(0, 2, ({"tools/calls": 3.0},))
    summed = sum_metrics({"tools/calls": 2.0, "tools/refused": 1.0}, ranks)
    assert summed == {"tools/calls": 5.0, "tools/refused": 1.0}


@pytest.fixture(scope="module")
def tiny(make_tiny):
    return make_tiny()


@pytest.fixture(scope="module")
def groups(tiny):
    """One picture, two, none, a video, a picture and a video; two responses each."""
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:5]]
    drawn = tiny.sampler().generate(prompts, 2, tiny.params, step=0)
    return [[Experience(rollout=rollout, advantage=1.0) for rollout in siblings] for siblings in drawn]


def test_rewards_come_in_the_order_of_the_samples(tiny):
    samples = tiny.samples[:5]
    measured = [{sample.task: {sample.id: float(i)}} for i, sample in enumerate(samples)]
    whole = {}
    for each in measured:
        for task, rewards in each.items():
            whole.setdefault(task, {}).update(rewards)

    def measure(own):
        found = {}
        for sample in own:
            found.setdefault(sample.task, {})[sample.id] = float(samples.index(sample))
        return EvalRewards(found, {"rethink/attempted": float(len(own))})

    for rank in (0, 1):
        other = measure(samples[1 - rank :: 2])
        shared, counts = measure_on_all_ranks(measure, samples, Rank(rank, 2, (other,)))
        assert counts == {"rethink/attempted": 5.0}
        assert shared == whole
        assert [list(rewards) for rewards in shared.values()] == [list(rewards) for rewards in whole.values()]


def flat(groups):
    return [experience for group in groups for experience in group]


def digests(experiences):
    return {experience.rollout.prompt.digest for experience in experiences}


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_groups_are_dealt_whole_and_all(groups, size):
    dealt = assign_to_ranks(flat(groups), {}, size)
    assert sorted(map(id, flat(dealt))) == sorted(map(id, flat(groups)))
    assert sum(len(digests(own)) for own in dealt) == len(groups)


def test_groups_stay_at_home_while_loads_are_even(groups):
    copies = [
        [replace(e, rollout=replace(e.rollout, prompt=replace(e.rollout.prompt, digest=f"{k}"))) for e in groups[0]]
        for k in range(4)
    ]
    media_owners = {"0": 1, "1": 0, "2": 1, "3": 0}
    kept = assign_to_ranks(flat(copies), media_owners, 2)
    assert [digests(own) for own in kept] == [{"1", "3"}, {"0", "2"}]
    crowded = assign_to_ranks(flat(copies), dict.fromkeys("0123", 1), 2)
    assert [len(digests(own)) for own in crowded] == [2, 2]


def test_micro_batches_are_side_by_side_and_know_the_media_of_all_ranks(groups):
    image, _, text, video, _ = groups
    media_owners = MediaOwners()
    media_owners.record([[text[0].rollout.prompt], [image[0].rollout.prompt]], step=0)
    trained_on = flat([text, image, video])

    def packed(experiences):
        return [[group] for group in group_by_prompt(experiences)]

    of_ranks = [rank_micro_batches(trained_on, media_owners.rank_by_digest, Rank(rank, 2), packed) for rank in range(2)]
    assert len(of_ranks[0]) == len(of_ranks[1]) == 2
    for here, there in zip(*of_ranks, strict=True):
        kinds = {type(ref) for each in (here, there) for g in each.groups for ref in g[0].rollout.prompt.sample.media}
        assert (
            (here.any_rank_has_images, here.any_rank_has_videos)
            == (there.any_rank_has_images, there.any_rank_has_videos)
            == (ImageRef in kinds, VideoRef in kinds)
        )
    assert () in [each.groups for own in of_ranks for each in own]  # three groups for two ranks


def gradient(tiny, batch):
    tiny.policy.model.zero_grad()
    tiny.policy.compute_logprobs(batch).logprobs_N.sum().backward()
    return {name: p.grad.clone() for name, p in tiny.policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared_prefix", [True, False])
def test_dummies_run_the_tower_and_change_no_gradient(make_tiny, family, shared_prefix):
    tiny = make_tiny(family)
    prompt = tiny.processor.build(tiny.samples[2])
    (drawn,) = tiny.sampler().generate([prompt], 2, tiny.params, step=0)
    text = [Experience(rollout=rollout, advantage=1.0) for rollout in drawn]
    batch = collate([text], tiny.processor, pad_id=tiny.eos_id, shared_prefix=shared_prefix)
    known = tiny.processor.placeholders
    before, after = (
        gradient(tiny, add_dummy_media(batch, known, images=media, videos=media)) for media in (False, True)
    )
    assert not any("visual" in name for name in before)
    # A product of more rows is rounded otherwise: by 2.2e-6 of the largest, measured in the decay rates of a recurrent
    # layer. A dummy that was seen would change a gradient by a share of itself.
    for name, own in before.items():
        torch.testing.assert_close(after[name], own, rtol=1e-5, atol=1e-5 * float(own.abs().max()))
    assert {name for name, p in tiny.policy.model.named_parameters() if "visual" in name} <= after.keys()
    assert not any(after[name].any() for name in after.keys() - before.keys())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared_prefix", [True, False])
def test_a_batch_of_nothing_has_a_gradient_of_nothing(make_tiny, family, shared_prefix):
    tiny = make_tiny(family)
    batch = dummy_batch(pad_id=tiny.eos_id, patch_dim=tiny.policy.patch_dim, shared_prefix=shared_prefix)
    found = gradient(tiny, add_dummy_media(batch, tiny.processor.placeholders, images=True, videos=True))
    assert found.keys() == {name for name, _ in tiny.policy.model.named_parameters()}
    assert not any(own.any() for own in found.values())


def test_a_launcher_passes_on_what_failed_and_leaves_nobody(tmp_path, monkeypatch, capfd):
    """The first rank waits for ever, the second dies; then one that is wrong as a whole."""
    program = tmp_path / "mmrl" / "__main__.py"
    program.parent.mkdir()
    program.write_text(
        "import os, signal, subprocess, sys, time\n"
        "from pathlib import Path\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'], start_new_session=True)\n"
        "Path(sys.argv[1] + os.environ['RANK'] + '-child').write_text(str(child.pid))\n"
        "Path(sys.argv[1] + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "first = Path(sys.argv[1] + '0')\n"
        "while os.environ['RANK'] == '0' or not (first.exists() and first.read_text()):\n"
        "    time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # `-m` looks here first
    monkeypatch.setattr(launch, "SHUTDOWN_GRACE_S", 0.3)
    assert launch.launch([str(tmp_path / "pid")], 2) == 128 + signal.SIGKILL
    assert "rank 1 was ended by SIGKILL; all are stopped" in capfd.readouterr().err
    for rank in "01":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)
    # The other rank died by itself, so nobody knows what it had started.
    os.kill(int((tmp_path / "pid1-child").read_text()), signal.SIGKILL)
    child = int((tmp_path / "pid0-child").read_text())
    wait_for(lambda: not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes())


def test_a_rank_that_waits_says_for_whom_and_what_that_one_does(capfd):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    slow = Heartbeat(store, 1, 2, patience_s=600)
    slow.set_activity("learning from boxes-17")
    slow.start()
    waiting = Heartbeat(store.clone(), 0, 2, patience_s=2)
    waiting.set_activity("waiting in gather after: judging")
    waiting.start()
    said = []

    def told_where():
        said.append(capfd.readouterr().err)
        return "test_a_rank_that_waits" in "".join(said)  # where this process stands, the last that is said

    wait_for(told_where)
    for diary in (waiting, slow):
        diary.stop()
    told = (
        r"rank 0 has been at it for \d+ s: waiting in gather after: judging\. rank 1 for \d+ s: learning from boxes-17"
    )
    assert re.search(told, "".join(said))

"""Feeds are ready when a step begins: the same bytes from any number of processes, deaths named, no more than a step
ahead, memory flat.
"""

import hashlib
import os
import signal
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from PIL import Image
from waiting import PATIENCE_S, wait_for

import mmrl.policy.processor as processor_module
from mmrl.data.order import CachedOrder, ShuffledOrder, StreamingOrder
from mmrl.data.prefetch import Prefetcher
from mmrl.media.media_workers import start_media_workers
from mmrl.types import AnswerType, ImageRef, PromptTooLongError, RejectedRow, Sample, Target, UserError
from mmrl.utils.worker_pool import WorkerPool

NUMBER = Target(answer_type=AnswerType.NUMBER, value=3)


def sample(name, *parts):
    return Sample(id=name, task="t", parts=parts or ("?",), target=NUMBER)


class Rows:
    """An order that writes down what was taken."""

    def __init__(self, rows):
        self.rows, self.taken = rows, 0

    def take(self, position, count):
        self.taken = max(self.taken, position + count)
        return self.rows[position : position + count]


@contextmanager
def ahead(order, processor, *, work=None, count=0, warn=print, **left_out):
    options = {"skip_unusable": False, "warn": warn, **left_out}
    if not count:
        yield Prefetcher(order, processor, None, **options)
        return
    with closing(start_media_workers(work, count, timeout_s=300.0, name=attrgetter("id"))) as workers:
        yield Prefetcher(order, processor, workers, **options)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_processes_gives_the_same_bytes(make_tiny, monkeypatch, count):
    monkeypatch.setattr(processor_module, "_CACHE_BYTES", 1)  # nothing stays between steps but what is held
    tiny = make_tiny()
    order = ShuffledOrder(tiny.samples, 7)
    plain, processor = tiny.fresh(), tiny.fresh()
    with (
        ahead(order, plain) as here,
        ahead(order, processor, work=tiny.fresh().encode, count=count) as there,
    ):
        for position in (0, 5, 10, 3):  # the last one a return, which nobody could foresee
            samples = there.take(position, 5)
            assert samples == here.take(position, 5) == order.take(position, 5)
            for one in samples:
                prompt = processor.build(one)
                assert prompt == plain.build(one)
                assert prompt.sample is one
                assert torch.equal(
                    processor.prompt_tensors(prompt).image_patches_MD, plain.prompt_tensors(prompt).image_patches_MD
                )
                assert torch.equal(
                    processor.prompt_tensors(prompt).position_ids_3P, plain.prompt_tensors(prompt).position_ids_3P
                )


def test_processes_are_one_step_ahead_and_no_more(make_tiny):
    tiny = make_tiny()
    order = Rows([replace(one, id=f"{one.id}-{i}") for i in range(3) for one in tiny.samples])
    processor = tiny.fresh()
    with ahead(order, processor, work=tiny.fresh().encode, count=1) as source:
        for position in (0, 4, 8):
            assert len(source.take(position, 4)) == 4
            assert order.taken == position + 8
    with ahead(Rows(order.rows), processor) as source:
        source.take(0, 4)
        assert source._order.taken == 4


def test_what_a_step_leaves_of_the_rows_ahead_is_there_for_the_next(make_tiny, monkeypatch):
    """As where groups wait, and each step asks as many more as there is room for: no row is read or opened twice."""
    tiny, passes, opened = make_tiny(), [], []
    rows = [replace(one, id=f"{one.id}-{i}") for i in range(4) for one in tiny.samples]
    submit = WorkerPool.submit
    monkeypatch.setattr(WorkerPool, "submit", lambda self, one: opened.append(one.id) or submit(self, one))
    order = CachedOrder(StreamingOrder(lambda: passes.append(1) or rows, buffer=1, seed=0))
    with ahead(order, tiny.fresh(), work=tiny.fresh().encode, count=1) as source:
        position, taken = 0, []
        for count in (6, 2, 5, 6, 1, 4):
            taken += source.take(position, count)
            position += count
            assert len(opened) == position + 6
    assert [one.id for one in taken] == [one.id for one in rows[:24]]
    assert opened == [one.id for one in rows[:30]]
    assert len(passes) == 1


def alive(pid):
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def deadly(one):
    """Work that dies of some samples."""
    match one.id.split("-")[0]:
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "gone":
            os._exit(3)
        case "bug":
            raise ZeroDivisionError("a bug")
        case "bad":
            raise UserError(f"sample {one.id}: bad")
        case "slow":
            time.sleep(2 * PATIENCE_S)
    return os.getpid()


@pytest.fixture
def workers():
    with closing(start_media_workers(deadly, 2, timeout_s=300.0, name=attrgetter("id"))) as workers:
        yield workers


def test_a_process_that_dies_takes_no_more_with_it_than_its_sample(workers):
    names = ["a", "crash-1", "b", "killed-1", "gone-1", "bad-1", "c", "d"]
    futures = {name: workers.submit(sample(name)) for name in names}
    with pytest.raises(UserError, match="crash-1: the process that opened it was killed by SIGSEGV"):
        futures["crash-1"].result(PATIENCE_S)
    with pytest.raises(UserError, match="killed-1: .* SIGKILL; a file crashes its decoder, or memory ran out"):
        futures["killed-1"].result(PATIENCE_S)
    with pytest.raises(UserError, match="gone-1: the process that opened it ended with exit code 3; a file crashes"):
        futures["gone-1"].result(PATIENCE_S)
    with pytest.raises(UserError, match="sample bad-1: bad"):
        futures["bad-1"].result(PATIENCE_S)
    assert all(futures[name].result(PATIENCE_S) for name in "abcd")


def test_processes_that_die_at_once_are_told_apart(workers):
    for future in [workers.submit(sample(f"killed-{i}")) for i in range(12)]:
        with pytest.raises(UserError, match="killed-.* SIGKILL"):
            future.result(PATIENCE_S)


def test_a_process_that_hangs_takes_no_more_with_it_than_its_sample():
    with closing(start_media_workers(deadly, 1, timeout_s=2.0, name=attrgetter("id"))) as workers:
        hung, fine = workers.submit(sample("slow-1")), workers.submit(sample("a"))
        with pytest.raises(UserError, match=r"slow-1: .* took more than 2 s; is it damaged\? See data.media_timeout_s"):
            hung.result(PATIENCE_S)
        assert fine.result(PATIENCE_S)


def test_a_bug_is_no_bad_sample(workers):
    with pytest.raises(RuntimeError, match="bug-1: .* its traceback stands above"):
        workers.submit(sample("bug-1")).result(PATIENCE_S)


def test_a_process_killed_while_idle_is_replaced(workers):
    seen = {workers.submit(sample(f"a{i}")).result(PATIENCE_S) for i in range(4)}
    for pid in seen:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(alive(pid) for pid in seen))
    again = {workers.submit(sample(f"b{i}")).result(PATIENCE_S) for i in range(4)}
    assert again
    assert not seen & again


def test_closing_does_not_wait_for_work():
    workers = start_media_workers(deadly, 1, timeout_s=300.0, name=attrgetter("id"))
    running = workers.submit(sample("a")).result(PATIENCE_S)
    workers.submit(sample("slow-1"))
    waiting = workers.submit(sample("b"))
    start = time.monotonic()
    workers.close()
    assert time.monotonic() - start < PATIENCE_S
    assert waiting.cancelled()
    with pytest.raises(ProcessLookupError):
        os.kill(running, 0)


def unusable(tmp_path):
    damaged = tmp_path / "damaged.png"
    Image.new("RGB", (48, 48)).save(damaged)
    damaged.write_bytes(damaged.read_bytes()[:-30])
    ref = ImageRef(path=str(damaged), sha256=hashlib.sha256(damaged.read_bytes()).hexdigest())
    return [
        sample("damaged", ref, "?"),
        RejectedRow("broken", "no answer in the row"),
        sample("long", "many words " * 500),
        sample("same", "a"),
        sample("same", "b"),
    ]


@pytest.mark.parametrize("count", [0, 1])
def test_what_cannot_be_used_is_left_out_and_told(make_tiny, tmp_path, count):
    tiny, told = make_tiny(), []
    rows = [*tiny.samples[:2], *unusable(tmp_path), *tiny.samples[2:4]]
    processor = tiny.fresh()
    made = ahead(
        Rows(rows),
        processor,
        work=tiny.fresh().encode,
        count=count,
        skip_unusable=True,
        drop_too_long=True,
        warn=told.append,
    )
    with made as source:
        samples = source.take(0, len(rows))
    assert samples == [*rows[:2], rows[5], *rows[-2:]]
    assert [line.split(":")[0:2] for line in told] == [
        ["left out", " sample damaged"],
        ["left out", " row broken"],
        ["left out", " sample long"],
        ["left out", " sample same"],
    ]


def test_what_cannot_be_used_stops_the_run_unless_it_may_be_skipped(make_tiny, tmp_path):
    damaged, broken, long, *_ = unusable(tmp_path)
    for row, message in ((damaged, "damaged.png: damaged"), (broken, "row broken: no answer"), (long, "sample long")):
        with (
            ahead(Rows([make_tiny().samples[0], row]), make_tiny().fresh()) as source,
            pytest.raises(UserError, match=message),
        ):
            source.take(0, 2)
    with (
        ahead(Rows([make_tiny().samples[0], long]), make_tiny().fresh(), skip_unusable=True) as source,
        pytest.raises(PromptTooLongError),
    ):
        source.take(0, 2)
    nothing = "not one of the 2 samples from position 0 on can be used"
    with (
        ahead(Rows([damaged, broken]), make_tiny().fresh(), skip_unusable=True) as source,
        pytest.raises(UserError, match=nothing),
    ):
        source.take(0, 2)


def test_many_bad_rows_do_not_flood_the_console(make_tiny):
    told = []
    rows = [make_tiny().samples[0], *(RejectedRow(str(i), "no") for i in range(50))]
    with ahead(Rows(rows), make_tiny().fresh(), skip_unusable=True, warn=told.append) as source:
        assert len(source.take(0, 51)) == 1
    assert len(told) == 5
    assert told[-1].endswith("from here on they are only counted, in data/dropped")


def test_a_step_stays_whole_in_a_cache_too_small_for_it(make_tiny, monkeypatch):
    monkeypatch.setattr(processor_module, "_CACHE_BYTES", 1)
    tiny = make_tiny()
    processor, processed = tiny.fresh(), []
    process = processor.encode
    processor.encode = lambda one: processed.append(one.id) or process(one)
    with ahead(Rows(tiny.samples), processor) as source:
        step = source.take(0, 6)
        held_out = processor.build(tiny.samples[8])  # an evaluation in between
        prompts = [processor.build(one) for one in step]
        for prompt in [*prompts, *prompts]:
            processor.prompt_tensors(prompt)
        assert processed == [one.id for one in (*step, tiny.samples[8])]
        source.take(6, 2)
        processor.prompt_tensors(prompts[0])  # the step before is gone
        processor.prompt_tensors(held_out)
    assert processed[7:] == [one.id for one in (*tiny.samples[6:8], step[0], tiny.samples[8])]


@pytest.mark.slow
def test_memory_stays_flat_over_ten_thousand_streamed_samples(make_tiny, monkeypatch):
    """Held, the rows would take 200 MB, and the patches of every fourth, which has a picture, 140 MB."""
    monkeypatch.setattr(processor_module, "_CACHE_BYTES", 4_000_000)
    tiny = make_tiny()
    models = (tiny.samples[0], *[tiny.samples[2]] * 3)

    def rows():
        for i in range(10_000):
            yield replace(models[i % 4], id=str(i), meta={"notes": "x" * 20_000 + str(i)})

    processor = tiny.fresh()
    with ahead(StreamingOrder(rows, buffer=100, seed=0), processor) as source:
        taken, start = 0, 0
        for position in range(0, 10_000, 50):
            taken += len(source.take(position, 50))
            start = resident_bytes() if position == 1000 else start
    assert taken == 10_000
    assert resident_bytes() - start < 20_000_000


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

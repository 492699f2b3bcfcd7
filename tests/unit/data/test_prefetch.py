"""Prefetching: the same bytes from any number of processes, one step ahead, in bounded memory; bad samples by name."""

import os
import signal
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from factories import make_sample, png_bytes, write_file
from waiting import PATIENCE_S, alive, wait_for

import mmrl.policy.processor as processor_module
from mmrl.data.order import CachedOrder, ShuffledOrder, StreamingOrder
from mmrl.data.prefetch import Prefetcher
from mmrl.distributed.ranks import own_rows
from mmrl.media.media_workers import start_media_workers
from mmrl.types import RejectedRow, UserError
from mmrl.utils.worker_pool import WorkerPool


def sample(name, *parts):
    return make_sample(id=name, parts=parts or ("?",))


class Rows:
    """An order that records how far it was read."""

    def __init__(self, rows):
        self.rows, self.taken = rows, 0

    def take(self, position, count):
        self.taken = max(self.taken, position + count)
        return self.rows[position : position + count]


@contextmanager
def open_prefetcher(
    order, processor, *, encode=None, workers=0, warn=print, skip_unusable=False, drop_too_long=False, **options
):
    choices = {True: "skip", False: "stop"}
    data = SimpleNamespace(on_bad_sample=choices[skip_unusable], on_too_long=choices[drop_too_long])
    # Without another `current_step`, each take is a step.
    options = {"own_rows": list, "current_step": count().__next__, "options": data, "warn": warn, **options}
    with ExitStack() as stack:
        pool = None
        if workers:
            pool = start_media_workers(encode, workers, timeout_s=300.0, name=attrgetter("id"))
            stack.enter_context(closing(pool))
        ahead = CachedOrder(order)
        yield Prefetcher(ahead, processor, pool, ahead=ahead, **options)


@pytest.mark.slow
def test_processes_give_the_same_bytes(tiny, monkeypatch):
    monkeypatch.setattr(processor_module, "_CACHE_BYTES", 1)  # nothing stays between steps but what is held
    order = ShuffledOrder(tiny.samples, 7)
    plain, processor = tiny.fresh(), tiny.fresh()
    ahead = open_prefetcher(order, processor, encode=tiny.fresh().encoder.encode, workers=2)
    with open_prefetcher(order, plain) as here, ahead as there:
        for position in (0, 5, 10, 3):  # the last one is a jump, which nobody could foresee
            samples = there.take(position, 5)
            assert samples == here.take(position, 5) == order.take(position, 5)
            for one in samples:
                prompt = processor.build(one)
                assert prompt == plain.build(one)
                assert prompt.sample is one
                tensors, expected = processor.prompt_tensors(prompt), plain.prompt_tensors(prompt)
                assert torch.equal(tensors.image_patches_MD, expected.image_patches_MD)
                assert torch.equal(tensors.position_ids_3P, expected.position_ids_3P)


def distinct_samples(tiny, times):
    """The samples of `tiny` so many times, with ids and texts of their own."""
    return [replace(one, id=f"{one.id}-{i}", parts=(*one.parts, str(i))) for i in range(times) for one in tiny.samples]


@pytest.mark.parametrize(("steps", "num_encodings"), [((0, 0), 4), ((0, 1), 6)])
def test_prompts_of_all_rounds_of_a_step_stay_whatever_their_size(tiny, monkeypatch, steps, num_encodings):
    monkeypatch.setattr(processor_module, "_CACHE_BYTES", 1)
    processor, encoded, step = tiny.fresh(), [], iter(steps)
    encode = processor.encoder.encode
    monkeypatch.setattr(processor.encoder, "encode", lambda one: encoded.append(one.id) or encode(one))
    with open_prefetcher(Rows(distinct_samples(tiny, 1)), processor, current_step=lambda: next(step)) as source:
        samples = [*source.take(0, 2), *source.take(2, 2)]
    for one in samples:
        processor.prompt_tensors(processor.build(one))
    assert len(encoded) == num_encodings


@pytest.mark.slow
def test_processes_are_one_step_ahead_and_no_more(tiny):
    order = Rows(distinct_samples(tiny, 3))
    with open_prefetcher(order, tiny.fresh(), encode=tiny.fresh().encoder.encode, workers=1) as source:
        for position in (0, 4, 8):
            assert len(source.take(position, 4)) == 4
            assert order.taken == position + 8
    order = Rows(order.rows)
    with open_prefetcher(order, tiny.fresh()) as source:
        source.take(0, 4)
    assert order.taken == 4


@pytest.mark.slow
def test_rows_that_a_step_leaves_are_there_for_the_next(tiny, monkeypatch):
    """Where groups are carried over, a step takes fewer rows than were prefetched. None is read or opened twice."""
    passes, opened = [], []
    rows = distinct_samples(tiny, 4)
    submit = WorkerPool.submit
    monkeypatch.setattr(WorkerPool, "submit", lambda self, one: opened.append(one.id) or submit(self, one))
    order = StreamingOrder(lambda: passes.append(1) or rows, buffer=1, seed=0)
    with open_prefetcher(order, tiny.fresh(), encode=tiny.fresh().encoder.encode, workers=1) as source:
        taken = []
        for count in (6, 2, 5, 6, 1, 4):
            taken += source.take(len(taken), count)
            assert len(opened) == len(taken) + 6
    assert taken == rows[:24]
    assert opened == [one.id for one in rows[:30]]
    assert len(passes) == 1


# Workers that fail


def fail_as_named(one):
    """Fail in the way that a sample is named after."""
    match one.id.split("-")[0]:
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "bug":
            raise ZeroDivisionError("a bug")
        case "bad":
            raise UserError(f"sample {one.id}: bad")
        case "slow":
            time.sleep(2 * PATIENCE_S)
    return os.getpid()


def start_failing_workers(count, timeout_s=300.0):
    return start_media_workers(fail_as_named, count, timeout_s=timeout_s, name=attrgetter("id"))


@pytest.fixture
def workers():
    with closing(start_failing_workers(2)) as workers:
        yield workers


DEATHS = {
    "crash-1": "the process that opened it was killed by SIGSEGV; a file crashes its decoder",
    "killed-1": "the process that opened it was killed by SIGKILL; a file crashes its decoder, or memory ran out",
    "exit-1": "the process that opened it ended with exit code 3",
    "bad-1": "sample bad-1: bad",
    "killed-2": "SIGKILL",
    "killed-3": "SIGKILL",
}


def test_a_process_that_dies_costs_only_its_own_sample(workers):
    futures = {name: workers.submit(sample(name)) for name in ["a", *DEATHS, "b"]}
    for name, message in DEATHS.items():
        with pytest.raises(UserError, match=f"{name}: .*{message}" if name != "bad-1" else message):
            futures[name].result(PATIENCE_S)
    assert all(futures[name].result(PATIENCE_S) for name in "ab")


def test_a_process_that_hangs_costs_only_its_own_sample():
    with closing(start_failing_workers(1, timeout_s=2.0)) as workers:
        hung, fine = workers.submit(sample("slow-1")), workers.submit(sample("a"))
        with pytest.raises(UserError, match=r"slow-1: .* took more than 2 s; is it damaged\? See data.media_timeout_s"):
            hung.result(PATIENCE_S)
        assert fine.result(PATIENCE_S)


def test_a_bug_does_not_count_as_a_bad_sample(workers):
    with pytest.raises(RuntimeError, match="bug-1: .* its traceback is above"):
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
    workers = start_failing_workers(1)
    running = workers.submit(sample("a")).result(PATIENCE_S)
    workers.submit(sample("slow-1"))
    waiting = workers.submit(sample("b"))
    start = time.monotonic()
    workers.close()
    assert time.monotonic() - start < PATIENCE_S
    assert waiting.cancelled()
    with pytest.raises(ProcessLookupError):
        os.kill(running, 0)


# Samples that cannot be used


@pytest.fixture
def unusable(tmp_path):
    content = png_bytes((48, 48))
    return [
        sample("damaged", write_file(tmp_path / "damaged.png", content[:-30]), "?"),
        RejectedRow("broken", "no answer in the row"),
        sample("long", "many words " * 500),
        sample("same", "a"),
        sample("same", "b"),
    ]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.slow
def test_unusable_samples_are_left_out_with_a_warning(tiny, unusable, workers):
    warnings = []
    rows = [*tiny.samples[:2], *unusable, *tiny.samples[2:4]]
    options = {"skip_unusable": True, "drop_too_long": True, "warn": warnings.append}
    encode = tiny.fresh().encoder.encode
    with open_prefetcher(Rows(rows), tiny.fresh(), encode=encode, workers=workers, **options) as source:
        assert source.take(0, len(rows)) == [*rows[:2], rows[5], *rows[-2:]]
    beginnings = [":".join(warning.split(":")[:2]) for warning in warnings]
    assert beginnings == [f"left out: {row}" for row in ("sample damaged", "row broken", "sample long", "row same")]


def test_two_samples_with_one_id_are_refused_also_if_two_ranks_take_them(tiny):
    rows = [sample("same", "a"), sample("other", "b"), sample("more", "c"), sample("same", "d")]
    for rank, names in enumerate((["same", "other"], ["more"])):
        share = partial(own_rows, prompts_per_round=4, ranks=SimpleNamespace(rank=rank, size=2))
        with open_prefetcher(Rows(rows), tiny.fresh(), own_rows=share, skip_unusable=True) as source:
            assert [one.id for one in source.take(0, 4)] == names
    with (
        open_prefetcher(Rows(rows), tiny.fresh(), own_rows=share) as source,
        pytest.raises(UserError, match="row same: another sample of the same step has this id, and ids must be unique"),
    ):
        source.take(0, 4)


@pytest.mark.parametrize(
    ("index", "skip_unusable", "message"),
    [
        (0, False, "damaged.png: damaged"),
        (1, False, "row broken: no answer"),
        (2, False, "sample long"),
        (2, True, "sample long"),  # `drop_too_long` is another setting
    ],
)
def test_an_unusable_sample_ends_the_run_unless_it_may_be_skipped(tiny, unusable, index, skip_unusable, message):
    rows = Rows([tiny.samples[0], unusable[index]])
    prefetcher = open_prefetcher(rows, tiny.fresh(), skip_unusable=skip_unusable)
    with prefetcher as source, pytest.raises(UserError, match=message):
        source.take(0, 2)


def test_a_step_may_have_no_usable_sample(make_tiny, unusable):
    """The loops decide, which know of other ranks and of unfinished rollouts."""
    with open_prefetcher(Rows(unusable[:2]), make_tiny().fresh(), skip_unusable=True) as source:
        assert source.take(0, 2) == []


def test_many_bad_rows_do_not_flood_the_console(make_tiny):
    warnings = []
    rows = [make_tiny().samples[0], *(RejectedRow(str(i), "no") for i in range(50))]
    with open_prefetcher(Rows(rows), make_tiny().fresh(), skip_unusable=True, warn=warnings.append) as source:
        assert len(source.take(0, 51)) == 1
    assert len(warnings) == 5
    assert warnings[-1].endswith("from here on they are only counted, in data/dropped")


def test_a_step_stays_whole_in_a_cache_too_small_for_it(tiny, monkeypatch):
    monkeypatch.setattr(processor_module, "_CACHE_BYTES", 1)
    processor, processed = tiny.fresh(), []
    process = processor.encoder.encode
    processor.encoder.encode = lambda one: processed.append(one.id) or process(one)
    with open_prefetcher(Rows(tiny.samples), processor) as source:
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
def test_memory_stays_flat_over_ten_thousand_streamed_samples(tiny, monkeypatch):
    """Held, the rows would take 200 MB, and the patches of every fourth, which has a picture, 140 MB."""
    monkeypatch.setattr(processor_module, "_CACHE_BYTES", 4_000_000)
    models = (tiny.samples[0], *[tiny.samples[2]] * 3)

    def rows():
        for i in range(10_000):
            model = models[i % 4]
            yield replace(model, id=str(i), parts=(*model.parts, str(i)), meta={"notes": "x" * 20_000 + str(i)})

    processor = tiny.fresh()
    with open_prefetcher(StreamingOrder(rows, buffer=100, seed=0), processor) as source:
        taken, start = 0, 0
        for position in range(0, 10_000, 50):
            taken += len(source.take(position, 50))
            start = resident_bytes() if position == 1000 else start
    assert taken == 10_000
    assert resident_bytes() - start < 20_000_000


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

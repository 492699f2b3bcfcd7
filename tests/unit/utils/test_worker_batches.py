"""Batches of calls: quick results come together, and the call that hangs or cannot answer is told from the others."""

import pickle
import socket
import time
from contextlib import closing
from tempfile import TemporaryFile
from threading import Event, Thread

import pytest

from mmrl.utils.worker_server import CallProgress, CallTimeoutError, MessageSocket, _answer_batch


@pytest.fixture
def pair():
    """Both ends of a line, and the progress as pool and worker map it."""
    ours, theirs = socket.socketpair()
    with TemporaryFile() as shared, closing(MessageSocket(ours)) as line, closing(MessageSocket(theirs)) as other:
        yield line, other, CallProgress(shared.fileno()), CallProgress(shared.fileno())


@pytest.mark.parametrize(("interval_s", "messages"), [(600.0, [[2, 4, 6]]), (-1.0, [[2], [4], [6]])])
def test_quick_results_are_one_message_and_slow_ones_do_not_wait(pair, monkeypatch, interval_s, messages):
    monkeypatch.setattr("mmrl.utils.worker_server._REPLY_INTERVAL_S", interval_s)
    line, other, progress, own = pair
    _answer_batch(other, own, [1, 2, 3], lambda payload: payload * 2, pickle.Pickler)
    assert [progress.receive_results(line, [None] * 3) for _ in messages] == messages
    assert progress.read()[0] == 2


def test_the_call_that_hangs_is_named_after_its_own_deadline(pair):
    line, _, progress, own = pair
    own.begin(0)
    over = Event()

    def work():
        while not over.wait(0.05):
            own.begin(1 if own.read()[0] == 0 else 2)  # two calls of 50 ms, then one that hangs
            if own.read()[0] == 2:
                return

    thread = Thread(target=work)
    thread.start()
    start = time.monotonic()
    with pytest.raises(CallTimeoutError) as caught:
        progress.receive_results(line, [60.0, 60.0, 0.3])
    over.set()
    thread.join()
    assert caught.value.args == (2,)
    assert 0.3 <= time.monotonic() - start < 30.0


def test_only_the_result_that_cannot_be_pickled_fails(pair):
    line, other, progress, own = pair
    with pytest.raises((pickle.PicklingError, AttributeError)):
        _answer_batch(other, own, [1, 2, 3], lambda payload: payload if payload != 2 else (lambda: 2), pickle.Pickler)
    assert progress.receive_results(line, [None] * 3) == [1]
    assert progress.read()[0] == 1


class Late:
    def __reduce__(self):
        return exec, ("raise TimeoutError('no number of a call')",)


def test_an_error_of_unpickling_is_not_taken_for_a_deadline(pair):
    line, other, progress, own = pair
    _answer_batch(other, own, [1], lambda _: Late(), pickle.Pickler)
    with pytest.raises(TimeoutError):  # which a CallTimeoutError is not
        progress.receive_results(line, [60.0])

"""Ranks of `torch.distributed`: every collective of mmrl, each with a deadline and an error that names its cause.

Runs in every process of a run, which a launcher has started (`mmrl.distributed.launch`, torchrun, deepspeed).

    what hangs, or is gone    deadline                     what happens
    a rank that never joins   `distributed.timeout_s`      the others end with a UserError
    a rank in a collective    `distributed.timeout_s`      the others end with `RankLostError`, which says who was lost
    a rank has ended          none, its connection closes  the same, in the collective that the others wait in
    a rank in anything else   a sixth of `timeout_s`       it warns, once, with the stacks of its threads, and continues
    the launcher is gone      a second                     the rank sends itself SIGTERM: it saves and ends
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, TypeVar

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from mmrl.distributed.launch import find_free_port, is_launched
from mmrl.distributed.ranks import RankLostError, Ranks, SingleProcess
from mmrl.types import UserError
from mmrl.utils.messages import escape_controls

T = TypeVar("T")
_BUCKET_BYTES: Final = 64 * 2**20  # most bytes of tensors that are copied into one flat tensor and summed together
_MAX_PUBLISH_INTERVAL_S: Final = 1.0
_SILENT_AFTER_S: Final = 5.0  # a rank that published nothing for longer is reported as silent


class TorchRanks(Ranks):
    """The processes of a run that a launcher has started."""

    def __init__(self, timeout_s: float) -> None:
        """Join the other ranks.

        Raises:
            UserError: they did not all arrive within `timeout_s`.
        """
        super().__init__()
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        limit = timedelta(seconds=timeout_s)
        try:
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            store, self.rank, self.size = next(rendezvous("env://", timeout=limit))
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=limit)
            # Objects travel over gloo, also where nccl reduces gradients: nccl would copy them through the device.
            self._object_group = dist.new_group(backend="gloo", timeout=limit)
        except (dist.DistError, TimeoutError) as error:
            raise UserError(
                f"not all processes met within {timeout_s} s at "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {error}"
            ) from error
        # The watchdog gets a connection of its own: a call that waits on a shared one would stop it.
        self._watchdog = RankWatchdog(store.clone(), self.rank, self.size, patience_s=timeout_s / 6)
        self._watchdog.start()

    def all_gather(self, value: T) -> list[T]:
        """Return the value of every rank, in rank order. This rank's entry is `value` itself, not a copy."""
        gathered: list[T] = [value] * self.size
        with self._report_waiting("all_gather"):
            dist.all_gather_object(gathered, value, group=self._object_group)
        # The gathered entry is a pickled copy; callers rely on getting back the very objects that they gave.
        gathered[self.rank] = value
        return gathered

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 alone and return its result on every rank. A UserError is raised on every rank."""
        result: list[T | UserError | None] = [None]
        if self.rank == 0:
            try:
                result[0] = work()
            except UserError as error:
                # Sent like a result, so that the other ranks do not wait until the deadline for one.
                result[0] = error
        with self._report_waiting("on_rank0"):
            dist.broadcast_object_list(result, src=0, group=self._object_group)
        if isinstance(result[0], UserError):
            raise result[0]
        return result[0]  # type: ignore[return-value]

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum tensors of one dtype over ranks, in place, in buckets of up to 64 MiB."""
        with self._report_waiting("all_reduce"), torch.no_grad():
            for bucket in _split_into_buckets(tensors):
                # One flat copy a bucket: a sum over ranks costs a round trip, however small the tensor. A tensor that
                # has a bucket of its own is summed in place.
                flat = torch.cat(list(map(torch.flatten, bucket))) if len(bucket) > 1 else bucket[0].flatten()
                dist.all_reduce(flat)
                sums = torch.split(flat, list(map(torch.numel, bucket)))
                for tensor, summed in zip(bucket, sums, strict=True):
                    tensor.copy_(summed.view_as(tensor))

    def set_activity(self, activity: str) -> None:
        """Publish what this rank is doing. Not collective."""
        self._watchdog.set_activity(activity)

    def close(self) -> None:
        """Leave the process group. All ranks must have finished."""
        self._watchdog.stop()
        dist.destroy_process_group()

    def rank_lost_error(self, error: RuntimeError) -> RankLostError:
        """Return the error to raise when a collective fails, with the last activity of each rank."""
        # A message of gloo's may have many lines, of which the first says what broke.
        cause = str(error).strip().partition("\n")[0] or type(error).__name__
        return RankLostError(
            f"rank {self.rank}, {self._watchdog.activity}, lost another ({cause}). Last reports: "
            f"{self._watchdog.describe_others()}. Run the same command again: it continues from the last checkpoint"
        )

    @contextmanager
    def _report_waiting(self, collective: str) -> Iterator[None]:
        before = self._watchdog.activity
        self._watchdog.set_activity(f"waiting in {collective} after: {before}")
        try:
            yield
        except torch.OutOfMemoryError:
            raise  # a RuntimeError too, but every rank is still there
        # gloo raises plain RuntimeError when a peer is gone or the deadline has passed.
        except RuntimeError as error:
            raise self.rank_lost_error(error) from error
        self._watchdog.set_activity(before)


class RankWatchdog(threading.Thread):
    """Publishes this rank's activity to the shared store, so that errors and warnings of other ranks can name it.

    When the activity has not changed for `patience_s` seconds, it prints a warning with the activities of all ranks and
    the stacks of all threads of this process, once. It also ends this process when its launcher is gone.
    """

    def __init__(self, store: Store, rank: int, size: int, *, patience_s: float) -> None:
        super().__init__(name="rank-watchdog", daemon=True)
        self.activity = "starting"
        self._store, self._rank, self._size, self._patience_s = store, rank, size, patience_s
        self._activity_start = time.time()
        self._warned = False
        self._launcher_pid = int(os.environ.get("MMRL_LAUNCHER", os.getppid()))
        self._stop_event = threading.Event()
        self._publish()

    def set_activity(self, activity: str) -> None:
        """Begin a new activity; it is published with the next beat."""
        self.activity, self._activity_start, self._warned = activity, time.time(), False

    def run(self) -> None:
        """Publish at regular intervals until `stop` is called or the store is gone."""
        while not self._stop_event.wait(min(_MAX_PUBLISH_INTERVAL_S, self._patience_s / 4)):
            if os.getppid() != self._launcher_pid:
                # Nobody is left to stop this process. SIGTERM lets it finish its step, save and end.
                os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                self._publish()
                waited_s = time.time() - self._activity_start
                if self._warned or waited_s <= self._patience_s:
                    continue
                self._warned = True
                line = f"rank {self._rank} is still {self.activity} after {waited_s:.0f} s. {self.describe_others()}"
                # Activities name samples, whose ids may hold control characters.
                print(f"warning: {escape_controls(line)}", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(sys.stderr)
            except dist.DistError:
                # The store lives in rank 0, and ends with it.
                return

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stop_event.set()
        self.join()

    def describe_others(self) -> str:
        """Describe the activities that the other ranks published last."""
        descriptions = []
        for rank in range(self._size):
            if rank == self._rank:
                continue
            try:
                # `get` would wait for a key that was never written.
                if not self._store.check([f"activity/{rank}"]):
                    descriptions.append(f"rank {rank} has not reported yet")
                    continue
                entry = json.loads(self._store.get(f"activity/{rank}"))
            except dist.DistError:
                descriptions.append(f"rank {rank} cannot be reached")
                continue
            duration_s = entry["published"] - entry["since"]
            age_s = time.time() - entry["published"]
            silence = f", and silent for {age_s:.0f} s" if age_s > _SILENT_AFTER_S else ""
            descriptions.append(f"rank {rank} for {duration_s:.0f} s: {entry['activity']}{silence}")
        return "; ".join(descriptions)

    def _publish(self) -> None:
        entry = {"activity": self.activity, "since": self._activity_start, "published": time.time()}
        self._store.set(f"activity/{self._rank}", json.dumps(entry))


def require_single_process(command: str) -> None:
    """Refuse a command that works in one process only.

    Raises:
        UserError: a launcher has started several processes.
    """
    if is_launched() and int(os.environ["WORLD_SIZE"]) > 1:
        raise UserError(
            f"{command} works in one process, but a launcher has started {os.environ['WORLD_SIZE']}; run it without "
            "the launcher. With rollout.engine=vllm_server it uses engines on several GPUs"
        )


@contextmanager
def join_ranks(timeout_s: float, *, force_group: bool = False) -> Iterator[Ranks]:
    """Join the ranks of this run and leave them when the block ends.

    `force_group` makes a process group for a single process too, which DeepSpeed needs.

    Raises:
        RankLostError: a collective failed inside the block.
        UserError: not all ranks arrived.
    """
    if not is_launched():
        if force_group:
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it even for one process
            address = f"tcp://127.0.0.1:{find_free_port()}"
            dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
        try:
            yield SingleProcess()
        finally:
            if force_group:
                dist.destroy_process_group()
        return
    ranks = TorchRanks(timeout_s)
    try:
        yield ranks
    except RuntimeError as error:
        # Collectives of DeepSpeed fail with gloo's or torch's own error.
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise ranks.rank_lost_error(error) from error
        raise
    # Not after an error: destroying the group would wait for ranks that may be gone.
    ranks.close()


def _split_into_buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield consecutive tensors in lists of at most `_BUCKET_BYTES`; a larger tensor gets a list of its own."""
    bucket: list[torch.Tensor] = []
    bucket_bytes = 0
    for tensor in tensors:
        if bucket and bucket_bytes + tensor.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, bucket_bytes = [], 0
        bucket.append(tensor)
        bucket_bytes += tensor.nbytes
    if bucket:
        yield bucket

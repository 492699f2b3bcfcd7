"""Where ranks meet: every collective of mmrl itself, each bounded in time and named when it fails.

Objects travel by gloo, whatever moves the gradients. Beside them a thread on each rank keeps a diary for the others:
when a rank has waited too long, it can say for whom, and what that one was doing.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Final, Protocol, TypeVar

import torch
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from mmrl.config.schema import DistributedConfig
from mmrl.distributed.ranks import RankLostError, Ranks, SingleProcess
from mmrl.types import UserError

T = TypeVar("T")
_BUCKET_BYTES: Final = 64 * 2**20
_LAUNCHER_VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TorchRanks:
    """The processes of `torch.distributed`, as a launcher has started them."""

    def __init__(self, options: DistributedConfig) -> None:
        """Join the others.

        Raises:
            UserError: they did not all come within `options.timeout_s`.
        """
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        limit = timedelta(seconds=options.timeout_s)
        try:
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            store, self.rank, self.size = next(rendezvous("env://", timeout=limit))
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=limit)
            self._object_group = dist.new_group(backend="gloo", timeout=limit)
        except (dist.DistError, TimeoutError) as error:
            raise UserError(
                f"not all processes met within {options.timeout_s} s at "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {error}"
            ) from error
        self._heartbeat = Heartbeat(store.clone(), self.rank, self.size, patience_s=options.heartbeat_s)
        self._heartbeat.start()

    def all_gather(self, value: T) -> list[T]:
        """What each rank gave, in rank order; at this rank's place stands the very object `mine`."""
        gathered: list[T] = [value] * self.size
        with self._report_waiting("gather"):
            dist.all_gather_object(gathered, value, group=self._object_group)
        gathered[self.rank] = value
        return gathered

    def on_rank0(self, work: Callable[[], T]) -> T:
        """What `work` returns on the first rank, which alone does it. A UserError there is raised on every rank."""
        result: list[T | UserError | None] = [None]
        if self.rank == 0:
            try:
                result[0] = work()
            except UserError as error:
                result[0] = error
        with self._report_waiting("once"):
            dist.broadcast_object_list(result, src=0, group=self._object_group)
        if isinstance(result[0], UserError):
            raise result[0]
        return result[0]  # type: ignore[return-value]

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum tensors over ranks, in place, many at a time; all of one type."""
        with self._report_waiting("add"), torch.no_grad():
            for bucket in _split_into_buckets(tensors):
                flat = torch.cat([tensor.flatten() for tensor in bucket])
                dist.all_reduce(flat)
                for tensor, summed in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
                    tensor.copy_(summed.view_as(tensor))

    def set_activity(self, activity: str) -> None:
        """Write into the diary what this rank is doing now."""
        self._heartbeat.set_activity(activity)

    def close(self) -> None:
        """Part from the others, when all is done."""
        self._heartbeat.stop()
        dist.destroy_process_group()

    @contextmanager
    def _report_waiting(self, collective: str) -> Iterator[None]:
        before = self._heartbeat.activity
        self._heartbeat.set_activity(f"waiting in {collective} after: {before}")
        try:
            yield
        except RuntimeError as error:  # what gloo raises has no class of its own
            raise self.rank_lost_error(error) from error
        self._heartbeat.set_activity(before)

    def rank_lost_error(self, error: RuntimeError) -> RankLostError:
        """What to say when a collective fails."""
        return RankLostError(
            f"rank {self.rank}, {self._heartbeat.activity}, lost another ({_first_line(error)}). Last heard: "
            f"{self._heartbeat.describe_others()}. The same command goes on from the last checkpoint"
        )


class KeyValueStore(Protocol):
    """What torch.distributed keeps for all ranks: bytes by name."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read; waits until it has been written."""

    def check(self, keys: list[str]) -> bool:
        """Whether all have been written."""


class Heartbeat(threading.Thread):
    """What each rank is doing and since when, in a store that all can read.

    A rank that has written nothing new for `patience_s` tells so on standard error, with all its stacks and what the
    others are doing.
    """

    def __init__(self, store: KeyValueStore, rank: int, size: int, *, patience_s: float) -> None:
        super().__init__(name="diary", daemon=True)
        self.activity = "starting"
        self._store, self._rank, self._size, self._patience_s = store, rank, size, patience_s
        self._activity_start = time.time()
        self._warned, self._launcher_pid = False, int(os.environ.get("MMRL_LAUNCHER", os.getppid()))
        self._stop_event = threading.Event()
        self._publish()

    def set_activity(self, activity: str) -> None:
        """What this rank does from here on."""
        self.activity, self._activity_start, self._warned = activity, time.time(), False

    def run(self) -> None:
        """Publish, and complain once about every silence."""
        while not self._stop_event.wait(min(1.0, self._patience_s / 4)):
            if os.getppid() != self._launcher_pid:  # nobody is left to stop this process: it saves and ends
                os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                self._publish()
                if not self._warned and time.time() - self._activity_start > self._patience_s:
                    self._warned = True
                    self._warn_stalled()
            except dist.DistError:  # the store went with the rank that held it
                return

    def stop(self) -> None:
        """No more entries."""
        self._stop_event.set()
        self.join()

    def describe_others(self) -> str:
        """What the other ranks were last doing."""
        return "; ".join(self._describe_rank(rank) for rank in range(self._size) if rank != self._rank)

    def _describe_rank(self, rank: int) -> str:
        try:
            if not self._store.check([f"diary/{rank}"]):
                return f"rank {rank} has never been heard of"
            entry = json.loads(self._store.get(f"diary/{rank}"))
        except dist.DistError:
            return f"rank {rank} cannot be asked any more"
        silent = time.time() - entry["told"]
        heard = f", and silent for {silent:.0f} s" if silent > 5 else ""
        return f"rank {rank} for {entry['told'] - entry['since']:.0f} s: {entry['doing']}{heard}"

    def _publish(self) -> None:
        entry = {"doing": self.activity, "since": self._activity_start, "told": time.time()}
        self._store.set(f"diary/{self._rank}", json.dumps(entry))

    def _warn_stalled(self) -> None:
        waited = time.time() - self._activity_start
        print(
            f"warning: rank {self._rank} has been at it for {waited:.0f} s: {self.activity}. {self.describe_others()}",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(sys.stderr)


def is_launched() -> bool:
    """Whether a launcher (`mmrl train --nproc`, torchrun, deepspeed) has started this process as one of several."""
    return all(name in os.environ for name in _LAUNCHER_VARIABLES)


def require_single_process(command: str) -> None:
    """For commands that one process does alone.

    Raises:
        UserError: a launcher has started several.
    """
    if is_launched() and int(os.environ["WORLD_SIZE"]) > 1:
        raise UserError(
            f"{command} is done by one process, and a launcher has started {os.environ['WORLD_SIZE']}; start it alone. "
            "With rollout.engine=vllm_server it asks engines on several GPUs"
        )


@contextmanager
def join_ranks(options: DistributedConfig, *, force_group: bool = False) -> Iterator[Ranks]:
    """The ranks of this run, until the block ends; `needed` makes a group of a single process too, for DeepSpeed."""
    if not is_launched():
        if force_group:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        yield SingleProcess()
        if force_group:
            dist.destroy_process_group()
        return
    ranks = TorchRanks(options)
    try:
        yield ranks
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):  # in a collective of DeepSpeed's
            raise ranks.rank_lost_error(error) from error
        raise
    ranks.close()  # not after an error: then the others are not there to be waited for


def _split_into_buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

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

from mmrl.config.schema import Processes
from mmrl.distributed.ranks import Alone, RankLost, Ranks
from mmrl.types import UserError

T = TypeVar("T")
_BUCKET_BYTES: Final = 64 * 2**20
_VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TorchRanks:
    """The processes of `torch.distributed`, as a launcher has started them."""

    def __init__(self, options: Processes) -> None:
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
            self._objects = dist.new_group(backend="gloo", timeout=limit)
        except (dist.DistError, TimeoutError) as error:
            raise UserError(
                f"not all processes met within {options.timeout_s} s at "
                f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {error}"
            ) from error
        self._diary = Diary(store.clone(), self.rank, self.size, patience_s=options.heartbeat_s)
        self._diary.start()

    def gather(self, mine: T) -> list[T]:
        """What each rank gave, in rank order; at this rank's place stands the very object `mine`."""
        gathered: list[T] = [mine] * self.size
        with self._waiting("gather"):
            dist.all_gather_object(gathered, mine, group=self._objects)
        gathered[self.rank] = mine
        return gathered

    def once(self, work: Callable[[], T]) -> T:
        """What `work` returns on the first rank, which alone does it. A UserError there is raised on every rank."""
        result: list[T | UserError | None] = [None]
        if self.rank == 0:
            try:
                result[0] = work()
            except UserError as error:
                result[0] = error
        with self._waiting("once"):
            dist.broadcast_object_list(result, src=0, group=self._objects)
        if isinstance(result[0], UserError):
            raise result[0]
        return result[0]  # type: ignore[return-value]

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum tensors over ranks, in place, many at a time; all of one type."""
        with self._waiting("add"), torch.no_grad():
            for bucket in _buckets(tensors):
                flat = torch.cat([tensor.flatten() for tensor in bucket])
                dist.all_reduce(flat)
                for tensor, summed in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
                    tensor.copy_(summed.view_as(tensor))

    def note(self, doing: str) -> None:
        """Write into the diary what this rank is doing now."""
        self._diary.note(doing)

    def leave(self) -> None:
        """Part from the others, when all is done."""
        self._diary.stop()
        dist.destroy_process_group()

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        before = self._diary.doing
        self._diary.note(f"waiting in {what} after: {before}")
        try:
            yield
        except RuntimeError as error:  # what gloo raises has no class of its own
            raise self.lost(error) from error
        self._diary.note(before)

    def lost(self, error: RuntimeError) -> RankLost:
        """What to say when a collective fails."""
        return RankLost(
            f"rank {self.rank}, {self._diary.doing}, lost another ({_first_line(error)}). Last heard: "
            f"{self._diary.others()}. The same command goes on from the last checkpoint"
        )


class Store(Protocol):
    """What torch.distributed keeps for all ranks: bytes by name."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read; waits until it has been written."""

    def check(self, keys: list[str]) -> bool:
        """Whether all have been written."""


class Diary(threading.Thread):
    """What each rank is doing and since when, in a store that all can read.

    A rank that has written nothing new for `patience_s` tells so on standard error, with all its stacks and what the
    others are doing.
    """

    def __init__(self, store: Store, rank: int, size: int, *, patience_s: float) -> None:
        super().__init__(name="diary", daemon=True)
        self.doing = "starting"
        self._store, self._rank, self._size, self._patience = store, rank, size, patience_s
        self._since = time.time()
        self._told, self._launcher = False, int(os.environ.get("MMRL_LAUNCHER", os.getppid()))
        self._over = threading.Event()
        self._publish()

    def note(self, doing: str) -> None:
        """What this rank does from here on."""
        self.doing, self._since, self._told = doing, time.time(), False

    def run(self) -> None:
        """Publish, and complain once about every silence."""
        while not self._over.wait(min(1.0, self._patience / 4)):
            if os.getppid() != self._launcher:  # nobody is left to stop this process: it saves and ends
                os.kill(os.getpid(), signal.SIGTERM)
                return
            try:
                self._publish()
                if not self._told and time.time() - self._since > self._patience:
                    self._told = True
                    self._complain()
            except dist.DistError:  # the store went with the rank that held it
                return

    def stop(self) -> None:
        """No more entries."""
        self._over.set()
        self.join()

    def others(self) -> str:
        """What the other ranks were last doing."""
        return "; ".join(self._entry(rank) for rank in range(self._size) if rank != self._rank)

    def _entry(self, rank: int) -> str:
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
        entry = {"doing": self.doing, "since": self._since, "told": time.time()}
        self._store.set(f"diary/{self._rank}", json.dumps(entry))

    def _complain(self) -> None:
        waited = time.time() - self._since
        print(
            f"warning: rank {self._rank} has been at it for {waited:.0f} s: {self.doing}. {self.others()}",
            file=sys.stderr,
            flush=True,
        )
        faulthandler.dump_traceback(sys.stderr)


def launched() -> bool:
    """Whether a launcher (`mmrl train --nproc`, torchrun, deepspeed) has started this process as one of several."""
    return all(name in os.environ for name in _VARIABLES)


def refuse_company(command: str) -> None:
    """For commands that one process does alone.

    Raises:
        UserError: a launcher has started several.
    """
    if launched() and int(os.environ["WORLD_SIZE"]) > 1:
        raise UserError(
            f"{command} is done by one process, and a launcher has started {os.environ['WORLD_SIZE']}; start it alone. "
            "With rollout.engine=vllm_server it asks engines on several GPUs"
        )


@contextmanager
def joined(options: Processes, *, needed: bool = False) -> Iterator[Ranks]:
    """The ranks of this run, until the block ends; `needed` makes a group of a single process too, for DeepSpeed."""
    if not launched():
        if needed:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        yield Alone()
        if needed:
            dist.destroy_process_group()
        return
    ranks = TorchRanks(options)
    try:
        yield ranks
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):  # in a collective of DeepSpeed's
            raise ranks.lost(error) from error
        raise
    ranks.leave()  # not after an error: then the others are not there to be waited for


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
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

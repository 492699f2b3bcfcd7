"""JSON over HTTP: one deadline for a whole exchange, bounded replies, retries with backoff, a cache on disk."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from threading import Timer
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from mmrl.types import Unscorable
from mmrl_rewards.services.cache import ReplyCache

ReplyT = TypeVar("ReplyT")
Seconds = Annotated[float, Field(gt=0.0, le=3600.0)]

_STATUS_OK, _STATUS_REJECTED = 200, 422
_RETRYABLE_STATUSES = frozenset({408, 425, 429, *range(500, 600)})
_EXCERPT_CHARS = 80


class RequestRejected(Exception):
    """The service is well and refuses what it was given (status 422)."""


class Endpoint(BaseModel):
    """Where a service listens and how long it may take. No proxy is used, no redirect followed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$")]
    """Of the very resource that requests go to."""
    timeout_s: Seconds = 60.0
    """Seconds for one exchange, from connecting to the last byte."""
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    """Further tries after no reply, an overloaded or broken server, or an unusable reply."""
    backoff_s: Annotated[float, Field(ge=0.0)] = 1.0
    """Seconds before the first further try; twice as long before each that follows."""
    key_file: str | None = None
    """File that holds the bearer token."""
    cache: str | None = None
    """Folder where usable replies are kept, by the hash of address and request."""
    max_reply_bytes: Annotated[int, Field(ge=1)] = 1_000_000
    """A longer reply is unusable."""

    def post(self, request: object, parse_reply: Callable[[bytes], ReplyT]) -> ReplyT:
        """What `read` makes of the reply to a request, which is sent as JSON; `read` raises ValueError when it is
        unusable.

        Raises:
            Rejected: the service refuses the request.
            Unscorable: no usable reply after every try.
        """
        body = json.dumps(request, sort_keys=True).encode()
        asked = self.url.encode() + b"\n" + body
        kept = ReplyCache(Path(self.cache)) if self.cache else None
        if kept is not None and (reply := kept.get(asked)) is not None:
            with suppress(ValueError):  # kept for a reader of other demands: asked anew
                return parse_reply(reply)
        failure = ""
        for further in range(self.retries + 1):
            if further:
                time.sleep(self.backoff_s * 2.0 ** (further - 1))
            try:
                reply = self._exchange(body)
                result = parse_reply(reply)
            except (OSError, HTTPException, ValueError) as error:
                failure = f"{type(error).__name__}: {error}"
                continue
            if kept is not None:
                kept.put(asked, reply)
            return result
        raise Unscorable(f"{self.url}: no usable reply in {self.retries + 1} tries; the last: {failure:.200}")

    def _exchange(self, body: bytes) -> bytes:
        where = urlsplit(self.url)
        connect = HTTPSConnection if where.scheme == "https" else HTTPConnection
        path = where.path + (f"?{where.query}" if where.query else "")
        with closing(connect(where.hostname or "", where.port, timeout=self.timeout_s)) as connection:
            connection.connect()
            with _close_after(self.timeout_s, connection.sock):
                connection.request("POST", path or "/", body, self._headers())
                response = connection.getresponse()
                reply = response.read(self.max_reply_bytes + 1)
        return self._check_status(response.status, reply)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.key_file is not None:
            headers["Authorization"] = f"Bearer {Path(self.key_file).read_text(encoding='utf-8').strip()}"
        return headers

    def _check_status(self, status: int, reply: bytes) -> bytes:
        said = f"status {status}: {reply[:_EXCERPT_CHARS].decode('utf-8', 'replace')!r}"
        if status == _STATUS_REJECTED:
            raise RequestRejected(said)
        if status in _RETRYABLE_STATUSES:
            raise OSError(said)
        if status != _STATUS_OK:
            raise Unscorable(f"{self.url}: {said}")
        if len(reply) > self.max_reply_bytes:
            raise ValueError(f"a reply of more than {self.max_reply_bytes} bytes")
        return reply


@contextmanager
def _close_after(seconds: float, connection: socket.socket) -> Iterator[None]:
    """Ends an exchange at its deadline, however slowly bytes keep coming: a socket's own timeout is for each alone."""
    over = []

    def hang_up() -> None:
        over.append(True)
        with suppress(OSError):  # the other side was first
            connection.shutdown(socket.SHUT_RDWR)

    timer = Timer(seconds, hang_up)
    timer.start()
    late = TimeoutError(f"no whole reply within {seconds:g} s")
    try:
        yield
    except (OSError, HTTPException) as error:
        if over:
            raise late from error
        raise
    finally:
        timer.cancel()
    if over:
        raise late

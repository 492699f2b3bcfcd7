"""Posts JSON over HTTP with one timeout for the whole exchange, bounded replies, retries and a cache on disk."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from threading import Event, Timer
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from mmrl.types import Unscorable
from mmrl.utils.files import random_temporary_path

ReplyT = TypeVar("ReplyT")
Seconds = Annotated[float, Field(gt=0.0, le=3600.0)]

_STATUS_OK, _STATUS_REJECTED = 200, 422
_RETRYABLE_STATUSES = frozenset({408, 425, 429, *range(500, 600)})
_EXCERPT_CHARS = 80


class RequestRejected(Exception):
    """The service works, and refuses this request (status 422)."""


class Endpoint(BaseModel):
    """Address and limits of a service. Proxies are not used, redirects are not followed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # URL that requests are posted to.
    url: Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$")]
    timeout_s: Seconds = 60.0  # seconds for one exchange, from connecting to the last byte of the reply
    # Number of further tries after no reply, an overloaded or failing server, or an unusable reply.
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    # Seconds before the first further try; each wait after it is twice as long as the one before.
    backoff_s: Annotated[float, Field(ge=0.0)] = 1.0
    key_file: str | None = None  # path of a file that holds the bearer token
    cache: str | None = None  # folder that keeps usable replies, by the hash of URL and request
    max_reply_bytes: Annotated[int, Field(ge=1)] = 1_000_000  # size from which a reply is unusable, in bytes

    def post(self, request: object, parse_reply: Callable[[bytes], ReplyT]) -> ReplyT:
        """Post a request as JSON and return the parsed reply.

        Args:
            request: what JSON can hold.
            parse_reply: returns the result for the bytes of a reply, and raises ValueError if they are unusable.

        Raises:
            RequestRejected: the service refuses the request.
            Unscorable: no usable reply after every try.
        """
        body = json.dumps(request, sort_keys=True).encode()
        kept = find_kept_reply(self.cache, self.url.encode() + b"\n" + body) if self.cache else None
        if kept is not None and kept.exists():
            with suppress(ValueError):  # another reward kept it, whose parser accepts more
                return parse_reply(kept.read_bytes())
        failure = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.backoff_s * 2.0 ** (attempt - 1))
            shown = ""
            try:
                reply = self._exchange(body)
                shown = _describe_reply(reply)
                result = parse_reply(reply)
            except (OSError, HTTPException, ValueError) as error:
                failure = f"{shown}{type(error).__name__}: {error}"
                continue
            if kept is not None:
                keep_reply(kept, reply)
            return result
        raise Unscorable(f"{self.url}: no usable reply in {self.retries + 1} tries; the last: {failure:.300}")

    def _exchange(self, body: bytes) -> bytes:
        url = urlsplit(self.url)
        connect = HTTPSConnection if url.scheme == "https" else HTTPConnection
        path = url.path + (f"?{url.query}" if url.query else "")
        headers = {"Content-Type": "application/json"}
        if self.key_file is not None:
            # Read at every exchange, so that a token can be renewed while a run continues.
            headers["Authorization"] = f"Bearer {Path(self.key_file).read_text(encoding='utf-8').strip()}"
        with closing(connect(url.hostname or "", url.port, timeout=self.timeout_s)) as connection:
            connection.connect()
            with _close_after(self.timeout_s, connection.sock):
                connection.request("POST", path or "/", body, headers)
                response = connection.getresponse()
                # One byte more than is allowed shows that the reply is too long.
                reply = response.read(self.max_reply_bytes + 1)
        said = f"status {response.status}: {reply[:_EXCERPT_CHARS].decode('utf-8', 'replace')!r}"
        if response.status == _STATUS_REJECTED:
            raise RequestRejected(said)
        if response.status in _RETRYABLE_STATUSES:
            raise OSError(said)
        if response.status != _STATUS_OK:
            raise Unscorable(f"{self.url}: {said}")
        if len(reply) > self.max_reply_bytes:
            raise ValueError(f"a reply of more than {self.max_reply_bytes} bytes")
        return reply


def _describe_reply(reply: bytes) -> str:
    """Return what a reply looks like, for the message of its parser, which may say the same of different replies."""
    start = reply.lstrip()[:_EXCERPT_CHARS]
    if not start:
        return "an empty reply: "
    kind = "an HTML page" if re.match(rb"<!doctype html|<html", start, re.IGNORECASE) else "the reply"
    return f"{kind} {start.decode('utf-8', 'replace')!r}: "


def find_kept_reply(folder: str, request: bytes) -> Path:
    """Return the file that keeps the reply to a request, if there has been one."""
    digest = hashlib.sha256(request).hexdigest()
    return Path(folder) / digest[:2] / f"{digest[2:]}.reply"


def keep_reply(path: Path, reply: bytes) -> None:
    """Write a reply to its file. Several threads, processes and machines may do so at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed once it is complete, so that nobody reads a part of it.
    fresh = random_temporary_path(path)
    fresh.write_bytes(reply)
    fresh.replace(path)


@contextmanager
def _close_after(seconds: float, connection: socket.socket) -> Iterator[None]:
    """Shut a connection down after some seconds and raise TimeoutError."""
    # The timeout of a socket is for a single read, so a reply that comes byte by byte would never reach it.
    timed_out = Event()

    def shut_down() -> None:
        timed_out.set()
        with suppress(OSError):  # the other side closed it first
            connection.shutdown(socket.SHUT_RDWR)

    timer = Timer(seconds, shut_down)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # In place of the error of a connection that was shut down, or of a reply that seems complete without its end.
        if timed_out.is_set():
            raise TimeoutError(f"no whole reply within {seconds:g} s")

"""Download files, with limits on size and time."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Final
from urllib import request
from urllib.error import URLError

from mmrl_datasets.formats.row import BadRowError

READ_TIMEOUT_S: Final = 20.0
"""Longest time without a byte."""
TOTAL_TIMEOUT_S: Final = 600.0
"""Longest time for the whole file, so that a server that sends a byte now and then cannot hold up a run."""
CHUNK_BYTES: Final = 1 << 16
# The default opener would also follow a redirect to file:// or ftp://.
ALLOWED_HANDLERS: Final = (
    *(request.ProxyHandler, request.HTTPHandler, request.HTTPSHandler, request.UnknownHandler),
    *(request.HTTPRedirectHandler, request.HTTPErrorProcessor, request.HTTPDefaultErrorHandler),
)


def download(url: str, to: Path, max_bytes: int) -> str:
    """Write the content of `url` to the file `to`, whose folder exists, and return its sha256 in hex.

    Raises:
        BadRowError: the server cannot be reached or is too slow, or the file is larger than `max_bytes`.
        OSError: the file cannot be written.
    """
    digest, size = hashlib.sha256(), 0
    with to.open("wb") as file:
        for chunk in _download_chunks(url):
            size += len(chunk)
            if size > max_bytes:
                raise BadRowError(f"{url} has more than {max_bytes:,} bytes")
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def _download_chunks(url: str) -> Iterator[bytes]:
    opener = request.OpenerDirector()
    for handler in ALLOWED_HANDLERS:
        opener.add_handler(handler())
    deadline = time.monotonic() + TOTAL_TIMEOUT_S
    try:
        with opener.open(url, timeout=READ_TIMEOUT_S) as reply:
            expected = reply.headers.get("Content-Length")
            received = 0
            for chunk in iter(partial(reply.read1, CHUNK_BYTES), b""):
                received += len(chunk)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not complete within {TOTAL_TIMEOUT_S:g} s")
                yield chunk
            # A connection that breaks off looks like the end of the file.
            if expected is not None and received != int(expected):
                raise URLError(f"broke off after {received:,} of {expected} bytes")
    except (OSError, HTTPException, ValueError) as error:
        # URLError and TimeoutError are OSErrors.
        raise BadRowError(f"{url} cannot be downloaded: {error}") from error

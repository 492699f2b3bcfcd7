"""Files from the network, fetched once and under limits."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Final

import httpx

from mmrl_datasets.formats.row import BadRowError

SILENCE_S: Final = 20.0  # without a byte
PATIENCE_S: Final = 600.0  # for all of them


def fetch(url: str, to: Path, max_bytes: int) -> str:
    """Write what `url` gives to the file `to`, whose folder exists; its sha256.

    Raises:
        BadRowError: the server does not give it, in time or at all, or it is larger than `max_bytes`.
        OSError: the file cannot be written.
    """
    digest, size, deadline = hashlib.sha256(), 0, time.monotonic() + PATIENCE_S
    plain = {"Accept-Encoding": "identity"}  # a compressed body could unpack to anything
    try:
        with (
            to.open("wb") as file,
            httpx.stream("GET", url, headers=plain, follow_redirects=True, timeout=SILENCE_S) as reply,
        ):
            reply.raise_for_status()
            for chunk in reply.iter_raw():
                size += len(chunk)
                if size > max_bytes:
                    raise BadRowError(f"{url} has more than {max_bytes:,} bytes")
                if time.monotonic() > deadline:
                    raise BadRowError(f"{url} has not arrived within {PATIENCE_S:g} s")
                digest.update(chunk)
                file.write(chunk)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BadRowError(f"{url} cannot be fetched: {str(error) or type(error).__name__}") from error
    return digest.hexdigest()

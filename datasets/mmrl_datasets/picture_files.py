"""Pictures as rows give them: a path, the bytes themselves, or a data URL. All become files, named by reference."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mmrl.types import ImageRef
from mmrl_datasets.formats.row import BadRowError, shown
from mmrl_datasets.store import write_once

MAX_EMBEDDED_BYTES: Final = 64 << 20
MAX_DATA_URL_CHARS: Final = 32 << 20
URL: Final = re.compile(r"(?P<scheme>data(?=:)|[a-z][a-z0-9+.-]*(?=://)):", re.IGNORECASE)
DATA_URL: Final = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
ENDINGS: Final = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"RIFF": ".webp", b"GIF8": ".gif", b"BM": ".bmp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureFiles:
    """Where pictures lie (`root`, resolved; none outside it is read), and where those without a file go (`media`)."""

    root: Path
    media: Path
    allow_data_urls: bool = False

    def refs(self, entries: object) -> list[ImageRef]:
        """The pictures of a cell: one, a list, or null for none.

        Raises:
            BadRowError: one of them cannot be had.
            UserError: an embedded one cannot be written.
        """
        if entries is None:
            return []
        return [self.ref(entry) for entry in (entries if isinstance(entries, list) else [entries])]

    def ref(self, entry: object) -> ImageRef:
        """A picture from a path below `root`, a data URL, bytes, or Hugging Face's {bytes, path}; raises as `refs`."""
        match entry:
            case bytes():
                return self._unpacked(entry)
            case {"bytes": bytes(content)}:
                return self._unpacked(content)
            case {"bytes": None, "path": str(path)} | (str() as path) if path.strip():
                url = URL.match(path)
                return self._file(path) if url is None else self._url(path, url["scheme"].lower())
        raise BadRowError(f"picture must be text that is not empty, or bytes; is {shown(entry)}")

    def base64(self, text: str) -> ImageRef:
        """A picture written as base64; raises as `refs`."""
        try:
            return self._unpacked(base64.b64decode(text, validate=True))
        except ValueError as error:
            raise BadRowError(f"picture {shown(text)} is not base64 ({error})") from error

    def _file(self, relative: str) -> ImageRef:
        try:
            file = (self.root / relative).resolve(strict=True)
            if not file.is_relative_to(self.root):
                raise BadRowError(f"picture {shown(relative)} lies outside image_root {self.root}")
            if not file.is_file():
                raise BadRowError(f"picture {shown(relative)} cannot be read: it is no file")
            with file.open("rb") as content:
                return ImageRef(path=str(file), sha256=hashlib.file_digest(content, "sha256").hexdigest())
        except FileNotFoundError as error:
            raise BadRowError(f"picture {shown(relative)} is not under image_root {self.root}") from error
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError is how `resolve` reports a loop of links
            raise BadRowError(f"picture {shown(relative)} cannot be read: {error}") from error

    def _url(self, url: str, scheme: str) -> ImageRef:
        if scheme != "data":
            raise BadRowError(f"picture {shown(url)}: {scheme} URLs are refused; give a file under image_root")
        if not self.allow_data_urls:
            raise BadRowError(f"picture {shown(url)}: data URLs are refused unless `allow_data_urls: true`")
        head = DATA_URL.match(url)
        if head is None or len(url) > MAX_DATA_URL_CHARS:
            raise BadRowError(
                f"picture {shown(url[:80])} must be `data:image/...;base64,` "
                f"of at most {MAX_DATA_URL_CHARS >> 20} MiB, has {len(url)} characters"
            )
        return self.base64(url[head.end() :])

    def _unpacked(self, content: bytes) -> ImageRef:
        if not 0 < len(content) <= MAX_EMBEDDED_BYTES:
            raise BadRowError(f"picture of {len(content)} bytes; must have 1 to {MAX_EMBEDDED_BYTES >> 20} MiB")
        digest = hashlib.sha256(content).hexdigest()
        ending = next((ending for magic, ending in ENDINGS.items() if content.startswith(magic)), ".bin")
        path = self.media / digest[:2] / f"{digest}{ending}"
        write_once(path, content)
        return ImageRef(path=str(path), sha256=digest)

"""Turn the images and videos of a row into references to files.

A row gives a path, the bytes themselves, base64, or a URL. Bytes and downloads are stored as files, named by their
sha256. Nothing is decoded here: `mmrl.media` opens what the references name.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from http.client import HTTPException
from pathlib import Path
from typing import Final, NamedTuple
from urllib import request
from urllib.error import URLError
from urllib.parse import unquote, urlsplit

from mmrl.types import DatasetContext, ImageRef, MediaPolicy, UserError, VideoRef
from mmrl.utils.digests import file_digest, frames_digest
from mmrl.utils.file_index import shared_file_index
from mmrl.utils.files import list_frames, random_temporary_path, resolve_inside
from mmrl_datasets.formats.row import BadRowError, short_repr
from mmrl_datasets.media_files import write_if_changed

URL: Final = re.compile(r"(?P<scheme>data(?=:)|[a-z][a-z0-9+.-]*(?=://)):", re.IGNORECASE)
DATA_URL: Final = re.compile(r"data:(image|video)/[\w.+-]+;base64,", re.IGNORECASE)
HEAD_BYTES: Final = 16  # bytes at the start of a file that show its format
HASH_CACHE_SIZE: Final = 1024  # files whose sha256 is remembered, as several rows often name one file
READ_TIMEOUT_S: Final = 20.0  # longest time without a byte
TOTAL_TIMEOUT_S: Final = 600.0  # for the whole file: a server could send a byte now and then for ever
CHUNK_BYTES: Final = 1 << 16
# The default opener would also follow a redirect to file:// or ftp://.
ALLOWED_HANDLERS: Final = (
    *(request.ProxyHandler, request.HTTPHandler, request.HTTPSHandler, request.UnknownHandler),
    *(request.HTTPRedirectHandler, request.HTTPErrorProcessor, request.HTTPDefaultErrorHandler),
)
TimeRange = tuple[float | None, float | None]
"""Start and end of a part of a video, in seconds; None means its beginning or its end."""
WHOLE_VIDEO: Final = (None, None)


class MediaType(NamedTuple):
    """Image or video, and the formats that may be stored."""

    name: str
    # An offset, the bytes that a file has there, and the file extension of that format.
    signatures: tuple[tuple[int, bytes, str], ...]

    def detect_extension(self, content: bytes, source: str) -> str:
        """Return the file extension for content that begins with these bytes; raises BadRowError, naming `source`."""
        for offset, magic, extension in self.signatures:
            if content[offset:].startswith(magic):
                return extension
        extensions = ", ".join(extension for *_, extension in self.signatures)
        article = "an" if self.name.startswith("i") else "a"
        raise BadRowError(
            f"{source} is not {article} {self.name} ({extensions}); it begins with {content[:HEAD_BYTES]!r}"
        )


_IMAGE_SIGNATURES: Final = (
    *((0, b"\x89PNG", ".png"), (0, b"\xff\xd8\xff", ".jpg"), (8, b"WEBP", ".webp"), (0, b"GIF8", ".gif")),
    (0, b"BM", ".bmp"),
)
IMAGE: Final = MediaType("image", _IMAGE_SIGNATURES)
VIDEO: Final = MediaType("video", ((4, b"ftyp", ".mp4"), (0, b"\x1aE\xdf\xa3", ".mkv"), (8, b"AVI ", ".avi")))


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaResolver:
    """Turns cells that hold images or videos into references."""

    base: Path  # relative paths start here
    store_dir: Path  # embedded and downloaded media are stored under this folder
    media_policy: MediaPolicy  # the folders and URLs that may be read, and the largest sizes
    file_digest: Callable[[Path], str]  # returns the sha256 of a file, in hex; unchanged files are not read again
    folders: dict[str, str] = field(default_factory=dict)  # cache of `resolve_inside` for the folders of files

    def images(self, entries: object) -> list[ImageRef]:
        """Return the images of a cell, which holds one, a list of them, or null.

        Raises:
            BadRowError: one of them cannot be read, or may not be.
            UserError: an embedded or downloaded one cannot be stored.
        """
        return list(map(self.image, _as_list(entries)))

    def videos(self, entries: object, time_range: TimeRange = WHOLE_VIDEO, fps: float | None = None) -> list[VideoRef]:
        """Return the videos of a cell; raises as `images`, and for a time range beside several videos.

        With `fps`, a video may be a folder of frames.
        """
        videos = [self.video(entry, time_range, fps) for entry in _as_list(entries)]
        if time_range != WHOLE_VIDEO and len(videos) != 1:
            raise BadRowError(f"start and end belong to one video, and there are {len(videos)}")
        return videos

    def image(self, entry: object) -> ImageRef:
        """Return the image of a path, a URL, bytes, or a mapping that holds one of them; raises as `images`."""
        path, sha256 = self._resolve(entry, IMAGE)
        return ImageRef(path=str(path), sha256=sha256)

    def video(self, entry: object, time_range: TimeRange = WHOLE_VIDEO, fps: float | None = None) -> VideoRef:
        """Return the video of a path, a URL, bytes, or a mapping that holds one of them; raises as `videos`.

        A mapping may name a part of the video, as verl's does. With `fps`, a path may be a folder of frames.
        """
        match entry:
            case {"video": inner, **options}:
                return self.video(inner, _parse_video_options(options, time_range), fps)
            case str() if fps is not None and URL.match(entry) is None and os.path.isdir(self.base / entry):
                path, sha256 = self._resolve_frame_folder(entry)
                return VideoRef(path=str(path), sha256=sha256, start=time_range[0], end=time_range[1], fps=fps)
            case list():
                raise BadRowError(f"video {short_repr(entry)} is a list of frames; make it a video file")
        path, sha256 = self._resolve(entry, VIDEO)
        return VideoRef(path=str(path), sha256=sha256, start=time_range[0], end=time_range[1])

    def image_from_base64(self, text: str) -> ImageRef:
        """Return the image that is written as base64; raises as `images`."""
        path, sha256 = self._store_base64(text, IMAGE)
        return ImageRef(path=str(path), sha256=sha256)

    def _resolve(self, entry: object, media_type: MediaType) -> tuple[Path, str]:
        match entry:
            case bytes():
                return self._store_bytes(entry, media_type)
            case {"bytes": bytes(content)}:
                return self._store_bytes(content, media_type)
            case {"image": str() | bytes() as inner} if media_type is IMAGE:
                return self._resolve(inner, media_type)
            case {"bytes": None, "path": str(written)} | (str() as written) if written.strip():
                url = URL.match(written)
                if url is None:
                    return self._resolve_file(written, media_type)
                return self._resolve_url(written, url["scheme"].lower(), media_type)
        raise BadRowError(f"{media_type.name} must be text that is not empty, or bytes; is {short_repr(entry)}")

    def _resolve_file(self, written: str, media_type: MediaType) -> tuple[Path, str]:
        source = f"{media_type.name} {short_repr(written)}"
        try:
            path = resolve_inside(os.path.join(self.base, written), self.media_policy.roots, self.folders)
            if media_type is VIDEO and path.is_dir():
                raise BadRowError(
                    f"{source} is a folder; make its frames a video file, or name `fps` (tables and benchmarks)"
                )
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise BadRowError(f"{source} cannot be read: it is not a regular file")
            # The size is checked first: reading a file of many gigabytes for its sha256 would take minutes.
            self._check_size(status.st_size, media_type, source)
            return path, self.file_digest(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            missing = f"there is no such file; relative paths start from {self.base}"
            raise BadRowError(f"{source} cannot be read: {missing}") from error
        except UserError as error:
            raise BadRowError(f"{source}: {error}") from error
        except (OSError, ValueError) as error:
            raise BadRowError(f"{source} cannot be read: {error}") from error

    def _resolve_frame_folder(self, written: str) -> tuple[Path, str]:
        try:
            path = resolve_inside(self.base / written, self.media_policy.roots)
            hashes = {}
            for frame in list_frames(path, self.media_policy.roots):
                self._check_size(frame.stat().st_size, IMAGE, f"frame {frame}")
                hashes[frame.name] = self.file_digest(frame)
            return path, frames_digest(hashes)
        except (UserError, OSError) as error:
            raise BadRowError(f"video {short_repr(written)}: {error}") from error

    def _resolve_url(self, url: str, scheme: str, media_type: MediaType) -> tuple[Path, str]:
        # A policy that allows http allows https, too.
        source = f"{media_type.name} {short_repr(url)}"
        required = "http" if scheme == "https" else scheme
        if required not in self.media_policy.schemes:
            supported = required in ("http", "file", "data")
            remedy = f"unless data.allowed_url_schemes has {required}" if supported else "always"
            raise BadRowError(f"{source}: {scheme} URLs are refused {remedy}")
        match required:
            case "data":
                head, limit = DATA_URL.match(url), self.media_policy.max_data_url_bytes
                if head is None:
                    raise BadRowError(f"{source} must be `data:image/...;base64,` or `data:video/...`")
                # Checked before decoding. Four characters of base64 are three bytes, of which at most two are padding.
                if (len(url) - head.end()) * 3 // 4 - 2 > limit:
                    raise BadRowError(
                        f"{source} has more than {limit:,} bytes; "
                        "keep it in a file or raise data.media_limits.max_data_url_bytes"
                    )
                return self._store_base64(url[head.end() :], media_type)
            case "file":
                parts = urlsplit(url)
                if parts.netloc not in ("", "localhost"):
                    raise BadRowError(f"{source} is on another machine, {parts.netloc}")
                return self._resolve_file(unquote(parts.path), media_type)
        return self._download(url, media_type)

    def _download(self, url: str, media_type: MediaType) -> tuple[Path, str]:
        """Return the stored file of a URL, downloading it unless an earlier run did."""
        # The note, named by the sha256 of the URL, holds the path of the stored file.
        note = self.store_dir / "urls" / hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()
        fresh = random_temporary_path(note)
        try:
            if note.is_file():
                path = self.store_dir / note.read_text(encoding="utf-8")
                # A file that was damaged since then is downloaded again.
                if path.is_file() and file_digest(path) == path.stem:
                    return path, path.stem
            note.parent.mkdir(parents=True, exist_ok=True)
            try:
                sha256, head = _download_to(fresh, url, self._byte_limit(media_type)[1])
                extension = media_type.detect_extension(head, f"{media_type.name} {short_repr(url)}")
                path = self._stored_path(sha256, extension)
                path.parent.mkdir(exist_ok=True)
                fresh.replace(path)
            finally:
                fresh.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{self.store_dir}: cannot store {short_repr(url)}: {error}; free space") from error
        write_if_changed(note, str(path.relative_to(self.store_dir)).encode())
        return path, sha256

    def _store_base64(self, text: str, media_type: MediaType) -> tuple[Path, str]:
        try:
            return self._store_bytes(base64.b64decode(text, validate=True), media_type)
        except ValueError as error:
            raise BadRowError(f"{media_type.name} {short_repr(text)} is not base64 ({error})") from error

    def _store_bytes(self, content: bytes, media_type: MediaType) -> tuple[Path, str]:
        source = f"embedded {media_type.name}"
        self._check_size(len(content), media_type, source)
        sha256 = hashlib.sha256(content).hexdigest()
        path = self._stored_path(sha256, media_type.detect_extension(content, source))
        write_if_changed(path, content)
        return path, sha256

    def _stored_path(self, sha256: str, extension: str) -> Path:
        return self.store_dir / sha256[:2] / f"{sha256}{extension}"

    def _check_size(self, size: int, media_type: MediaType, source: str) -> None:
        key, limit = self._byte_limit(media_type)
        if not 0 < size <= limit:
            raise BadRowError(f"{source} has {size:,} bytes, must have 1 to {limit:,}; see data.media_limits.{key}")

    def _byte_limit(self, media_type: MediaType) -> tuple[str, int]:
        """Return the key of the limit below `data.media_limits`, and its value."""
        if media_type is IMAGE:
            return "max_image_bytes", self.media_policy.max_bytes
        return "max_video_bytes", self.media_policy.max_video_bytes


def make_media_resolver(context: DatasetContext, media_root: str | None, path: str) -> MediaResolver:
    """Return the resolver for the media of the table `path`; embedded media are stored under `work_dir`/media.

    Relative paths start from `media_root`; without one from the folder of the table, or from `base_dir` if the table is
    no file or folder.
    """
    table = context.base_dir / path
    if media_root is not None:
        base = context.base_dir / media_root
    elif table.is_dir():
        base = table
    elif table.exists():
        base = table.parent
    else:
        base = context.base_dir
    return MediaResolver(
        base=base,
        store_dir=context.work_dir / "media",
        media_policy=context.media_policy,
        file_digest=lru_cache(HASH_CACHE_SIZE)(shared_file_index().file_digest),
    )


def parse_time_range(start: object, end: object) -> TimeRange:
    """Return the part of a video that two cells name, in seconds; null means its beginning or its end.

    Raises:
        BadRowError: they are not numbers of seconds, or in the wrong order.
    """
    start_s, end_s = _parse_seconds(start, "start"), _parse_seconds(end, "end")
    if end_s is not None and (start_s or 0.0) >= end_s:
        raise BadRowError(f"a part of a video must have start < end, is {start_s or 0.0:g} to {end_s:g} s")
    return start_s, end_s


def parse_fps(value: object) -> float | None:
    """Return the frame rate of a cell, None for null; raises BadRowError if it is not a positive number."""
    fps = _parse_seconds(value, "fps")
    if fps == 0.0:
        raise BadRowError(f"fps must be more than 0, is {short_repr(value)}")
    return fps


def _parse_seconds(value: object, role: str) -> float | None:
    # CSV and JSON write a number in their own ways, so text of a number counts, too. Null stays null.
    if value is None:
        return None
    try:
        seconds = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        seconds = None
    if seconds is None or not 0.0 <= seconds < float("inf"):
        raise BadRowError(f"{role} must be a number of seconds, is {short_repr(value)}")
    return seconds


def _parse_video_options(options: Mapping[object, object], column_range: TimeRange) -> TimeRange:
    """Return the part of a video that a mapping of verl or qwen-vl-utils names, or that the columns name."""
    for key in options:
        if key not in ("type", "video_start", "video_end"):
            raise BadRowError(f"a video's {key!r} is up to the config (model.video): remove it from the data")
    if column_range == WHOLE_VIDEO:
        return parse_time_range(options.get("video_start"), options.get("video_end"))
    if "video_start" in options or "video_end" in options:
        raise BadRowError("both the columns and the video itself say which part of it is meant")
    return column_range


def _as_list(entries: object) -> list[object]:
    if entries is None:
        return []
    return entries if isinstance(entries, list) else [entries]


def _download_to(file: Path, url: str, max_bytes: int) -> tuple[str, bytes]:
    """Write the content of a URL to a file, and return its sha256 and its first bytes."""
    sha256, size, head = hashlib.sha256(), 0, b""
    with file.open("wb") as content:
        for chunk in _download_chunks(url):
            size += len(chunk)
            if size > max_bytes:
                raise BadRowError(f"{url} has more than {max_bytes:,} bytes")
            sha256.update(chunk)
            content.write(chunk)
            head = (head + chunk)[:HEAD_BYTES]
    return sha256.hexdigest(), head


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

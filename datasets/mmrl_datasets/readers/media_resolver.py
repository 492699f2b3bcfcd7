"""Media as rows give them: a path, the bytes themselves, or a URL. All become files, named by reference."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from mmrl.types import DatasetContext, ImageRef, MediaPolicy, UserError, VideoRef
from mmrl.utils.files import compute_frames_digest, compute_sha256, list_frames, resolve_inside
from mmrl_datasets.file_writes import write_if_changed
from mmrl_datasets.formats.row import BadRowError, short_repr
from mmrl_datasets.readers.download import download

URL: Final = re.compile(r"(?P<scheme>data(?=:)|[a-z][a-z0-9+.-]*(?=://)):", re.IGNORECASE)
DATA_URL: Final = re.compile(r"data:(image|video)/[\w.+-]+;base64,", re.IGNORECASE)
HEAD_BYTES: Final = 16
DIGEST_CACHE_SIZE: Final = 1024  # several rows often ask about one file


class MediaType(NamedTuple):
    """A kind of medium, and how its files begin: an offset, what stands there, and the ending that says so."""

    name: str
    signatures: tuple[tuple[int, bytes, str], ...]

    def detect_extension(self, content: bytes, where: str) -> str:
        """The ending that the first bytes call for.

        Raises:
            BadRowError: they are of no such medium.
        """
        for offset, magic, ending in self.signatures:
            if content[offset:].startswith(magic):
                return ending
        endings = ", ".join(ending for *_, ending in self.signatures)
        raise BadRowError(f"{where} is no {self.name} ({endings}); it begins with {content[:HEAD_BYTES]!r}")


IMAGE: Final = MediaType(
    "picture",
    (
        (0, b"\x89PNG", ".png"),
        (0, b"\xff\xd8\xff", ".jpg"),
        (8, b"WEBP", ".webp"),
        (0, b"GIF8", ".gif"),
        (0, b"BM", ".bmp"),
    ),
)
VIDEO: Final = MediaType(
    "video",
    ((4, b"ftyp", ".mp4"), (0, b"\x1aE\xdf\xa3", ".mkv"), (8, b"AVI ", ".avi")),
)
WHOLE_VIDEO: Final = (None, None)
TimeRange = tuple[float | None, float | None]  # the part of a video that is meant, in seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaResolver:
    """Where relative paths start (`base`), where media without a file go (`store`), and what may be read."""

    base: Path
    store_dir: Path
    media_policy: MediaPolicy
    compute_digest: Callable[[Path], str]

    def images(self, entries: object) -> list[ImageRef]:
        """The pictures of a cell: one, a list, or null for none.

        Raises:
            BadRowError: one of them cannot be had, or may not.
            UserError: one without a file cannot be written.
        """
        return [self.image(entry) for entry in _as_list(entries)]

    def videos(self, entries: object, time_range: TimeRange = WHOLE_VIDEO, fps: float | None = None) -> list[VideoRef]:
        """The videos of a cell, likewise; `clip` is a part of the only one, `fps` the rate of folders of frames."""
        videos = [self.video(entry, time_range, fps) for entry in _as_list(entries)]
        if time_range != WHOLE_VIDEO and len(videos) != 1:
            raise BadRowError(f"start and end belong to one video, and there are {len(videos)}")
        return videos

    def image(self, entry: object) -> ImageRef:
        """A picture from a path, a URL, bytes, or a mapping that holds one of them; raises as `images`."""
        path, sha256 = self._resolve(entry, IMAGE)
        return ImageRef(path=str(path), sha256=sha256)

    def video(self, entry: object, time_range: TimeRange = WHOLE_VIDEO, fps: float | None = None) -> VideoRef:
        """A video, likewise; verl's mapping may say which part of it. With `fps` it may be a folder of frames."""
        match entry:
            case {"video": inner, **rest}:
                return self.video(inner, _parse_video_options(rest, time_range), fps)
            case str() if fps is not None and URL.match(entry) is None and (self.base / entry).is_dir():
                path, sha256 = self._resolve_frame_folder(entry)
                return VideoRef(path=str(path), sha256=sha256, start=time_range[0], end=time_range[1], fps=fps)
            case list():
                raise BadRowError(f"video {short_repr(entry)} is a list of frames; make it a video file")
        path, sha256 = self._resolve(entry, VIDEO)
        return VideoRef(path=str(path), sha256=sha256, start=time_range[0], end=time_range[1])

    def image_from_base64(self, text: str) -> ImageRef:
        """A picture written as base64; raises as `images`."""
        path, sha256 = self._store_base64(text, IMAGE)
        return ImageRef(path=str(path), sha256=sha256)

    def _resolve(self, entry: object, medium: MediaType) -> tuple[Path, str]:
        match entry:
            case bytes():
                return self._store_bytes(entry, medium)
            case {"bytes": bytes(content)}:
                return self._store_bytes(content, medium)
            case {"image": str() | bytes() as inner} if medium is IMAGE:
                return self._resolve(inner, medium)
            case {"bytes": None, "path": str(written)} | (str() as written) if written.strip():
                url = URL.match(written)
                return (
                    self._resolve_file(written, medium)
                    if url is None
                    else self._resolve_url(written, url["scheme"].lower(), medium)
                )
        raise BadRowError(f"{medium.name} must be text that is not empty, or bytes; is {short_repr(entry)}")

    def _resolve_file(self, written: str, medium: MediaType) -> tuple[Path, str]:
        where = f"{medium.name} {short_repr(written)}"
        try:
            path = resolve_inside(self.base / written, self.media_policy.roots)
            if path.is_dir() and medium is VIDEO:
                raise BadRowError(
                    f"{where} is a folder; make its frames a video file, or name `fps`, as benchmarks can"
                )
            if not path.is_file():
                problem = (
                    "it is no file" if path.exists() else f"it is not there; relative paths start from {self.base}"
                )
                raise BadRowError(f"{where} cannot be read: {problem}")
            self._check_size(path.stat().st_size, medium, where)
            return path, self.compute_digest(path)
        except UserError as error:
            raise BadRowError(f"{where}: {error}") from error
        except (OSError, ValueError) as error:
            raise BadRowError(f"{where} cannot be read: {error}") from error

    def _resolve_frame_folder(self, written: str) -> tuple[Path, str]:
        """A folder of frames, and a digest over all of them."""
        try:
            path = resolve_inside(self.base / written, self.media_policy.roots)
            frames = list_frames(path, self.media_policy.roots)
            for frame in frames:
                self._check_size(frame.stat().st_size, IMAGE, f"frame {frame}")
            return path, compute_frames_digest({frame.name: self.compute_digest(frame) for frame in frames})
        except (UserError, OSError) as error:
            raise BadRowError(f"video {short_repr(written)}: {error}") from error

    def _resolve_url(self, url: str, scheme: str, medium: MediaType) -> tuple[Path, str]:
        permit = "http" if scheme == "https" else scheme
        if permit not in self.media_policy.schemes:
            remedy = f"unless data.urls has {permit}" if permit in ("http", "file", "data") else "always"
            raise BadRowError(f"{medium.name} {short_repr(url)}: {scheme} URLs are refused {remedy}")
        match permit:
            case "data":
                return self._resolve_data_url(url, medium)
            case "file":
                return self._resolve_file_url(url, medium)
        return self._download(url, medium)

    def _resolve_data_url(self, url: str, medium: MediaType) -> tuple[Path, str]:
        head, limit = DATA_URL.match(url), self.media_policy.max_data_url_bytes
        if head is None:
            raise BadRowError(f"{medium.name} {short_repr(url)} must be `data:image/...;base64,` or `data:video/...`")
        if (len(url) - head.end()) * 3 // 4 - 2 > limit:  # at most two of the bytes are padding
            raise BadRowError(
                f"{medium.name} {short_repr(url)} has more than {limit:,} bytes; "
                "keep it in a file or raise data.limits.max_data_url_bytes"
            )
        return self._store_base64(url[head.end() :], medium)

    def _resolve_file_url(self, url: str, medium: MediaType) -> tuple[Path, str]:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise BadRowError(f"{medium.name} {short_repr(url)} is on another machine, {parts.netloc}")
        return self._resolve_file(unquote(parts.path), medium)

    def _download(self, url: str, medium: MediaType) -> tuple[Path, str]:
        """A file from the network; where it was put is noted, so that the next run need not fetch it."""
        note = self.store_dir / "urls" / hashlib.sha256(url.encode("utf-8", "surrogateescape")).hexdigest()
        try:
            if note.is_file():
                path = self.store_dir / note.read_text(encoding="utf-8")
                if path.is_file() and compute_sha256(path) == path.stem:
                    return path, path.stem
            note.parent.mkdir(parents=True, exist_ok=True)
            partial = note.with_suffix(f".{os.getpid()}.partial")
            try:
                sha256 = download(url, partial, self._byte_limit(medium)[1])
                with partial.open("rb") as file:
                    path = self._stored_path(
                        sha256, medium.detect_extension(file.read(HEAD_BYTES), f"{medium.name} {short_repr(url)}")
                    )
                path.parent.mkdir(exist_ok=True)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{self.store_dir}: cannot keep {short_repr(url)}: {error}; make room") from error
        write_if_changed(note, str(path.relative_to(self.store_dir)).encode())
        return path, sha256

    def _store_base64(self, text: str, medium: MediaType) -> tuple[Path, str]:
        try:
            return self._store_bytes(base64.b64decode(text, validate=True), medium)
        except ValueError as error:
            raise BadRowError(f"{medium.name} {short_repr(text)} is not base64 ({error})") from error

    def _store_bytes(self, content: bytes, medium: MediaType) -> tuple[Path, str]:
        where = f"embedded {medium.name}"
        self._check_size(len(content), medium, where)
        sha256 = hashlib.sha256(content).hexdigest()
        path = self._stored_path(sha256, medium.detect_extension(content, where))
        write_if_changed(path, content)
        return path, sha256

    def _stored_path(self, sha256: str, ending: str) -> Path:
        return self.store_dir / sha256[:2] / f"{sha256}{ending}"

    def _check_size(self, size: int, medium: MediaType, where: str) -> None:
        key, limit = self._byte_limit(medium)
        if not 0 < size <= limit:
            raise BadRowError(f"{where} has {size:,} bytes, must have 1 to {limit:,}; see data.limits.{key}")

    def _byte_limit(self, medium: MediaType) -> tuple[str, int]:
        if medium is IMAGE:
            return "max_bytes", self.media_policy.max_bytes
        return "max_video_bytes", self.media_policy.max_video_bytes


def make_media_resolver(place: DatasetContext, media_root: str | None, path: str) -> MediaResolver:
    """Media in files, and those unpacked to `place.work`/media.

    Relative paths start from `media_root`, itself relative to `place.base`; by default from the folder of the table
    `path`, or from `place.base` when that is no file.
    """
    table = place.base_dir / path
    beside = table if table.is_dir() else table.parent if table.exists() else place.base_dir
    return MediaResolver(
        base=beside if media_root is None else place.base_dir / media_root,
        store_dir=place.work_dir / "media",
        media_policy=place.media_policy,
        compute_digest=lru_cache(DIGEST_CACHE_SIZE)(compute_sha256),
    )


def parse_time_range(start: object, end: object) -> TimeRange:
    """The part of a video from `start` to `end`, in seconds; null for its beginning and its end.

    Raises:
        BadRowError: they are not such numbers, or in the wrong order.
    """
    first, last = _parse_seconds(start, "start"), _parse_seconds(end, "end")
    if last is not None and (first or 0.0) >= last:
        raise BadRowError(f"a part of a video must have start < end, is {first or 0.0:g} to {last:g} s")
    return first, last


def parse_fps(value: object) -> float | None:
    """Frames a second of videos that are folders of frames; null for none.

    Raises:
        BadRowError: it is no positive number.
    """
    if value is not None and not (fps := _parse_seconds(value, "fps")):
        raise BadRowError(f"fps must be more than 0, is {short_repr(value)}")
    return None if value is None else fps


def _parse_seconds(value: object, role: str) -> float | None:
    try:
        seconds = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        seconds = -1.0
    if value is None:
        return None
    if seconds is None or not 0.0 <= seconds < float("inf"):
        raise BadRowError(f"{role} must be a number of seconds, is {short_repr(value)}")
    return seconds


def _parse_video_options(options: Mapping[object, object], column_range: TimeRange) -> TimeRange:
    """The part that verl's and qwen-vl-utils' mapping says; how frames are chosen from it is no business of data."""
    known = ("type", "video_start", "video_end")
    for key in options:
        if key not in known:
            raise BadRowError(f"a video's {key!r} is the config's business (model.video): remove it from the data")
    if column_range != WHOLE_VIDEO and ("video_start" in options or "video_end" in options):
        raise BadRowError("both columns and the video itself say which part of it is meant")
    return (
        column_range
        if column_range != WHOLE_VIDEO
        else parse_time_range(options.get("video_start"), options.get("video_end"))
    )


def _as_list(entries: object) -> list[object]:
    if entries is None:
        return []
    return entries if isinstance(entries, list) else [entries]

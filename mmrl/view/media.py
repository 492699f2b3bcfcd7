"""Pictures of the page: the images and video frames of a run's records, at the size that the model saw.

A picture is named by a digest of what it shows, and found in a table that is built from the records: no request names a
file. Files are opened as in training, inside the run's media folders alone, within its limits, and only if their sha256
is the recorded one.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from mmrl.config.schema import MediaConfig, MediaLimitsConfig
from mmrl.config.schema.model import VideoConfig
from mmrl.data.context import benchmark_folders, make_media_policy
from mmrl.types import Corruption, ImageRef, MediaError, MediaPolicy, Size, VideoRef
from mmrl.utils.digests import file_digest, text_digest
from mmrl.view.marks import BAD_VALUE
from mmrl.view.records import as_list, as_mapping

if TYPE_CHECKING:
    from PIL import Image

    from mmrl.media.cache import MediaCache

_SectionT = TypeVar("_SectionT", bound=BaseModel)

MAX_FRAMES: Final = 16  # frames of a video that the page shows
MAX_SIDE: Final = 1024  # pixels of a picture's longer side
MAX_SIDE_IN_SINGLE_FILE: Final = 512  # a page in one file is opened whole
LEFT_OUT: Final = "left out (--no-media)"
_NO_FRAMES: Final = [{"src": None, "second": None}]
_ID_CHARS: Final = 16
_WEBP_QUALITY: Final = 82
_WEBP_EFFORT: Final = 1  # 4, the default, takes three times as long for files a sixth smaller
_CACHE_BYTES: Final = 128 * 2**20  # of decoded images, so that several crops of one open it once
# Only the size that `plan_frames` computes depends on it, and the records have that size.
_ANY_PATCH_SIZE: Final = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """An image or video as the model saw it: what a record says of it."""

    kind: str  # image or video
    path: str  # absolute path of the file or folder
    sha256: str  # hash of its content; empty in records of older versions
    timestamp: float | None  # second of the video whose frame the image is
    crop: tuple[int, int, int, int] | None  # left, top, right, bottom, in pixels
    fps: float | None  # frame rate of a folder of frames
    corruption: Corruption | None  # how the content was hidden
    start: float | None  # second at which the part of a video begins
    end: float | None  # second at which it ends
    resized: tuple[int, int] | None  # size for the model; None in records of older versions

    def picture_id(self, frame: int) -> str:
        """Return the name of the picture of a frame, which other pictures do not have."""
        return text_digest(json.dumps([asdict(self), frame]))[:_ID_CHARS]


def parse_medium(record: Mapping[str, Any], run_dir: Path) -> Medium:
    """Return the medium of a record; relative paths start from `run_dir`.

    Raises:
        TypeError, ValueError, KeyError: the record is damaged.
    """
    crop, resized = record.get("crop"), record.get("resized")
    return Medium(
        kind="video" if record["kind"] == "video" else "image",
        path=str(run_dir.absolute() / record["path"]),
        sha256=str(record.get("sha256") or ""),
        timestamp=_number(record.get("timestamp")),
        crop=None if crop is None else _four(crop),
        fps=_number(record.get("fps")),
        corruption=None if record.get("corruption") is None else Corruption(record["corruption"]),
        start=_number(record.get("start")),
        end=_number(record.get("end")),
        resized=None if resized is None else _size(resized),
    )


class MediaOpener:
    """Opens the media of one run under the rules of its config."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any], media_roots: Sequence[Path]) -> None:
        """`settings` is the run's config, of which unusable parts count as the defaults; `media_roots` are more."""
        data = as_mapping(settings.get("data"))
        self._limits = _section(MediaLimitsConfig, data.get("media_limits"))
        self._video = _section(VideoConfig, as_mapping(settings.get("model")).get("video"))
        # A run does not record the folder of its config, which relative roots start from. Training is mostly started
        # in the same folder as the page.
        base_dir = Path.cwd()
        roots = [run_dir / "data", *media_roots]
        roots += [base_dir / root for root in as_list(data.get("media_roots")) if isinstance(root, str)]
        for benchmark in as_list(as_mapping(settings.get("evaluation")).get("benchmarks")):
            files = filter(_is_text, as_list(as_mapping(benchmark).get("data")))
            roots += benchmark_folders(files, as_mapping(benchmark).get("media_root"), base_dir)
        media = _section(MediaConfig, settings.get("media"))
        self._policy: MediaPolicy = make_media_policy(self._limits, roots, schemes=(), media=media)
        self._cache: MediaCache | None = None

    def check_file(self, medium: Medium) -> None:
        """Check a medium without decoding it.

        Raises:
            MediaError: the file is gone, changed or outside the media folders, in words for a reader of the page.
        """
        path = Path(medium.path)
        try:
            inside = any(map(path.resolve().is_relative_to, self._policy.roots))
            exists = path.exists()
            if not inside:
                raise MediaError("outside the media folders of the run; `--media-root` adds one")
            if not exists:
                raise MediaError("the file is gone")
            if medium.sha256 and path.is_file() and file_digest(path) != medium.sha256:
                raise MediaError("changed since it was recorded")
        except (OSError, RuntimeError, ValueError) as error:
            raise MediaError(f"cannot be found or read ({error})") from error

    def read_frames(self, medium: Medium) -> Iterator[tuple[float | None, Image.Image]]:
        """Yield second and pixels of each frame that the page shows; of an image it is one, without a second.

        Raises:
            MediaError: as `check_file`; or it is damaged, or exceeds a limit.
        """
        self.check_file(medium)
        if medium.kind == "video":
            yield from self._read_video(medium)
            return
        from mmrl.media.cache import MediaCache  # imports torch, which takes seconds

        if self._cache is None:
            self._cache = MediaCache(self._policy, self._limits, max_bytes=_CACHE_BYTES)
        image = self._cache.get_image(
            ImageRef(
                path=medium.path,
                sha256=medium.sha256 or file_digest(Path(medium.path)),
                corruption=medium.corruption,
                timestamp=medium.timestamp,
                crop=medium.crop,
                fps=medium.fps,
            )
        )
        yield None, image

    def _read_video(self, medium: Medium) -> Iterator[tuple[float | None, Image.Image]]:
        from PIL import Image

        from mmrl.media.corruptions import corrupt_video
        from mmrl.media.video import FrameSampling, decode_frames, open_reader, plan_frames

        ref = VideoRef(
            path=medium.path,
            sha256=medium.sha256 or file_digest(Path(medium.path)),
            start=medium.start,
            end=medium.end,
            corruption=medium.corruption,
            fps=medium.fps,
        )
        sampling = FrameSampling(video=self._video, patch_size=_ANY_PATCH_SIZE)
        with open_reader(ref, self._policy, self._limits) as reader:
            plan = plan_frames(ref, sampling, reader, self._limits)
            # Not larger than shown, whatever size a record has: all frames are in memory together.
            plan = replace(plan, resized_size=_fit(medium.resized or plan.resized_size, MAX_SIDE))
            shown = _spread(range(len(plan.indices)))
            if ref.corruption is None:
                plan = replace(plan, indices=tuple(plan.indices[place] for place in shown))
                shown = range(len(plan.indices))
            video = corrupt_video(decode_frames(reader, plan), ref)
            for place in shown:
                pixels_HWC = video.frames_TCHW[place].round().clamp(0, 255).byte().permute(1, 2, 0).numpy()
                yield reader.timeline.seconds_at(plan.indices[place]), Image.fromarray(pixels_HWC)


class PictureStore:
    """Makes the pictures of all runs of a page, each once, and keeps them in a temporary file."""

    def __init__(self, *, with_media: bool, max_side: int, when_asked: bool = False) -> None:
        """`max_side` is the longer side of the largest picture, in pixels; without media every one is left out.

        With `when_asked` an image is decoded when `read` asks for it, so that a live page shows its text at once.
        """
        self._with_media, self._max_side, self._when_asked = with_media, max_side, when_asked
        self._unmade: dict[str, tuple[Medium, MediaOpener]] = {}  # by id, images that were described and not decoded
        self._file = TemporaryFile(prefix="mmrl-view-")  # noqa: SIM115 (it is deleted with the store)
        self._places: dict[str, tuple[int, int]] = {}  # by id, offset in the file and bytes
        self._described: dict[Medium, dict[str, Any]] = {}
        self._lock = Lock()
        self.num_bytes = 0  # of all pictures

    @property
    def num_pictures(self) -> int:
        """Number of pictures so far."""
        return len(self._places)

    def describe(self, record: object, opener: MediaOpener, run_dir: Path) -> dict[str, Any]:
        """Return the document's entry of a recorded medium, after its pictures are made.

        A medium that cannot be shown has a `problem` and no pictures.
        """
        try:
            medium = parse_medium(as_mapping(record), run_dir)
        except BAD_VALUE:
            return _entry(as_mapping(record), None, "its record is damaged")
        with self._lock:
            if medium not in self._described:
                self._described[medium] = self._make(as_mapping(record), medium, opener)
            return self._described[medium]

    def read(self, picture_id: str) -> bytes | None:
        """Return a picture of a document that was made, as WebP; None if there is none, or it cannot be decoded."""
        with self._lock:
            if picture_id in self._unmade:
                medium, opener = self._unmade.pop(picture_id)
                # What was found out meanwhile is shown when the document is made again.
                self._described[medium] |= self._add_frames(medium, opener)
            if picture_id not in self._places:
                return None
            offset, size = self._places[picture_id]
            self._file.seek(offset)
            return self._file.read(size)

    def items(self) -> Iterator[tuple[str, bytes]]:
        """Yield name and content of every picture."""
        for picture_id in list(self._places):
            yield picture_id, self.read(picture_id) or b""

    def _make(self, record: Mapping[str, Any], medium: Medium, opener: MediaOpener) -> dict[str, Any]:
        """Return the entry of a medium that was not described before."""
        if not self._with_media:
            return _entry(record, medium, LEFT_OUT)
        # A video's frames are known only when it is opened.
        if not self._when_asked or medium.kind == "video" or medium.resized is None:
            return _entry(record, medium, None) | self._add_frames(medium, opener)
        try:
            opener.check_file(medium)
        except MediaError as error:
            return _entry(record, medium, str(error))
        self._unmade[medium.picture_id(0)] = (medium, opener)
        return _entry(record, medium, None) | {"frames": [_frame(medium, 0, None)]}

    def _add_frames(self, medium: Medium, opener: MediaOpener) -> dict[str, Any]:
        """Make the pictures of a medium; return the keys of its entry that say how this went."""
        frames = []
        size = medium.resized
        try:
            for number, (second, image) in enumerate(opener.read_frames(medium)):
                size = size or image.size
                self._add(medium.picture_id(number), image, size)
                frames.append(_frame(medium, number, second))
        except MediaError as error:
            return {"problem": _describe_problem(error, medium), "frames": _NO_FRAMES}
        except OSError as error:
            return {"problem": f"cannot be read ({error.strerror})", "frames": _NO_FRAMES}
        width, height = size or (0, 0)
        return {"width": width, "height": height, "frames": frames}

    def _add(self, picture_id: str, image: Image.Image, size: tuple[int, int]) -> None:
        shown = _fit(size, self._max_side)
        encoded = io.BytesIO()
        (image if image.size == shown else image.resize(shown)).save(
            encoded, "WEBP", quality=_WEBP_QUALITY, method=_WEBP_EFFORT
        )
        offset = self._file.seek(0, io.SEEK_END)
        self._file.write(encoded.getvalue())
        self._places[picture_id] = (offset, encoded.tell())
        self.num_bytes += encoded.tell()


def _entry(record: Mapping[str, Any], medium: Medium | None, problem: str | None) -> dict[str, Any]:
    """Return the entry of a medium without pictures; width and height are 0 where nobody knows them."""
    width, height = medium.resized if medium and medium.resized else (0, 0)
    return {
        "kind": medium.kind if medium else "image",
        # The name alone: an export is shown to others, and folders are nobody's business.
        "name": Path(str(record.get("path", ""))).name,
        "width": width,
        "height": height,
        "original": record.get("original"),
        "frames": _NO_FRAMES,
        "problem": problem,
    }


def _frame(medium: Medium, number: int, second: float | None) -> dict[str, Any]:
    return {"src": f"media/{medium.picture_id(number)}.webp", "second": second}


def _describe_problem(error: MediaError, medium: Medium) -> str:
    text = str(error).removeprefix(f"{medium.path}: ")
    return text.split("\n")[0][:200]


def _section(schema: type[_SectionT], settings: object) -> _SectionT:
    """Return a section of the config; the defaults if it is of another version."""
    try:
        return schema.model_validate(settings or {})
    except ValidationError:
        return schema()


def _spread(places: Sequence[int]) -> Sequence[int]:
    """Return at most `MAX_FRAMES` of these places, evenly, the first and the last among them."""
    if len(places) <= MAX_FRAMES:
        return places
    last = len(places) - 1
    return [places[round(number * last / (MAX_FRAMES - 1))] for number in range(MAX_FRAMES)]


def _fit(size: tuple[int, int], max_side: int) -> Size:
    """Return a size with the same ratio and no side above `max_side`."""
    scale = min(1.0, max_side / max(size))
    return Size(max(1, round(size[0] * scale)), max(1, round(size[1] * scale)))


def _size(values: Sequence[Any]) -> tuple[int, int]:
    width, height = map(int, values)
    if min(width, height) < 1:
        raise ValueError(f"{width}x{height} is not a size")
    return width, height


def _number(value: object) -> float | None:
    return None if value is None else float(value)  # type: ignore[arg-type]


def _four(values: Sequence[Any]) -> tuple[int, int, int, int]:
    left, top, right, bottom = map(int, values)
    return left, top, right, bottom


def _is_text(value: object) -> bool:
    return isinstance(value, str)

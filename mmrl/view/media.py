"""Pictures of the page: the images and video frames of a run's records, at the size that the model saw.

A picture is named by a digest of what it shows: no request names a file. Files are opened as in training:
only inside the run's media folders, within its limits, and if their sha256 is the recorded one.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import ValidationError

from mmrl.config.schema import MediaConfig, MediaLimitsConfig
from mmrl.config.schema.model import VideoConfig
from mmrl.log.rollout_records import BAD_VALUE, parse_medium
from mmrl.media.checks import make_media_policy
from mmrl.types import ImageRef, MediaError, MediaRef, Size, VideoRef
from mmrl.utils.digests import file_digest, text_digest
from mmrl.view.records import Row, as_list, as_mapping

if TYPE_CHECKING:
    from PIL import Image

MAX_FRAMES: Final = 16  # frames of a video that the page shows
MAX_SIDE: Final = 1024  # pixels of a picture's longer side
_NO_FRAMES: Final = [{"src": None, "second": None}]


class Medium(NamedTuple):
    """An image or video as the model saw it."""

    ref: MediaRef  # the file, and the part of it
    size: Size  # size for the model

    def picture_id(self, frame: int) -> str:
        """Return a unique name for the picture of a frame."""
        return text_digest(json.dumps([type(self.ref).__name__, asdict(self.ref), self.size, frame]))[:16]


class RunMedia:
    """Opens the media of one run under the rules of its config."""

    def __init__(
        self, run_dir: Path, settings: Mapping[str, Any], config_folder: Path, media_roots: Sequence[Path]
    ) -> None:
        """Take the rules from `settings`, the run's config; parts that cannot be used are replaced by the defaults.

        Its relative folders start from `config_folder`; `media_roots` are further media folders.
        """
        self.run_dir = run_dir
        data = as_mapping(settings.get("data"))
        try:
            self._limits = MediaLimitsConfig.model_validate(data.get("media_limits") or {})
            self._video = VideoConfig.model_validate(as_mapping(settings.get("model")).get("video") or {})
        except ValidationError:  # of another version
            self._limits, self._video = MediaLimitsConfig(), VideoConfig()
        roots = [run_dir / "data", *media_roots]
        roots += [config_folder / str(root) for root in as_list(data.get("media_roots"))]
        self._policy = make_media_policy(self._limits, roots, schemes=(), media=MediaConfig())

    def find_problem(self, ref: MediaRef) -> str | None:
        """Return, without decoding the file, why it cannot be shown, in words for a reader of the page."""
        path = Path(ref.path)
        try:
            if not any(map(path.resolve().is_relative_to, self._policy.roots)):
                return "outside the media folders of the run; `--media-root` adds one"
            if not path.exists():
                return "the file is gone"
            is_changed = path.is_file() and file_digest(path) != ref.sha256
        except (OSError, RuntimeError, ValueError):
            return "cannot be found or read"
        return "changed since it was recorded" if is_changed else None

    def read_frames(self, ref: MediaRef) -> Iterator[tuple[float | None, Image.Image]]:
        """Yield second and pixels of each frame that the page shows; for an image, one frame whose second is None.

        Raises:
            MediaError: the file is gone, changed, outside the media folders, damaged, or exceeds a limit.
        """
        from PIL import Image

        from mmrl.media.image import open_shown_image

        if isinstance(ref, ImageRef) and ref.timestamp is None:
            yield None, open_shown_image(ref, self._policy.roots, self._limits)
            return
        # These modules import torch, which takes seconds.
        from mmrl.media.cache import MediaCache
        from mmrl.media.video import FrameSampling

        media = MediaCache(self._policy, self._limits, max_bytes=0)
        if isinstance(ref, ImageRef):
            yield None, media.get_image(ref)
            return
        # Only the size of the frames depends on the patch size, and the records have the size for the model.
        video = media.read_video(ref, FrameSampling(video=self._video, patch_size=14))
        indices = video.plan.indices
        step = max(1.0, (len(indices) - 1) / (MAX_FRAMES - 1))
        for number in range(min(len(indices), MAX_FRAMES)):
            place = round(number * step)
            pixels_HWC = video.frames_TCHW[place].round().clamp(0, 255).byte().permute(1, 2, 0).numpy()
            yield indices[place] / video.plan.fps, Image.fromarray(pixels_HWC)


class PictureStore:
    """Makes the pictures of all runs of a page, each once. One thread at a time may use it."""

    def __init__(self, *, with_media: bool, is_live: bool = True) -> None:
        """Create a store; without media every picture is left out. A live page decodes an image once it is read."""
        self._with_media, self._is_live = with_media, is_live
        self._described: dict[Medium, Row] = {}
        self._unmade: dict[str, tuple[Medium, RunMedia]] = {}  # by id, images that were described and not decoded
        self._made: dict[str, bytes] = {}  # by id, as JPEG

    def describe(self, record: object, opener: RunMedia) -> Row:
        """Return the document's entry of a recorded medium; one that cannot be shown has a `problem` and no pictures.

        On a live page, an image is decoded only when `read` returns it. A video is decoded here, because its frames are
        not known before; so is every image of an export, so that its document can name a problem.
        """
        record = as_mapping(record)
        # Only the file's name, without its folders: an export may be shown to others.
        entry: Row = {"kind": "image", "name": Path(str(record.get("path", ""))).name, "original": None}
        entry |= {"width": 0, "height": 0, "frames": _NO_FRAMES}
        try:
            medium = Medium(parse_medium(record, opener.run_dir), Size(*map(int, record["resized"])))
            if min(medium.size) < 1:
                raise ValueError(f"{medium.size} is not a size")
            entry |= {"kind": record["kind"], "original": list(map(int, record["original"]))}
        except BAD_VALUE:
            return entry | {"problem": "its record is damaged"}
        if medium in self._described:
            return self._described[medium]
        entry |= {"width": medium.size.width, "height": medium.size.height, "problem": None}
        self._described[medium] = entry
        if not self._with_media:
            entry["problem"] = "left out (--no-media)"
        elif isinstance(medium.ref, VideoRef) or not self._is_live:
            self._make(medium, opener)
        else:
            entry["problem"] = opener.find_problem(medium.ref)
            if entry["problem"] is None:
                picture_id = medium.picture_id(0)
                self._unmade[picture_id] = (medium, opener)
                entry["frames"] = [_frame(picture_id, None)]
        return entry

    def read(self, picture_id: str) -> bytes | None:
        """Return a picture that a document names, as JPEG; None if there is none, or it cannot be decoded."""
        if picture_id in self._unmade:
            self._make(*self._unmade.pop(picture_id))
        return self._made.get(picture_id)

    def items(self) -> Iterator[tuple[str, bytes]]:
        """Yield name and content of every picture."""
        for picture_id in list(self._unmade):
            self.read(picture_id)
        yield from self._made.items()

    def _make(self, medium: Medium, opener: RunMedia) -> None:
        """Make the pictures of a medium. A problem is shown when a document with the medium is built again."""
        # A picture is no larger than the page shows it, even if a damaged record has a huge size.
        scale = min(1.0, MAX_SIDE / max(medium.size))
        size = Size(*(max(1, round(side * scale)) for side in medium.size))
        entry = self._described[medium]
        entry["frames"] = []
        try:
            for number, (second, image) in enumerate(opener.read_frames(medium.ref)):
                encoded = io.BytesIO()
                # WebP would be smaller by half, and takes four times as long. Colours keep their resolution: text and
                # charts have thin coloured lines.
                image.resize(size).save(encoded, "JPEG", quality=85, subsampling=0)
                picture_id = medium.picture_id(number)
                self._made[picture_id] = encoded.getvalue()
                entry["frames"].append(_frame(picture_id, second))
        except MediaError as error:
            what = str(error).removeprefix(f"{medium.ref.path}: ").split("\n")[0][:200]
            entry["problem"] = opener.find_problem(medium.ref) or what
            entry["frames"] = _NO_FRAMES


def _frame(picture_id: str, second: float | None) -> Row:
    return {"src": f"media/{picture_id}.jpg", "second": second}

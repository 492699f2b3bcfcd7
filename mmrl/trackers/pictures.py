"""Reads a few rollouts of a kept step, each with its image and the gold and predicted boxes drawn on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from PIL import Image, ImageDraw

from mmrl.config import Config
from mmrl.log.logger import read_records
from mmrl.log.marks import record_marks
from mmrl.log.rollout_records import parse_medium
from mmrl.log.run_dir import RunDir
from mmrl.media.image import open_shown_image
from mmrl.trackers.backends import Picture
from mmrl.types import ImageRef, MediaError

_GROUPS_SHOWN: Final = 4
_MAX_SIDE_PX: Final = 512
_MAX_TEXT_CHARS: Final = 2000  # of a question or response
_GOLD, _PREDICTED = (0, 158, 115), (230, 97, 0)  # colours that people with any colour vision tell apart


def read_pictures(path: Path, run_dir: RunDir, config: Config, base_dir: Path) -> list[Picture]:
    """Return pictures of the first rollouts of the first groups in a file. Those about no still image are left out.

    Images may lie in the run directory and where those of the config may; its folders start from `base_dir`.
    """
    roots = [run_dir.path.resolve(), *((base_dir / root).resolve() for root in config.data.media_roots)]
    first_rollouts: dict[int, dict[str, Any]] = {}
    for record, _ in read_records(path):
        if record["group"] < _GROUPS_SHOWN:
            first_rollouts.setdefault(record["group"], record)
    pictures = []
    for record in first_rollouts.values():
        index = record["media_index"] or 0
        for medium in record["media"][index : index + 1]:
            ref = parse_medium(medium, roots[0])
            if not isinstance(ref, ImageRef) or ref.timestamp is not None:
                continue
            try:
                image = open_shown_image(ref, roots, config.data.media_limits)
            except MediaError:  # it was moved or changed since
                continue
            image.thumbnail((_MAX_SIDE_PX, _MAX_SIDE_PX))
            _draw_boxes(image, record)
            pictures.append(Picture(image, _describe(record)))
    return pictures


def _draw_boxes(image: Image.Image, record: Mapping[str, Any]) -> None:
    """Draw the target's boxes green and thick, and the answer's orange."""
    draw = ImageDraw.Draw(image)
    for key, color, width in (("target", _GOLD, 3), ("answer", _PREDICTED, 2)):
        for mark in record_marks(record, key):
            if mark["shape"] == "box":
                left, top, right, bottom = mark["at"]
                # A predicted box may have its corners in any order.
                xs = sorted((left * image.width, right * image.width))
                ys = sorted((top * image.height, bottom * image.height))
                draw.rectangle((xs[0], ys[0], xs[1], ys[1]), outline=color, width=width)


def _describe(record: Mapping[str, Any]) -> str:
    lines = [f"{record['stage']} step {record['step']}, sample {record['sample']}", f"reward: {record.get('total')}"]
    lines += [f"{key}: {str(record[key])[:_MAX_TEXT_CHARS]}" for key in ("question", "target", "response")]
    return "\n".join(lines)

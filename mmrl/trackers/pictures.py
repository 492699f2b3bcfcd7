"""Reads a few rollouts of each kept step, with the image that they are about and its gold and predicted boxes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from PIL import Image, ImageDraw

from mmrl.config import Config
from mmrl.log.run_dir import RunDir
from mmrl.trackers.run_lines import RunLines
from mmrl.trackers.tracker import Box, Picture
from mmrl.types import CoordinateSystem, ImageRef, MediaError, ResizeMap, Size

_GROUPS_SHOWN: Final = 4
_MAX_SIDE_PX: Final = 512
_MAX_TEXT_CHARS: Final = 2000  # of a question or response
_GOLD, _PREDICTED = (0, 158, 115), (230, 97, 0)  # colours that people with any colour vision tell apart


class PictureReader:
    """Makes pictures of the rollouts that a run has kept."""

    def __init__(self, config: Config, base_dir: Path, run_dir: RunDir) -> None:
        """Images may lie where those of the config may; its relative folders start from `base_dir`."""
        self._run_dir, self._limits = run_dir, config.data.media_limits
        self._roots = [run_dir.path.resolve()]
        for root in config.data.media_roots:
            self._roots.append((base_dir / root).resolve())

    def read_new(self, sent: Mapping[str, int], lines: RunLines) -> Iterator[tuple[str, int, list[Picture]]]:
        """Yield file name, global step and pictures of each file of rollouts that is not in `sent`.

        A file has to wait for the line of its step; one of another version of mmrl has no pictures.
        """
        for path in sorted(self._run_dir.rollouts.glob("*.jsonl")):
            if path.name in sent:
                continue
            records = _read_first_rollouts(path)
            if not records or not isinstance(records[0].get("stage"), str):
                yield path.name, 0, []
                continue
            step = lines.find_global_step(records[0]["stage"], records[0]["step"])
            if step is not None:
                pictures = map(self._make_picture, records)
                yield path.name, step, [picture for picture in pictures if picture is not None]

    def _make_picture(self, record: Mapping[str, Any]) -> Picture | None:
        """Return the picture of a rollout; None if it is about no still image, or the image cannot be opened."""
        # It imports torch, which takes seconds, and a run without pictures need not wait for it.
        from mmrl.media.image import crop_image, open_image

        media = record["media"]
        index = record["media_index"] or 0
        if len(media) <= index or media[index]["kind"] != "image" or media[index]["timestamp"] is not None:
            return None
        medium = media[index]
        path = self._run_dir.path.resolve() / medium["path"]
        crop = tuple(medium["crop"]) if medium["crop"] else None
        ref = ImageRef(path=str(path), sha256=medium["sha256"], crop=crop)
        try:
            image = open_image(ref, self._roots, self._limits)
            if crop is not None:
                image = crop_image(image, ref, crop, self._limits)
        except MediaError:
            return None
        image.thumbnail((_MAX_SIDE_PX, _MAX_SIDE_PX))
        return Picture(image=image, boxes=_find_boxes(record, medium), text=_describe(record))


def draw_boxes(picture: Picture) -> Image.Image:
    """Return the image with its boxes drawn on it: the gold ones green and thick, the predicted ones orange."""
    image = picture.image.copy()
    draw = ImageDraw.Draw(image)
    for box in picture.boxes:
        left, top, right, bottom = box.corners
        # A predicted box may have its corners in any order.
        xs = sorted((left * image.width, right * image.width))
        ys = sorted((top * image.height, bottom * image.height))
        color, width = (_GOLD, 3) if box.is_gold else (_PREDICTED, 2)
        draw.rectangle((xs[0], ys[0], xs[1], ys[1]), outline=color, width=width)
    return image


def _read_first_rollouts(path: Path) -> list[dict[str, Any]]:
    """Return the first rollout of each of the first groups in a file."""
    records: dict[int, dict[str, Any]] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            # Runs of older versions recorded neither group nor step.
            group = record.get("group", _GROUPS_SHOWN)
            if group >= _GROUPS_SHOWN:
                break
            records.setdefault(group, record)
    return list(records.values())


def _find_boxes(record: Mapping[str, Any], medium: Mapping[str, Any]) -> list[Box]:
    """Return the boxes of a rollout's target and answer as fractions of the image."""
    resize_map = ResizeMap(Size(*medium["original"]), Size(*medium["resized"]), tuple(medium["offset"]))
    boxes = []
    for value, frame, is_gold in (
        (record["target"], record["target_frame"], True),
        (record["answer"], record["frame"], False),
    ):
        if value is None or frame is None:
            continue
        match record["answer_type"]:
            case "box":
                all_corners = [value]
            case "boxes":
                all_corners = [region[0] for region in value if isinstance(region, list) and region]
            case _:
                continue
        for corners in filter(_is_box, all_corners):
            fractions = resize_map.convert(corners, CoordinateSystem(frame), CoordinateSystem.NORM_1)
            boxes.append(Box(corners=(fractions[0], fractions[1], fractions[2], fractions[3]), is_gold=is_gold))
    return boxes


def _is_box(value: object) -> bool:
    """Return True for four finite numbers; a response may hold anything."""
    if not isinstance(value, list) or len(value) != 4:
        return False
    return all(isinstance(number, int | float) and math.isfinite(number) for number in value)


def _describe(record: Mapping[str, Any]) -> str:
    reward = record.get("total")
    lines = [f"{record['stage']} step {record['step']}, sample {record['sample']}"]
    lines.append(f"reward: {reward:.3f}" if isinstance(reward, int | float) else "reward: none")
    for key in ("question", "target", "response"):
        lines.append(f"{key}: {str(record[key])[:_MAX_TEXT_CHARS]}")
    return "\n".join(lines)

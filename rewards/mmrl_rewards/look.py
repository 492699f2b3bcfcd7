"""Rewards that look at the pixels of their sample. `pixels.py` has the crops; `Sample.image` opens the files."""

from __future__ import annotations

from math import prod
from typing import Annotated

import numpy as np
from pydantic import Field

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import geometry
from mmrl_rewards.contract import answer_value, rescale_above, reward
from mmrl_rewards.pixels import Pixels, answer_crop, keep_last, resize, target_crop
from mmrl_rewards.render import blank_similarity, ssim

MediaIndex = Annotated[int, Field(ge=0)]
GreyLevels = Annotated[int, Field(ge=1, le=255)]

_SIDE_PX = 32  # crops are compared at this size: larger ones would make the value depend on single pixels


@reward(name="crop_likeness", answer_types=(AnswerType.BOX,), looks=True)
def likeness(response: Response, sample: Sample, *, reference: MediaIndex | None = None) -> RewardValue:
    """Return how far the answer's crop resembles the target's beyond a plain one: max(0, (s - s0) / (1 - s0)).

    Both crops are resized to 32 x 32 pixels. s is the mean SSIM of their lightness, with a Gaussian window of 11 pixels
    and sigma 1.5; s0 is s of a crop of one colour, white or the target's median. With `reference`, the answer is
    compared with all of image number `reference`, from 0: the model is to find it in another image.

    Source: SSIM of Wang et al. 2004, eq. 13; the scale from a plain image as in `render.svg`.
    Departures: a place that looks like the target's earns as much. SSIM halves within about a twentieth of the box.
    Sides of 192 pixels and more are averaged to about 96 or more first, for speed, which moves values by up to 0.02.
    Unscorable: the target is not a box within its image, an image cannot be opened, or the target's crop is plain.
    """
    target = target_crop(response, sample) if reference is None else sample.image(reference)
    _shrink_target(target)  # a sample is unscorable whatever the answer
    value = _crop_likeness(answer_crop(response, sample), target)
    return RewardValue(value, f"{value:.2f} of the way from a plain crop to the target's")


@reward(name="difference", answer_types=(AnswerType.BOX,), looks=True)
def difference(response: Response, sample: Sample, *, threshold: GreyLevels = 32) -> RewardValue:
    """Return the IoU of the answer's box and the smallest box around all pixels in which two images differ.

    A pixel differs if one of its colours does by at least `threshold` of 255 grey levels. The images are the first two
    media of the sample, of one size, and the answer lies in the target's. The target's box is not read.

    Source: Jaccard index as in PASCAL VOC (IJCV 2010, eq. 3); the box is this library's own.
    Departures: none.
    Unscorable: the first two media are not images of one size that differ, or cannot be opened.
    """
    first, second = sample.image(0), sample.image(1)
    if first.shape != second.shape:
        sizes = [f"{pixels.shape[1]}x{pixels.shape[0]}" for pixels in (first, second)]
        raise Unscorable(f"the images are of {' and '.join(sizes)} pixels, which cannot be compared")
    left, top, right, bottom = _find_difference(first, second, threshold)
    offset_x, offset_y = geometry.resize_map(response, sample).offset
    expected = (left + offset_x, top + offset_y, right + offset_x, bottom + offset_y)
    answer = geometry.answer_to_pixels(response, sample, answer_value(response))
    value = geometry.iou(answer, expected)
    pair = geometry.format_pair(answer, expected)
    return RewardValue(value, f"IoU {value:.2f}: {pair}, where the images differ")


@reward(name="shown_area", judges_answer=False)
def area(response: Response, sample: Sample) -> RewardValue:
    """Return max(0, 1 - a), where a is the area of all parts that tools showed, divided by the area of the image.

    A part that was shown twice counts twice, and so does one within another. A response without such parts gets 0. Add
    it to a reward for right answers, with `requires`, since any small part earns it.

    Source: the minimality of visual components in SCCM learning (arXiv:2510.23482).
    Departures: the formula is this library's own. Frames of a video count as whole images.
    Unscorable: the sample has no image or video, or has several, any of which a part could be from.
    """
    if len(response.resize_maps) != 1:
        raise Unscorable(f"the sample has {len(response.resize_maps)} images and videos, and parts are of one")
    if not response.tool_resize_maps:
        return RewardValue(0.0, "no part was looked at")
    shown = sum(prod(part.original) for part in response.tool_resize_maps) / prod(response.resize_maps[0].original)
    return RewardValue(max(0.0, 1.0 - shown), f"{len(response.tool_resize_maps)} parts of {shown:.0%} of the image")


def _shrink(crop: Pixels) -> Pixels:
    # Averaging first takes less than half of the time for large crops.
    return resize(crop, _SIDE_PX, _SIDE_PX, reducing_gap=3.0)


@keep_last
def _crop_likeness(answer: Pixels, target: Pixels) -> float:
    # An exact answer has the target's crop, and resizing it would take longer than everything else.
    if np.array_equal(answer, target):
        return 1.0
    shrunk_target, blank = _shrink_target(target)
    return rescale_above(ssim(_shrink(answer), shrunk_target), blank)


@keep_last
def _shrink_target(crop: Pixels) -> tuple[Pixels, float]:
    """Return the target's crop at the size of comparison, and the similarity of a plain one to it."""
    target = _shrink(crop)
    return target, blank_similarity(target, ssim)


@keep_last
def _find_difference(first: Pixels, second: Pixels, threshold: int) -> tuple[int, int, int, int]:
    """Return the smallest box, left, top, right, bottom, around the pixels that differ; raise Unscorable if none do."""
    # [height, width * 3]: numpy is many times slower over an axis of length 3.
    differs = (np.maximum(first, second) - np.minimum(first, second) >= threshold).reshape(len(first), -1)
    rows, columns = np.flatnonzero(differs.any(axis=1)), np.flatnonzero(differs.any(axis=0)) // 3
    if not len(columns):
        raise Unscorable(f"no pixel of the two images differs by {threshold} grey levels")
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1

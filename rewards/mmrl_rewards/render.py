"""Rewards for text that is drawn: SVG, formulas, pages, programs that plot. Compared are the pictures.

Most of a drawing is empty, so that a blank page is much like any other. What counts is therefore how far a picture
gets beyond a plain page: (s - s0) / (1 - s0), clipped at 0, s its likeness to the target's picture and s0 that of the
best plain page, white or of the target's median colour. A plain page earns 0, the very picture 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import reward, target_value
from mmrl_rewards.services.encoder import embed_image
from mmrl_rewards.services.renderer import DrawingError, DrawingLimits, ExternalRenderer, ImageArray, draw

SidePixels = Annotated[int, Field(ge=32, le=1024)]
SimilarityFn = Callable[[ImageArray, ImageArray], float]

_LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601
_SSIM_WINDOW = 11
_MAX_REASON_CHARS = 80


@reward(name="render_svg", answer_types=(AnswerType.SVG,), uses_service=True)
def svg(
    response: Response,
    sample: Sample,
    *,
    side: SidePixels = 224,
    encoder: str | None = None,
    limits: DrawingLimits = DrawingLimits(),  # noqa: B008 - frozen
) -> RewardValue:
    """How far the drawing gets beyond a plain page in likeness to the target, both drawn on `side` x `side` pixels.

    Likeness is SSIM of the lightness, a Gaussian window of 11 with sigma 1.5, averaged; with `encoder`, a folder with a
    timm backbone, the cosine of both embeddings. Source: Wang et al. 2004, eq. 13; the image term of the SVG reward of
    Symbolic Graphics Programming (arXiv:2509.05208), DINO there. Departures: measured from the best plain page, as this
    module says; drawn by resvg in one font, each drawing fitted into the square.

    Raises:
        Unscorable: the target is no SVG, cannot be drawn or draws a plain page; there is no backbone in `encoder`.
    """
    target = target_value(sample, AnswerType.SVG)
    paint = partial(_draw_cached, "svg", side=side, limits=limits)
    return _score_drawing(response, target, paint, _choose_similarity(encoder))


@reward(name="render_latex", answer_types=(AnswerType.LATEX,), uses_service=True)
def latex(
    response: Response,
    sample: Sample,
    *,
    encoder: str | None = None,
    limits: DrawingLimits = DrawingLimits(max_chars=4000),  # noqa: B008 - frozen
) -> RewardValue:
    """How far the formula gets beyond a plain page in likeness to the target, both set in one size of type.

    Likeness as in `svg`, both padded with white to the right and below to one size. Source: the rendered comparison
    of Table2LaTeX-RL (arXiv:2509.17589), which uses CW-SSIM above 0.6. Departures: SSIM, measured from the best plain
    page, as this module says; set by ziamath, a subset of LaTeX without packages or macros.

    Raises:
        Unscorable: the target is no formula, cannot be set or sets nothing; there is no backbone in `encoder`.
    """
    target = target_value(sample, AnswerType.LATEX)
    paint = partial(_draw_cached, "latex", side=0, limits=limits)
    return _score_drawing(response, target, paint, _choose_similarity(encoder))


@reward(name="render_page", answer_types=(AnswerType.TEXT,), uses_service=True)
def page(
    response: Response, sample: Sample, *, renderer: ExternalRenderer | None = None, encoder: str | None = None
) -> RewardValue:
    """How far a page gets beyond a plain one in likeness to the target, both drawn by the configured `renderer`.

    For HTML, whole LaTeX documents, programs that plot: answer and target are texts in its language. Likeness as in
    `svg`. Source: visual similarity of rendered code as in Design2Code (arXiv:2403.03163), CLIP there. Departures:
    SSIM or the backbone given, measured from the best plain page, as this module says.

    Raises:
        Unscorable: there is no renderer or it fails; the target is no text, cannot be drawn or draws a plain page.
    """
    if renderer is None:
        raise Unscorable("no renderer is configured: set args.renderer.command or args.renderer.endpoint.url")
    return _score_drawing(response, target_value(sample, AnswerType.TEXT), renderer.draw, _choose_similarity(encoder))


def ssim(picture: ImageArray, target: ImageArray) -> float:
    """Structural similarity of the lightness of two pictures of one size, in [-1, 1]."""
    from skimage.metrics import structural_similarity

    return float(
        structural_similarity(
            picture @ _LUMA,
            target @ _LUMA,
            data_range=255.0,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
        )
    )


def similarity_beyond_blank(picture: ImageArray, target: ImageArray, similarity: SimilarityFn) -> float:
    """max(0, (s - s0) / (1 - s0)), as this module says; the plain pages are as large as the larger of both pictures.

    Raises:
        Unscorable: a plain page is as good as the target.
    """
    height, width, _ = np.maximum.reduce([picture.shape, target.shape, (_SSIM_WINDOW, _SSIM_WINDOW, 3)])
    picture, target = _pad_with_white(picture, height, width), _pad_with_white(target, height, width)
    usual = np.median(target, axis=(0, 1)).astype(np.uint8)
    plain = max(
        similarity(np.broadcast_to(colour, target.shape), target) for colour in (np.full_like(usual, 255), usual)
    )
    if plain >= 1.0:
        raise Unscorable("the target draws next to nothing")
    return min(1.0, max(0.0, (similarity(picture, target) - plain) / (1.0 - plain)))


def _score_drawing(
    response: Response, target: str, draw_source: Callable[[str], ImageArray], similarity: SimilarityFn
) -> RewardValue:
    try:
        expected = draw_source(target)
    except DrawingError as error:
        raise Unscorable(f"the target {target!r:.80}: {error}") from error
    if _is_blank(expected):
        raise Unscorable(f"the target {target!r:.80} draws a plain page")
    if response.answer.value is None:
        return RewardValue(0.0, response.answer.problems[0])
    try:
        given = draw_source(response.answer.value)
    except DrawingError as error:
        return RewardValue(0.0, f"the drawing {error}"[:_MAX_REASON_CHARS])
    if _is_blank(given):
        return RewardValue(0.0, "a plain page")
    value = similarity_beyond_blank(given, expected, similarity)
    return RewardValue(value, f"{value:.2f} of the way from a plain page to the target's picture")


@lru_cache(maxsize=64)  # the target of a group is drawn once
def _draw_cached(language: Literal["svg", "latex"], source: str, *, side: int, limits: DrawingLimits) -> ImageArray:
    return draw(language, source, side=side, limits=limits)


def _choose_similarity(encoder: str | None) -> SimilarityFn:
    return ssim if encoder is None else partial(_embedding_cosine, encoder)


def _embedding_cosine(encoder: str, picture: ImageArray, target: ImageArray) -> float:
    return float(embed_image(encoder, picture) @ embed_image(encoder, target))


def _pad_with_white(picture: ImageArray, height: int, width: int) -> ImageArray:
    page = np.full((height, width, 3), 255, dtype=np.uint8)
    page[: picture.shape[0], : picture.shape[1]] = picture
    return page


def _is_blank(picture: ImageArray) -> bool:
    return bool((picture == picture[0, 0]).all())

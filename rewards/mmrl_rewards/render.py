"""Rewards for text that is drawn: SVG, formulas, tables, pages, programs that plot. The rewards compare the images.

Most of a drawing is empty, so a blank page resembles any drawing. The value is therefore how far an image gets beyond a
blank page: (s - s0) / (1 - s0), clipped at 0. s is its similarity to the target's image. s0 is s of the best blank
page, which is white or has the target's median colour. A blank page earns 0 and the target's image 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, lru_cache, partial
from math import ceil, comb, pi
from typing import Annotated, Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from pydantic import Field

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import BadAnswer, answer_value, rescale_above, reward, target_value
from mmrl_rewards.pixels import Pixels
from mmrl_rewards.services.encoder import embed_caption, embed_captioned_image, embed_image
from mmrl_rewards.services.renderer import DrawingError, DrawingLimits, ExternalRenderer, draw
from mmrl_rewards.table import parse_table

SidePixels = Annotated[int, Field(ge=32, le=1024)]
SimilarityFn = Callable[[Pixels, Pixels], float]
Measure = Literal["ssim", "cw_ssim"]

_LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601
_SSIM_WINDOW = 11  # side in pixels; SSIM needs images at least as large
_SSIM_WEIGHTS = np.exp(-0.5 * (np.arange(-5, 6) / 1.5) ** 2) / np.exp(-0.5 * (np.arange(-5, 6) / 1.5) ** 2).sum()
_MATRIX_MAX_SIDE = 64  # pixels up to which a product with matrices is faster than a filter
_SSIM_C1, _SSIM_C2 = (0.01 * 255.0) ** 2, (0.03 * 255.0) ** 2
_ROUNDING = 1e-9  # by which the similarity of a page to itself may differ from 1
_CW_WINDOW, _CW_SCALES, _CW_ORIENTATIONS, _CW_CONSTANT, _CW_MAX_SIDE = 7, 4, 8, 0.01, 512
_MAX_REASON_CHARS = 80
_CHAR_WIDTH, _ROW_HEIGHT, _MAX_CELL_CHARS, _MAX_TABLE_PIXELS = 6, 16, 40, 4_000_000  # pixels of Pillow's own font
_TEXT_ELEMENT = re.compile(r"<\s*(?:[\w.-]+:)?(?:text|tspan|textpath|tref)\b", re.IGNORECASE)
_draw_cached: Final = lru_cache(maxsize=64)(draw)  # the target of a group is drawn once


@reward(name="render_svg", answer_types=(AnswerType.SVG,), uses_service=True)
def svg(
    response: Response,
    sample: Sample,
    *,
    side: SidePixels = 224,
    measure: Measure = "ssim",
    encoder: str | None = None,
    limits: DrawingLimits = DrawingLimits(),  # noqa: B008 - frozen
) -> RewardValue:
    """Return the similarity of the drawing and the target beyond a blank page, in [0, 1].

    Both are drawn on `side` x `side` pixels. Similarity is the mean SSIM of the lightness, with a Gaussian window of 11
    pixels and sigma 1.5, or with `measure` cw_ssim the complex wavelet SSIM, which tolerates small shifts. If `encoder`
    names a folder with a timm backbone, it is the cosine of both embeddings instead.

    Source: Wang et al. 2004, eq. 13; the image term of the SVG reward of Symbolic Graphics Programming
    (arXiv:2509.05208), which uses DINO.
    Departures: the value is measured from the best blank page, as the module states. resvg draws with one font and fits
    each drawing into the square.
    Unscorable: the target is not SVG, cannot be drawn or draws a blank page, or `encoder` holds no backbone.
    """
    target = target_value(sample, AnswerType.SVG)
    paint = partial(_draw_cached, "svg", side=side, limits=limits)
    return _score_drawing(response, target, paint, _choose_similarity(measure, encoder))


@reward(name="render_svg_text", answer_types=(AnswerType.TEXT,), uses_service=True)
def svg_text(
    response: Response,
    sample: Sample,
    *,
    encoder: str | None = None,
    side: SidePixels = 224,
    limits: DrawingLimits = DrawingLimits(),  # noqa: B008 - frozen
) -> RewardValue:
    """Return max(0, (c - c0) / (1 - c0)), where c is the cosine of the embeddings of drawing and target, a text.

    c0 is c of a white page. `encoder` names a folder with a CLIP, SigLIP or similar model as transformers saves it.
    A drawing that contains text earns 0, because an encoder reads the words it should show.

    Source: the text-image term of the SVG reward of Symbolic Graphics Programming (arXiv:2509.05208; svg_grader.py).
    Departures: theirs is (1 + c) / 2, of which a blank page earns most; divided by a group's standard deviation, both
    give the same advantages among drawings. If the encoder cannot read the whole target, only its beginning counts.
    resvg fits each drawing into a square.
    Unscorable: the target is not text, or there is no encoder in the folder.
    """
    caption = target_value(sample, AnswerType.TEXT)
    if encoder is None:
        raise Unscorable("no encoder is configured: set args.encoder to a folder with a CLIP or SigLIP")
    expected = embed_caption(encoder, caption, cut=True)
    source = answer_value(response)
    if _TEXT_ELEMENT.search(source):
        raise BadAnswer("the drawing contains text")
    try:
        drawing = draw("svg", source, side=side, limits=limits)
    except DrawingError as error:
        raise BadAnswer(f"the drawing {error}"[:_MAX_REASON_CHARS]) from error
    cosines = [float(expected @ embed_captioned_image(encoder, page)) for page in (drawing, np.full_like(drawing, 255))]
    value = rescale_above(*cosines)
    return RewardValue(value, f"cosine {cosines[0]:.3f} of drawing and text, {cosines[1]:.3f} of a white page")


@reward(name="render_latex", answer_types=(AnswerType.LATEX,), uses_service=True)
def latex(
    response: Response,
    sample: Sample,
    *,
    measure: Measure = "ssim",
    encoder: str | None = None,
    limits: DrawingLimits = DrawingLimits(max_chars=4000),  # noqa: B008 - frozen
) -> RewardValue:
    """Return the similarity of the formula and the target beyond a blank page, in [0, 1]. Both have one font size.

    Similarity is as in `svg`. The smaller image is padded with white at the right and below.

    Source: the rendered comparison of Table2LaTeX-RL (arXiv:2509.17589), which uses CW-SSIM above 0.6: `measure`
    cw_ssim with the transform {threshold: 0.6}. `page` compares whole tables in this way.
    Departures: SSIM by default, and always measured from the best blank page, as the module states. What their code
    calls CW-SSIM is the SSIM of four Haar bands in bytes that overflow; here it is as in Sampat et al. ziamath draws a
    subset of LaTeX without packages or macros.
    Unscorable: the target is not a formula, cannot be drawn or draws nothing, or `encoder` holds no backbone.
    """
    target = target_value(sample, AnswerType.LATEX)
    paint = partial(_draw_cached, "latex", side=0, limits=limits)
    return _score_drawing(response, target, paint, _choose_similarity(measure, encoder))


@reward(name="render_table", answer_types=(AnswerType.TEXT,))
def table(response: Response, sample: Sample, *, measure: Measure = "ssim") -> RewardValue:
    """Return the similarity of the table and the target beyond a blank page, in [0, 1].

    Both, in LaTeX, HTML or Markdown, are drawn as their cells with a frame around each, as wide as the table's longest
    cell. Similarity is as in `svg`.

    Source: the visual reward of Table2LaTeX-RL (arXiv:2509.17589): `measure` cw_ssim with {threshold: 0.6}.
    Departures: as in `latex`. Neither rules nor fonts nor alignment count, and maths is drawn as its source, since
    the table is parsed, not set by TeX: `page` with a renderer of yours does that.
    Unscorable: the target is not one table, or too large to be drawn.
    """
    target = target_value(sample, AnswerType.TEXT)
    return _score_drawing(response, target, _draw_table, _choose_similarity(measure, None))


@reward(name="render_page", answer_types=(AnswerType.TEXT,), uses_service=True)
def page(
    response: Response,
    sample: Sample,
    *,
    renderer: ExternalRenderer | None = None,
    measure: Measure = "ssim",
    encoder: str | None = None,
) -> RewardValue:
    """Return the similarity of a page and the target beyond a blank page, in [0, 1].

    The configured `renderer` draws both. It is for HTML, whole LaTeX documents and programs that plot. Answer and
    target are texts in the renderer's language. Similarity is as in `svg`.

    Source: visual similarity of rendered code as in Design2Code (arXiv:2403.03163), which uses CLIP.
    Departures: similarity is a structural one or the given backbone's, measured from the best blank page, as the module
    states.
    Unscorable: there is no renderer or it fails, or the target is not text, cannot be drawn or draws a blank page.
    """
    if renderer is None:
        raise Unscorable("no renderer is configured: set args.renderer.command or args.renderer.endpoint.url")
    return _score_drawing(
        response, target_value(sample, AnswerType.TEXT), renderer.draw, _choose_similarity(measure, encoder)
    )


def ssim(image: Pixels, target: Pixels) -> float:
    """Return the SSIM (Wang et al. 2004, eq. 13) of the lightness of two images [height, width, 3], in [-1, 1]."""
    if (image[0] == image[0, 0]).all() and (image == image[0, 0]).all():
        return _plain_ssim(image[0, :1], target)
    x, y = image @ _LUMA, target @ _LUMA
    mean, target_mean, square, target_square, product = _window_means(np.array([x, y, x * x, y * y, x * y]))
    mean_product, mean_squares = mean * target_mean, mean * mean + target_mean * target_mean
    numerator = (2.0 * mean_product + _SSIM_C1) * (2.0 * (product - mean_product) + _SSIM_C2)
    variances = square + target_square - mean_squares
    return float((numerator / ((mean_squares + _SSIM_C1) * (variances + _SSIM_C2))).mean())


def _plain_ssim(colours: Pixels, target: Pixels) -> float:
    """Return the highest SSIM to a target that one of several pages of one colour each has, colours [pages, 3]."""
    y, mean = target @ _LUMA, (colours @ _LUMA)[:, None, None]
    target_mean, target_square = _window_means(np.array([y, y * y]))
    squared_mean = target_mean * target_mean
    similarity = (2.0 * mean * target_mean + _SSIM_C1) / (mean * mean + squared_mean + _SSIM_C1)
    similarity *= _SSIM_C2 / (target_square - squared_mean + _SSIM_C2)
    return float(similarity.mean(axis=(1, 2)).max())


def _window_means(maps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the Gaussian mean of each window within maps [count, height, width], as in the authors' code of SSIM."""
    height, width = maps.shape[1:]
    if max(height, width) <= _MATRIX_MAX_SIDE:
        return _window_matrix(height) @ maps @ _window_matrix(width).T
    from scipy.ndimage import correlate1d

    margin = _SSIM_WINDOW // 2
    for axis in (1, 2):
        maps = correlate1d(maps, _SSIM_WEIGHTS, axis=axis)
    return maps[:, margin:-margin, margin:-margin]


@cache
def _window_matrix(side: int) -> NDArray[np.float64]:
    """Return the matrix [side - 10, side] of the weights of each window along one side."""
    rows = [np.pad(_SSIM_WEIGHTS, (start, side - _SSIM_WINDOW - start)) for start in range(side - _SSIM_WINDOW + 1)]
    return np.array(rows)


def cw_ssim(image: Pixels, target: Pixels) -> float:
    """Return the complex wavelet SSIM of the lightness of two images [height, width, 3], in [0, 1].

    It is the mean of (2 |sum c_x conj(c_y)| + K) / (sum |c_x|^2 + sum |c_y|^2 + K) over windows of 7 x 7 coefficients,
    8 orientations and up to 4 scales of a complex steerable pyramid. A small shift turns all phases of a window by
    the same angle, which the absolute value ignores.

    Source: Sampat et al. 2009 (Complex Wavelet Structural Similarity), eq. 6, with K = 0.01. Departures: all scales
    that have a window, and all places, have equal weight; the authors' code takes the coarsest scale only. Images of
    more than 512 pixels are halved until they are smaller, or their short side would have no window.
    """
    from scipy.ndimage import uniform_filter

    spectra = []
    for drawing in (image, target):
        grey = drawing @ _LUMA
        while max(grey.shape) > _CW_MAX_SIDE and min(grey.shape) >= 2 * _CW_WINDOW:
            grey = (grey[:-1:2, :-1:2] + grey[1::2, :-1:2] + grey[:-1:2, 1::2] + grey[1::2, 1::2]) / 4.0
        spectra.append(np.fft.fftshift(np.fft.fft2(grey)))
    margin = _CW_WINDOW // 2
    values = []
    for scale in range(1, _CW_SCALES + 1):
        if min(spectra[0].shape) / 2 ** (scale - 1) < _CW_WINDOW:
            break
        for index in range(_CW_ORIENTATIONS):
            a, b = (_steerable_band(spectrum, scale, pi * index / _CW_ORIENTATIONS) for spectrum in spectra)
            sums = []
            for product in (a * b.conj(), np.abs(a) ** 2 + np.abs(b) ** 2):
                means = uniform_filter(product, _CW_WINDOW)[margin:-margin, margin:-margin]
                sums.append(np.abs(means) * _CW_WINDOW**2)
            values.append(np.mean((2.0 * sums[0] + _CW_CONSTANT) / (sums[1] + _CW_CONSTANT)))
    return float(np.mean(values))


def _steerable_band(spectrum: NDArray[np.complex128], scale: int, orientation: float) -> NDArray[np.complex128]:
    """Return the coefficients of one scale, from 1, and orientation, in radians, of a complex steerable pyramid.

    The spectrum [height, width] has frequency 0 in its centre. The band has the size of the image / 2^(scale - 1).

    Source: Portilla and Simoncelli 2000, section 2.1: a radial raised cosine of one octave to each side of its peak,
    times cos(angle)^(orientations - 1) in one half of the plane.
    """
    # Frequencies beyond the crop are outside the band, so cropping the spectrum subsamples the band without aliasing.
    cropped, axes = spectrum, []
    for axis, size in enumerate(spectrum.shape):
        kept = ceil(size / 2 ** (scale - 1))
        start = size // 2 - kept // 2
        cropped = cropped.take(range(start, start + kept), axis=axis)
        axes.append((np.arange(kept) - kept // 2) / (size / 2))
    y, x = axes[0][:, None], axes[1][None, :]
    octaves = np.log2(np.maximum(np.hypot(x, y), 1e-12)) + scale
    radial = np.where(np.abs(octaves) < 1.0, np.cos(pi / 2 * octaves), 0.0)
    facing = np.cos(np.arctan2(y, x) - orientation)
    order = _CW_ORIENTATIONS - 1
    # The constant makes the energies of all orientations add up to the energy of the scale.
    gain = 2.0 * 2.0**order / (_CW_ORIENTATIONS * comb(2 * order, order)) ** 0.5
    angular = np.where(facing > 0.0, gain * facing**order, 0.0)
    return np.asarray(np.fft.ifft2(np.fft.ifftshift(cropped * radial * angular)))


def similarity_beyond_blank(image: Pixels, target: Pixels, similarity: SimilarityFn) -> float:
    """Return max(0, (s - s0) / (1 - s0)), as the module states.

    Both images [height, width, 3] are padded to the larger height and width. The blank pages have that size.

    Raises:
        Unscorable: a blank page is as similar to the target as the target itself.
    """
    height, width, _ = np.maximum.reduce([image.shape, target.shape, (_SSIM_WINDOW, _SSIM_WINDOW, 3)])
    pages = []
    for drawing in (image, target):
        margins = ((0, height - drawing.shape[0]), (0, width - drawing.shape[1]), (0, 0))
        pages.append(np.pad(drawing, margins, constant_values=255))
    return rescale_above(similarity(*pages), blank_similarity(pages[1], similarity))


def blank_similarity(target: Pixels, similarity: SimilarityFn) -> float:
    """Return s0 of the module, below 1: the similarity of the best blank page to a target [height, width, 3].

    Raises:
        Unscorable: a blank page is as similar to the target as the target itself.
    """
    # A drawing on coloured ground is nearer to a page of that colour than to a white one. The stable sort is a radix
    # sort, several times as fast as np.median.
    pixels = np.sort(target.reshape(-1, 3), axis=0, kind="stable")
    middle = pixels[[(len(pixels) - 1) // 2, len(pixels) // 2]]
    colours = np.array([[255, 255, 255], middle.sum(axis=0) // 2], dtype=np.uint8)
    if similarity is ssim:
        blank = _plain_ssim(colours, target)
    else:
        blank = max(similarity(np.broadcast_to(colour, target.shape), target) for colour in colours)
    if blank > 1.0 - _ROUNDING:
        raise Unscorable("the target draws next to nothing")
    return blank


def _score_drawing(
    response: Response, target: str, draw_source: Callable[[str], Pixels], similarity: SimilarityFn
) -> RewardValue:
    """Draw answer and target, and return the answer's similarity beyond a blank page.

    A target that cannot be drawn, or has one colour, is unscorable.
    """
    try:
        expected = draw_source(target)
    except DrawingError as error:
        raise Unscorable(f"the target {target!r:.80}: {error}") from error
    if (expected == expected[0, 0]).all():
        raise Unscorable(f"the target {target!r:.80} draws a plain page")
    try:
        given = draw_source(answer_value(response))
    except DrawingError as error:
        return RewardValue(0.0, f"the drawing {error}"[:_MAX_REASON_CHARS])
    if (given == given[0, 0]).all():
        return RewardValue(0.0, "a plain page")
    value = similarity_beyond_blank(given, expected, similarity)
    return RewardValue(value, f"{value:.2f} of the way from a plain page to the target's picture")


def _draw_table(source: str) -> Pixels:
    """Draw the one table in a text, each cell in a frame.

    Raises:
        DrawingError: there is no table, or more than one, or it is too large.
    """
    try:
        rows = parse_table(source).rows
    except ValueError as error:
        raise DrawingError(f"shows {error}") from error
    cells = []
    taken: set[tuple[int, int]] = set()  # row and column of squares that a cell covers
    for row_index, row in enumerate(rows):
        column = 0
        for cell in row:
            while (row_index, column) in taken:
                column += 1
            height, width = min(cell.rowspan, len(rows) - row_index), cell.colspan
            if len(taken) + height * width > _MAX_TABLE_PIXELS // _ROW_HEIGHT**2:
                raise DrawingError("has too many cells")
            taken.update((row_index + i, column + j) for i in range(height) for j in range(width))
            cells.append((column, row_index, width, height, cell.text[:_MAX_CELL_CHARS]))
            column += width
    cell_width = _CHAR_WIDTH * (2 + max(len(text) for *_, text in cells))
    size = cell_width * (1 + max(column for _, column in taken)) + 1, _ROW_HEIGHT * len(rows) + 1
    if size[0] * size[1] > _MAX_TABLE_PIXELS:
        raise DrawingError(f"would have {size[0]} x {size[1]} pixels")
    page = Image.new("RGB", size, "white")
    brush, font = ImageDraw.Draw(page), ImageFont.load_default_imagefont()
    for column, row_index, width, height, text in cells:
        x, y = column * cell_width, row_index * _ROW_HEIGHT
        brush.rectangle((x, y, x + width * cell_width, y + height * _ROW_HEIGHT), outline="black")
        # The font has only Latin-1.
        written = text.encode("latin-1", "replace").decode("latin-1")
        brush.text((x + _CHAR_WIDTH, y + 3), written, fill="black", font=font)
    return np.asarray(page)


def _choose_similarity(measure: Measure, encoder: str | None) -> SimilarityFn:
    """Return the measure, or the cosine of embeddings if there is an encoder."""
    if encoder is not None:
        return lambda image, target: float(embed_image(encoder, image) @ embed_image(encoder, target))
    return ssim if measure == "ssim" else cw_ssim

"""Strict comparison of the answer found with the item's answer: True when a careful reader would call them equal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from mmrl.benchmarks.extraction.fields import select_fields
from mmrl.benchmarks.extraction.numbers import find_numbers, parse_single_number
from mmrl.benchmarks.extraction.text import Extraction
from mmrl.benchmarks.items import LETTERS, Item, ItemResponse
from mmrl.benchmarks.reward_scores import formulas_equal, reward_score
from mmrl.types import AnswerType, CoordinateSystem, ResizeMap, Size
from mmrl_rewards import detect, geometry
from mmrl_rewards.strings import words
from mmrl_rewards.units import Unit, find_unit

LATEX_MARKUP: Final = re.compile(r"\\[a-z]|\^|√|π")  # signs that a text is a formula
_UNIT_TEXT: Final = re.compile(r"\s*(?:\\(?:text|mathrm)\s*\{\s*)?([A-Za-zµ°%]{1,12}(?:/[a-z]{1,2}|\^[23]|[²³])?)")
_IOU_THRESHOLD: Final = 0.5
_RELATIVE_TOLERANCE: Final = 1e-9
_DEFAULT_FORMULA_DECIMALS: Final = 6
_UNIT_WINDOW: Final = 40  # characters after a number in which its unit is looked for
_SINGLE_NUMBER: Final = re.compile(r"[\s$]*-?(?:0|[1-9][\d,]*)?(?:\.\d+)?\s*(?:\\?%|°|\^\\circ|[A-Za-z]{1,9})?[\s$]*")


def is_correct(item: Item, response: ItemResponse, extraction: Extraction) -> bool:
    """Return True when the answer found is the item's answer; False when none was found."""
    if extraction.value is None:
        return False
    match item.answer_type:
        case "choice":
            correct = _is_choice_correct(item, response, extraction, extraction.value)
        case "integer" | "float" | "count":
            correct = _is_number_correct(item, response, extraction)
        case "list":
            reference = [number.value for entry in item.accepted_answers for number in find_numbers(str(entry))]
            correct = [number.value for number in find_numbers(extraction.value)] == reference
        case "text":
            correct = _is_text_correct(item, response, extraction)
        case "box":
            correct = box_iou(item, response, extraction) >= _IOU_THRESHOLD
        case "boxes":
            correct = detection_f1(item, response, extraction) == 1.0
        case "point":
            correct = is_point_in_box(item, response, extraction)
    return correct


def image_resize_map(item: Item, response: ItemResponse) -> ResizeMap:
    """Return the map from the item's image to the image that the model saw; identity where a size is unknown."""
    size = item.image_size or Size(1, 1)
    return ResizeMap(size, response.resized_size or size)


def boxes_in_pixels(
    item: Item, response: ItemResponse, box: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the box of a response and the box of its item, both in pixels of the original image."""
    resize = image_resize_map(item, response)
    return (
        resize.convert(box, response.coordinate_system, CoordinateSystem.PX_ORIGINAL),
        resize.convert(item.answer, item.coordinate_system, CoordinateSystem.PX_ORIGINAL),
    )


def box_iou(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Return the IoU of the box found with the item's box, both in original pixels; 0 for a box with negative sides."""
    x1, y1, x2, y2 = extraction.regions[0].coordinates
    # Corners in the wrong order enclose nothing.
    if not (x1 < x2 and y1 < y2):
        return 0.0
    return geometry.iou(*boxes_in_pixels(item, response, (x1, y1, x2, y2)))


def is_point_in_box(item: Item, response: ItemResponse, extraction: Extraction) -> bool:
    """Return True when the point found lies in the item's box, edges included."""
    resize = image_resize_map(item, response)
    point = resize.convert(extraction.regions[0].coordinates, response.coordinate_system, item.coordinate_system)
    return geometry.point_in_box(point, item.answer)


def detection_f1(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """Return the F1 score of the boxes found, matched to the item's boxes of the same label at IoU 0.5."""
    return reward_score(
        detect.f1,
        AnswerType.BOXES,
        extraction.regions,
        item.answer,
        coordinate_systems=(response.coordinate_system, item.coordinate_system),
        resize_map=image_resize_map(item, response),
        threshold=_IOU_THRESHOLD,
    )


def is_single_number(answer: object) -> bool:
    """Return True for a text that is one number, with or without a unit."""
    if not isinstance(answer, str) or parse_single_number(answer) is None:
        return False
    # Digits that begin with 0 are a code.
    return _SINGLE_NUMBER.fullmatch(answer) is not None


def texts_equal(value: str, target: str) -> bool:
    """Return True for texts of the same words, ignoring case and punctuation, and for equal formulas."""
    value_words, target_words = words(value), words(target)
    # Two texts without any word, such as "+" and "-", must be the same text.
    if value_words == target_words and (value_words or value.strip() == target.strip()):
        return True
    return bool(LATEX_MARKUP.search(value) or LATEX_MARKUP.search(target)) and formulas_equal(value, target)


def _is_choice_correct(item: Item, response: ItemResponse, extraction: Extraction, letter: str) -> bool:
    """Compare letters or, if the response quotes an option's text without its letter, the texts of the options."""
    if letter in item.accepted_answers:
        return True
    quoted = response.text[extraction.start : extraction.end]
    names_letter = re.search(rf"(?<![A-Za-z]){letter}(?![A-Za-z])", quoted) is not None
    return not names_letter and item.options[LETTERS.index(letter)] == item.answer_text


def _is_number_correct(item: Item, response: ItemResponse, extraction: Extraction) -> bool:
    """Compare numbers to the item's precision, in the item's unit where both units are known."""
    reference = next(find_numbers(str(item.answer)), None)
    if reference is None:
        return extraction.value == str(item.answer)
    if extraction.number is None:
        return formulas_equal(extraction.value or "", str(item.answer), item.precision or _DEFAULT_FORMULA_DECIMALS)
    after_reference = str(item.answer)[reference.end :]
    after_extraction = response.text[extraction.end : extraction.end + _UNIT_WINDOW]
    value = extraction.number * _unit_factor(item, after_reference, after_extraction)
    if item.precision is not None:
        return round(value, item.precision) == round(reference.value, item.precision)
    return abs(value - reference.value) <= _RELATIVE_TOLERANCE * abs(reference.value)


def _unit_factor(item: Item, after_reference: str, after_extraction: str) -> float:
    """Return the response's unit in units of the item's; 1 unless both are known and measure the same quantity."""
    reference_unit = _parse_unit(after_reference) or find_unit(item.unit or "")
    unit = _parse_unit(after_extraction)
    # Without two units of one quantity, only the numbers are compared.
    if unit is None or reference_unit is None or unit.dimension != reference_unit.dimension:
        return 1.0
    return unit.factor / reference_unit.factor


def _parse_unit(text: str) -> Unit | None:
    match = _UNIT_TEXT.match(text)
    return find_unit(match[1]) if match else None


def _is_text_correct(item: Item, response: ItemResponse, extraction: Extraction) -> bool:
    if isinstance(item.answer, Mapping):
        predicted = select_fields(extraction.value or "", [*item.answer])
        return all(texts_equal(str(predicted[name]), str(value)) for name, value in item.answer.items())
    if extraction.number is not None:
        return _is_number_correct(item, response, extraction)
    return any(texts_equal(extraction.value or "", str(answer)) for answer in item.accepted_answers)

"""Whether what a response answers is right, as a careful reader would say."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from mmrl.benchmarks.extraction.extract import Extraction
from mmrl.benchmarks.extraction.numbers import find_numbers, parse_single_number
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.benchmarks.official.megabench import has_full_score
from mmrl.benchmarks.official.megabench_values import select_fields
from mmrl.benchmarks.reward_scores import formulas_equal, reward_score
from mmrl.types import AnswerType, ResizeMap, Size
from mmrl_rewards import box, detect
from mmrl_rewards.number import UNITS, Unit
from mmrl_rewards.strings import words

_UNIT_TEXT: Final = re.compile(r"\s*(?:\\(?:text|mathrm)\s*\{\s*)?([A-Za-zµ°%]{1,12}(?:/[a-z]{1,2}|\^[23]|[²³])?)")
_IOU_THRESHOLD: Final = 0.5
_SINGLE_NUMBER: Final = re.compile(r"[\s$]*-?(?:0|[1-9][\d,]*)?(?:\.\d+)?\s*(?:\\?%|°|\^\\circ|[A-Za-z]{1,9})?[\s$]*")
LATEX_MARKUP: Final = re.compile(r"\\[a-z]|\^|√|π")


def is_correct(item: Item, response: ItemResponse, extraction: Extraction) -> bool:
    """Whether the answer found is right."""
    return extraction.value is not None and _IS_CORRECT_BY_TYPE[item.answer_type](item, response, extraction)


def image_resize_map(item: Item, response: ItemResponse) -> ResizeMap:
    """How the item's picture was resized before the model saw it."""
    size = item.image_size or Size(1, 1)
    return ResizeMap(size, response.resized_size or size)


def box_iou(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """IoU of the box found with the right one, in px_original; 0 for a box inside out."""
    coordinates = extraction.regions[0].coordinates
    frames = response.coordinate_system, item.coordinate_system
    x1, y1, x2, y2 = coordinates
    if not (x1 < x2 and y1 < y2):
        return 0.0
    return reward_score(
        box.iou,
        AnswerType.BOX,
        coordinates,
        item.answer,
        coordinate_systems=frames,
        resize_map=image_resize_map(item, response),
    )


def is_point_in_box(item: Item, response: ItemResponse, extraction: Extraction) -> bool:
    """Whether the point found lies in the right box, edges included."""
    resize = image_resize_map(item, response)
    x, y = resize.convert(extraction.regions[0].coordinates, response.coordinate_system, item.coordinate_system)
    x1, y1, x2, y2 = item.answer
    return bool(x1 <= x <= x2 and y1 <= y <= y2)


def detection_f1(item: Item, response: ItemResponse, extraction: Extraction) -> float:
    """F1 of the boxes found at IoU 0.5, labels matched."""
    frames, resize = (response.coordinate_system, item.coordinate_system), image_resize_map(item, response)
    return reward_score(
        detect.f1,
        AnswerType.BOXES,
        extraction.regions,
        item.answer,
        coordinate_systems=frames,
        resize_map=resize,
        threshold=_IOU_THRESHOLD,
    )


def is_single_number(answer: object) -> bool:
    """Whether a right answer is one number, with a unit or without; digits that begin with 0 are a code."""
    return (
        isinstance(answer, str)
        and parse_single_number(answer) is not None
        and _SINGLE_NUMBER.fullmatch(answer) is not None
    )


def texts_equal(value: str, target: str) -> bool:
    """Whether two texts have the same words, case and punctuation aside, or are equal as formulas."""
    said, due = words(value), words(target)
    if said == due and (said or value.strip() == target.strip()):
        return True
    return bool(LATEX_MARKUP.search(value) or LATEX_MARKUP.search(target)) and formulas_equal(value, target)


def _is_choice_correct(item: Item, response: ItemResponse, extraction: Extraction) -> bool:
    return item.options[ord(str(extraction.value)) - ord("A")] == str(item.answer)


def _is_number_correct(item: Item, response: ItemResponse, extraction: Extraction) -> bool:
    """Equal to the right number, to as many decimals as are asked for; in its unit, where both have known ones."""
    due = next(find_numbers(str(item.answer)), None)
    if due is None:
        return extraction.value == str(item.answer)
    if extraction.number is None:
        return formulas_equal(extraction.value or "", str(item.answer), item.precision or 6)
    value = extraction.number * _unit_factor(
        item, str(item.answer)[due.end :], response.text[extraction.end : extraction.end + 40]
    )
    if item.precision is not None:
        return round(value, item.precision) == round(due.value, item.precision)
    return abs(value - due.value) <= 1e-9 * abs(due.value)


def _unit_factor(item: Item, after_reference: str, after_extraction: str) -> float:
    """What the answer's unit is in the right one; 1 unless both are known and measure the same."""
    due = _parse_unit(after_reference) or UNITS.get(item.unit or "")
    given = _parse_unit(after_extraction)
    return given.factor / due.factor if due and given and due.dimension == given.dimension else 1.0


def _parse_unit(text: str) -> Unit | None:
    match = _UNIT_TEXT.match(text)
    name = match[1].replace("²", "^2").replace("³", "^3") if match else ""
    return UNITS.get(name) or UNITS.get(name.removesuffix("s"))


def _is_list_correct(item: Item, response: ItemResponse, extraction: Extraction) -> bool:
    written = item.answer if isinstance(item.answer, list) else [item.answer]
    due = [one.value for each in written for one in find_numbers(str(each))]
    return [one.value for one in find_numbers(extraction.value or "")] == due


def _is_text_correct(item: Item, response: ItemResponse, extraction: Extraction) -> bool:
    if isinstance(item.answer, Mapping):
        said = select_fields(extraction.value or "", [*item.answer])
        return all(
            texts_equal(str(said[name]), str(due)) or has_full_score(item, response, extraction, name)
            for name, due in item.answer.items()
        )
    if extraction.number is not None:
        return _is_number_correct(item, response, extraction)
    answers = item.answer if isinstance(item.answer, list) else [item.answer]
    said_so = any(texts_equal(extraction.value or "", str(answer)) for answer in answers)
    return said_so or has_full_score(item, response, extraction, "")


_IS_CORRECT_BY_TYPE: Final[Mapping[str, Callable[[Item, ItemResponse, Extraction], bool]]] = MappingProxyType(
    {
        "choice": _is_choice_correct,
        **dict.fromkeys(("integer", "float", "count"), _is_number_correct),
        "list": _is_list_correct,
        "text": _is_text_correct,
        "box": lambda item, response, found: box_iou(item, response, found) >= _IOU_THRESHOLD,
        "boxes": lambda item, response, found: detection_f1(item, response, found) == 1.0,
        "point": is_point_in_box,
    }
)

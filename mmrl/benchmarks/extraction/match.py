"""Whether what a response answers is right, as a careful reader would say."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from mmrl.benchmarks.extraction.extract import Found
from mmrl.benchmarks.extraction.numbers import as_number, numbers
from mmrl.benchmarks.items import Item, Response
from mmrl.benchmarks.official.megabench import full_credit
from mmrl.benchmarks.official.megabench_values import fields_of
from mmrl.benchmarks.reward_scores import earned, same_formula
from mmrl.types import Kind, ResizeMap, Size
from mmrl_rewards import box, detect
from mmrl_rewards.number import UNITS, Unit
from mmrl_rewards.strings import words

_UNIT: Final = re.compile(r"\s*(?:\\(?:text|mathrm)\s*\{\s*)?([A-Za-zµ°%]{1,12}(?:/[a-z]{1,2}|\^[23]|[²³])?)")
_OVERLAP: Final = 0.5
_FIGURE: Final = re.compile(r"[\s$]*-?(?:0|[1-9][\d,]*)?(?:\.\d+)?\s*(?:\\?%|°|\^\\circ|[A-Za-z]{1,9})?[\s$]*")
LATEX: Final = re.compile(r"\\[a-z]|\^|√|π")


def right(item: Item, response: Response, found: Found) -> bool:
    """Whether the answer found is right."""
    return found.value is not None and _RIGHT[item.kind](item, response, found)


def resize_of(item: Item, response: Response) -> ResizeMap:
    """How the item's picture was resized before the model saw it."""
    size = item.size or Size(1, 1)
    return ResizeMap(size, response.resized or size)


def overlap(item: Item, response: Response, found: Found) -> float:
    """IoU of the box found with the right one, in px_original; 0 for a box inside out."""
    coordinates = found.regions[0].coordinates
    frames = response.frame, item.frame
    x1, y1, x2, y2 = coordinates
    if not (x1 < x2 and y1 < y2):
        return 0.0
    return earned(box.iou, Kind.BOX, coordinates, item.answer, frames=frames, resize=resize_of(item, response))


def hits(item: Item, response: Response, found: Found) -> bool:
    """Whether the point found lies in the right box, edges included."""
    resize = resize_of(item, response)
    x, y = resize.convert(found.regions[0].coordinates, response.frame, item.frame)
    x1, y1, x2, y2 = item.answer
    return bool(x1 <= x <= x2 and y1 <= y <= y2)


def detected(item: Item, response: Response, found: Found) -> float:
    """F1 of the boxes found at IoU 0.5, labels matched."""
    frames, resize = (response.frame, item.frame), resize_of(item, response)
    return earned(detect.f1, Kind.BOXES, found.regions, item.answer, frames=frames, resize=resize, threshold=_OVERLAP)


def is_figure(answer: object) -> bool:
    """Whether a right answer is one number, with a unit or without; digits that begin with 0 are a code."""
    return isinstance(answer, str) and as_number(answer) is not None and _FIGURE.fullmatch(answer) is not None


def same_text(value: str, target: str) -> bool:
    """Whether two texts have the same words, case and punctuation aside, or are equal as formulas."""
    said, due = words(value), words(target)
    if said == due and (said or value.strip() == target.strip()):
        return True
    return bool(LATEX.search(value) or LATEX.search(target)) and same_formula(value, target)


def _choice(item: Item, response: Response, found: Found) -> bool:
    return item.options[ord(str(found.value)) - ord("A")] == str(item.answer)


def _figure(item: Item, response: Response, found: Found) -> bool:
    """Equal to the right number, to as many decimals as are asked for; in its unit, where both have known ones."""
    due = next(numbers(str(item.answer)), None)
    if due is None:
        return found.value == str(item.answer)
    if found.number is None:
        return same_formula(found.value or "", str(item.answer), item.precision or 6)
    value = found.number * _conversion(item, str(item.answer)[due.end :], response.text[found.end : found.end + 40])
    if item.precision is not None:
        return round(value, item.precision) == round(due.value, item.precision)
    return abs(value - due.value) <= 1e-9 * abs(due.value)


def _conversion(item: Item, after_due: str, after_found: str) -> float:
    """What the answer's unit is in the right one; 1 unless both are known and measure the same."""
    due = _unit(after_due) or UNITS.get(item.unit or "")
    given = _unit(after_found)
    return given.factor / due.factor if due and given and due.measure == given.measure else 1.0


def _unit(text: str) -> Unit | None:
    match = _UNIT.match(text)
    name = match[1].replace("²", "^2").replace("³", "^3") if match else ""
    return UNITS.get(name) or UNITS.get(name.removesuffix("s"))


def _list(item: Item, response: Response, found: Found) -> bool:
    written = item.answer if isinstance(item.answer, list) else [item.answer]
    due = [one.value for each in written for one in numbers(str(each))]
    return [one.value for one in numbers(found.value or "")] == due


def _text(item: Item, response: Response, found: Found) -> bool:
    if isinstance(item.answer, Mapping):
        said = fields_of(found.value or "", [*item.answer])
        return all(
            same_text(str(said[name]), str(due)) or full_credit(item, response, found, name)
            for name, due in item.answer.items()
        )
    if found.number is not None:
        return _figure(item, response, found)
    answers = item.answer if isinstance(item.answer, list) else [item.answer]
    said_so = any(same_text(found.value or "", str(answer)) for answer in answers)
    return said_so or full_credit(item, response, found, "")


_RIGHT: Final[Mapping[str, Callable[[Item, Response, Found], bool]]] = MappingProxyType(
    {
        "choice": _choice,
        **dict.fromkeys(("integer", "float", "count"), _figure),
        "list": _list,
        "text": _text,
        "box": lambda item, response, found: overlap(item, response, found) >= _OVERLAP,
        "boxes": lambda item, response, found: detected(item, response, found) == 1.0,
        "point": hits,
    }
)

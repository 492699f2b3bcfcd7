"""Description of a benchmark: how its files are read and how responses to its questions are scored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from mmrl.benchmarks.extraction import match
from mmrl.benchmarks.extraction.text import Extraction
from mmrl.benchmarks.items import ITEM_ANSWER_TYPES, Item, ItemResponse, parse_canonical_item

if TYPE_CHECKING:
    from mmrl.benchmarks.readers.layouts import RowLayout

GradedResponse = tuple[Item, ItemResponse, Extraction]
OfficialMetric = Callable[[Item, ItemResponse, Extraction], float]
"""Score of one response in [0, 1] by the benchmark's own rule; 1 is full marks."""
CorrectnessRule = Callable[[Item, ItemResponse, Extraction], bool]


class OverallMetric(NamedTuple):
    """A number over all responses that is not a mean of single scores, such as COCO's average precision."""

    name: str  # name of the metric in reports and, with spaces as underscores, in metrics.jsonl
    # Returns the number; items without a response come with an empty one.
    compute: Callable[[Sequence[GradedResponse]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A benchmark. A user's function may return one: see docs/extending/benchmark.md."""

    name: str  # name in reports, sample ids and default folders; a valid file name
    official_score: OfficialMetric | None = None  # the benchmark's own rule; None takes the strict verdict for it
    answer_types: Collection[str] = ITEM_ANSWER_TYPES  # answer types that its rules can score; other rows are malformed
    # For a rule that guesses a letter at random: returns item id and index of the responses that its guesses make
    # correct. It is given all responses in the order of the items, since each guess depends on the guesses before.
    draw_letters: Callable[[Sequence[GradedResponse]], Collection[tuple[str, int]]] | None = None
    # Strict verdict on a response: the answer found means the same as the item's.
    is_correct: CorrectnessRule = match.is_correct
    overall_metric: OverallMetric | None = None  # a number over all responses, for benchmarks that publish one
    # Returns the item of a row of `mmrl eval score --items`; raises ValueError for a row that is not an item.
    parse_item: Callable[[Mapping[str, Any]], Item] = parse_canonical_item
    # Returns why the rules cannot score an item, or an empty text; such an item is malformed.
    find_problem: Callable[[Item], str] | None = None
    # Formats of the benchmark's files, the more specific first; canonical JSONL always works, too.
    layouts: tuple[RowLayout, ...] = ()
    default_split: str = "test"  # split that is read from a folder when the user names none
    # True when the files are COCO's annotations, one JSON object for all images, instead of rows.
    reads_coco_annotations: bool = False

    def check_item(self, item: Item) -> Item:
        """Return the item; raises ValueError if the benchmark's rules cannot score it."""
        if item.answer_type not in self.answer_types:
            raise ValueError(
                f"the answer_type {item.answer_type!r} is not scored by {self.name}, which takes "
                f"{', '.join(self.answer_types)}; correct it, or use the benchmark `canonical`"
            )
        problem = self.find_problem(item) if self.find_problem else ""
        if problem:
            raise ValueError(problem)
        return item

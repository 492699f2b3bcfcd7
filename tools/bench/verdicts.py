"""Verdicts per second of one core on MathVista's published responses, and the time that hostile responses take.

python tools/bench/verdicts.py --data DIR
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from results import make_parser, write_results

from mmrl.benchmarks.grading import grade_response
from mmrl.benchmarks.items import Item, ItemResponse, read_items
from mmrl.benchmarks.registry import BENCHMARKS
from mmrl.benchmarks.verdict import read_rows

MEGABYTE = 1_000_000
REPEATED_UNITS: Mapping[str, str] = {
    "opening brackets": "(",
    "boxes": "\\boxed{",
    "braces": "{}",
    "digits": "1",
    "spaces": " ",
    "line breaks": "\n",
    "letters": "a",
    "grouped digits": "1,000",
    "equations": "1=",
    "labels": "(A) ",
    "list of options": "(A) 1\n",
    "announcements": "the answer is ",
    "announced letters": "the answer is (A). ",
    "refusals": "I cannot determine ",
    "turns": "Question: x\n",
    "emphasis": "**1** ",
    "number words": "twenty-one ",
    "fractions": "\\frac{1}{2}",
    "fullwidth": "\uff08\uff11\uff09",
    "tags": "<answer>",
    "thinking": "<think></think>",
    "second thoughts": "wait, it is A ",
    "suppositions": "if so, the answer would be A. ",
    "open answers": "<answer>5 or 6 ",
    "answers in Chinese": "答案]A",
}


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="MathVista's responses, as in tools/agreement.py")
    parser.add_argument("--repeat", type=int, default=5, help="passes over all responses; the median counts")
    arguments = parser.parse_args()
    bench = BENCHMARKS["mathvista"]
    items, _ = read_items(arguments.data / "items.jsonl.gz", bench.parse_item)
    paths = sorted((arguments.data / "public").glob("responses_*.jsonl.gz"))
    responses = [
        ItemResponse(id=row["pid"], text=row["response"] or "") for path in paths for _, row in read_rows(path)
    ]
    rates = [len(responses) / time_verdicts(responses, items) for _ in range(arguments.repeat)]
    print(f"{len(responses)} responses: {median(rates):.0f} verdicts/s (from {min(rates):.0f} to {max(rates):.0f})")
    numbers = {"verdicts_per_s": median(rates)}
    asked = []
    for kind in ("choice", "integer"):
        asked.append(next(item for item in items.values() if item.answer_type == kind))
    for name, unit in REPEATED_UNITS.items():
        text = (unit * (MEGABYTE // len(unit) + 1))[:MEGABYTE]
        times = [time_verdicts([ItemResponse(id=item.id, text=text)], items) for item in asked]
        numbers[f"1 MB of {name}, ms"] = 1000 * max(times)
        print(f"1 MB of {name:20s} {1000 * times[0]:7.1f} ms as a choice, {1000 * times[1]:7.1f} ms as a number")
    write_results(arguments.json, "verdicts", numbers)


def time_verdicts(responses: list[ItemResponse], items: Mapping[str, Item]) -> float:
    """Return the CPU seconds of the verdicts on all responses."""
    bench, start = BENCHMARKS["mathvista"], time.process_time()
    for response in responses:
        grade_response(bench, items[response.id], response)
    return time.process_time() - start


if __name__ == "__main__":
    main()

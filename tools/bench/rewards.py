"""Responses that each reward scores per second on one core, and the floor that it must keep.

    python tools/bench/rewards.py [--seconds 1.0]

Each is timed on the rows of its case table that earn something and are not made long on purpose; rewards that read text
on 200 characters of which every twentieth is wrong. A response is parsed once for all of its rewards, so parsing
is not timed here. Exits 1 if a reward is below its floor.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from results import make_parser, write_results

from mmrl.utils.plugins import load_function
from mmrl_rewards.cases import Case, load_case_table
from mmrl_rewards.contract import BoundReward, bind

CASES = Path(__file__).parents[2] / "rewards" / "cases"
REWARDS_BY_FLOOR = {
    300_000: "choice:exact choice:option choice:yes_no",
    80_000: "box:iou box:giou box:diou",
    30_000: "ocr:cer ocr:wer ocr:anls ocr:exact",
    20_000: "number:exact number:quantity count:exact classify:label format:tags format:partial jigsaw:positions",
    0: (
        "classify:fuzzy schema:valid jigsaw:neighbours jigsaw:order gui:step detect:iou detect:f1 "
        "detect:average_precision point:in_box point:f1 span:iou video:tube reasoning:boxes "
        "reasoning:consistency reasoning:reflection ocr:fields text:exact text:rouge text:bleu text:chrf "
        "text:repetition table:teds ranking:ndcg length:cosine"
    ),
}
"""Rewards by the calls a second that they must reach; 0 for rewards that are only shown."""
PAGE_TEXT = ("Goods received in Zürich on 3 May, net weight 1,250 kg, 12 boxes, total due 93.50 EUR. " * 3)[:200]
MISREAD_TEXT = "".join("x" if place % 20 == 7 else letter for place, letter in enumerate(PAGE_TEXT))


def measure_rate(calls: Sequence[Callable[[], object]], seconds: float) -> float:
    """Return the calls per second of CPU time, once libraries are loaded; the best of ten turns over all calls."""
    for call in calls:
        call()
    best = 0.0
    for _ in range(10):
        done, start = 0, time.process_time()
        while (elapsed := time.process_time() - start) < seconds / 10:
            for call in calls:
                call()
            done += len(calls)
        best = max(best, done / elapsed)
    return best


def make_page_case(fn: str) -> Case:
    """Return a text of 200 characters, read with some mistakes."""
    sample = {"answer_type": "text", "value": PAGE_TEXT}
    row = {"fn": fn, "sample": sample, "response": f"<answer>{MISREAD_TEXT}</answer>", "expected": 0, "source": ""}
    return Case.model_validate(row)


def make_call(case: Case, reward: BoundReward) -> Callable[[], object]:
    response, sample = case.build()
    return lambda: reward(response, sample)


def main() -> None:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each is timed")
    options = parser.parse_args()
    seconds = options.seconds
    rows = [case for table in sorted(CASES.glob("*.json")) for case in load_case_table(table)]
    slow, numbers = [], {}
    floors = {f"mmrl_rewards.{name}": floor for floor, names in REWARDS_BY_FLOOR.items() for name in names.split()}
    print("| reward | a second | floor | times the floor |\n|---|---|---|---|")
    for fn, floor in floors.items():
        cases = [case for case in rows if case.fn == fn and case.expected not in (0, "unscorable") and case.repeat == 1]
        if fn.removeprefix("mmrl_rewards.") in REWARDS_BY_FLOOR[30_000]:
            cases = [make_page_case(fn)]
        calls = [make_call(case, bind(load_function(fn, CASES, role="function"), case.args)) for case in cases]
        reached = measure_rate(calls, seconds)
        print(f"| `{fn}` | {reached:,.0f} | {floor:,} | {f'{reached / floor:.1f}' if floor else ''} |")
        numbers[fn] = {"per_s": reached, "floor": floor}
        if reached < floor:
            slow.append(fn)
    write_results(options.json, "rewards", numbers)
    sys.exit(f"below the floor: {', '.join(slow)}" if slow else 0)


if __name__ == "__main__":
    main()

"""Responses that each reward scores per second on one core, beside the floor that it must keep.

    python tools/bench/rewards.py [--seconds 1.0]

Each is timed on the rows of its own case table that earn something and are not made long on purpose; those that read
text, on 200 characters of which every twentieth is wrong. A response is parsed once for all of its rewards, so parsing
is not timed here. Exits 1 if a reward is below its floor.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from results import add_json_option, write_results

from mmrl.utils.plugins import load_object
from mmrl_rewards.cases import Case, load_case_table
from mmrl_rewards.contract import BoundReward, bind

CASES = Path(__file__).parents[2] / "rewards" / "cases"
MIN_CALLS_PER_SECOND = {
    "mmrl_rewards.box:iou": 20_000,
    "mmrl_rewards.box:giou": 20_000,
    "mmrl_rewards.box:diou": 20_000,
    "mmrl_rewards.number:exact": 20_000,
    "mmrl_rewards.number:quantity": 20_000,
    "mmrl_rewards.count:exact": 20_000,
    "mmrl_rewards.choice:exact": 20_000,
    "mmrl_rewards.choice:option": 20_000,
    "mmrl_rewards.choice:yes_no": 20_000,
    "mmrl_rewards.classify:label": 20_000,
    "mmrl_rewards.classify:fuzzy": 0,
    "mmrl_rewards.format:tags": 20_000,
    "mmrl_rewards.format:partial": 20_000,
    "mmrl_rewards.schema:valid": 0,
    "mmrl_rewards.jigsaw:positions": 20_000,
    "mmrl_rewards.jigsaw:neighbours": 0,
    "mmrl_rewards.jigsaw:order": 0,
    "mmrl_rewards.gui:step": 0,
    "mmrl_rewards.detect:iou": 0,
    "mmrl_rewards.detect:f1": 0,
    "mmrl_rewards.detect:average_precision": 0,
    "mmrl_rewards.point:in_box": 0,
    "mmrl_rewards.point:f1": 0,
    "mmrl_rewards.span:iou": 0,
    "mmrl_rewards.video:tube": 0,
    "mmrl_rewards.reasoning:boxes": 0,
    "mmrl_rewards.reasoning:consistency": 0,
    "mmrl_rewards.reasoning:reflection": 0,
    "mmrl_rewards.ocr:cer": 2_000,
    "mmrl_rewards.ocr:wer": 2_000,
    "mmrl_rewards.ocr:anls": 2_000,
    "mmrl_rewards.ocr:exact": 2_000,
    "mmrl_rewards.ocr:fields": 0,
    "mmrl_rewards.text:exact": 0,
    "mmrl_rewards.text:rouge": 0,
    "mmrl_rewards.text:bleu": 0,
    "mmrl_rewards.text:chrf": 0,
    "mmrl_rewards.text:repetition": 0,
    "mmrl_rewards.table:teds": 0,
    "mmrl_rewards.ranking:ndcg": 0,
    "mmrl_rewards.length:cosine": 0,
}
"""Calls a second that a reward must reach; 0 for what is only shown."""
PAGE_TEXT = ("Goods received in Zürich on 3 May, net weight 1,250 kg, 12 boxes, total due 93.50 EUR. " * 3)[:200]
MISREAD_TEXT = "".join("x" if place % 20 == 7 else letter for place, letter in enumerate(PAGE_TEXT))


def measure_rate(calls: Sequence[Callable[[], object]], seconds: float) -> float:
    """Calls a second of processor time, all of them in turn until the time is over, once libraries are loaded."""
    for call in calls:
        call()
    done, start = 0, time.process_time()
    while (elapsed := time.process_time() - start) < seconds:
        for call in calls:
            call()
        done += len(calls)
    return done / elapsed


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each is timed")
    add_json_option(parser)
    options = parser.parse_args()
    seconds = options.seconds
    rows = [case for table in sorted(CASES.glob("*.json")) for case in load_case_table(table)]
    slow, numbers = [], {}
    print("| reward | a second | floor | times the floor |\n|---|---|---|---|")
    for fn, floor in MIN_CALLS_PER_SECOND.items():
        cases = [case for case in rows if case.fn == fn and case.expected not in (0, "unscorable") and case.repeat == 1]
        if floor == 2_000:
            cases = [make_page_case(fn)]
        calls = [make_call(case, bind(load_object(fn, CASES), case.args)) for case in cases]
        reached = measure_rate(calls, seconds)
        print(f"| `{fn}` | {reached:,.0f} | {floor:,} | {f'{reached / floor:.1f}' if floor else ''} |")
        numbers[fn] = {"per_s": reached, "floor": floor}
        if reached < floor:
            slow.append(fn)
    write_results(options.json, "rewards", numbers)
    sys.exit(f"below the floor: {', '.join(slow)}" if slow else 0)


if __name__ == "__main__":
    main()

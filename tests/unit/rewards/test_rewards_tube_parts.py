"""Parts of a response that speak of a tube: its span, the thought's boxes, and whether they agree, second by second."""

import json
import random

import pytest

from mmrl_rewards import video
from mmrl_rewards.cases import Case
from mmrl_rewards.contract import bind

FORMAT = {"thinking": "required", "sections": [["time", True]]}


def tube(boxes):
    return [{"time": time, "bbox_2d": list(corners)} for time, corners in boxes.items()]


def value(fn, target, span, thought, answer, **args):
    case = {
        "fn": "",
        "sample": {
            "answer_type": "json",
            "value": tube(target),
            "coordinates": "px_original",
            "media": [{"type": "video", "size": [100, 100], "duration": 60}],
        },
        "response": f"<time>{list(span)}</time><think>{json.dumps(tube(thought))}</think>"
        f"<answer>{json.dumps(tube(answer))}</answer>",
        "response_format": FORMAT,
        "expected": 0,
        "source": "",
    }
    return bind(fn, args)(*Case.model_validate(case).build()).value


def random_tube(rng):
    boxes = {}
    for time in rng.sample(range(8), rng.randint(1, 6)):
        x, y = rng.randint(0, 40), rng.randint(0, 40)
        boxes[time] = (x, y, x + rng.randint(1, 40), y + rng.randint(1, 40))
    return boxes


def pixels(corners):
    x1, y1, x2, y2 = corners
    return {(x, y) for x in range(x1, x2) for y in range(y1, y2)}


def test_parts_equal_counted_seconds_and_pixels():
    rng = random.Random(3)
    seen = set()
    for _ in range(150):
        target, thought = random_tube(rng), random_tube(rng)
        answer = dict(thought) if rng.random() < 0.5 else random_tube(rng)
        start, end = sorted((rng.uniform(0, 8), rng.uniform(0, 8)))
        if rng.random() < 0.5:  # a span that fits the thought, if that has no gap
            start, end = min(thought) - 0.0, max(thought) + 0.25
        span = (round(start, 2), round(end, 2))
        within = {second for second in range(100) if span[0] <= second <= span[1]}
        shared = len(within & set(target)) / len(within | set(target)) if within else 0.0
        assert value(video.span, target, span, thought, answer, of="time") == pytest.approx(shared)
        agree = bool(within) and set(thought) == set(answer) == within
        seen.add(agree)
        assert value(video.consistency, target, span, thought, answer, of="time") == agree
        for part, boxes in (("thought", thought), ("answer", answer)):
            overlaps = []
            for time in set(boxes) & set(target):
                a, b = pixels(boxes[time]), pixels(target[time])
                overlaps.append(len(a & b) / len(a | b))
            mean = sum(overlaps) / len(target)
            assert value(video.tube, target, span, thought, answer, of=part, over="target") == pytest.approx(mean)
    assert seen == {True, False}

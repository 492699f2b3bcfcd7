"""Documents of a page made by hand: small, with everything that the page can draw, and with hostile text."""

import io
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from mmrl.view.records import find_token_arrays
from mmrl.view.run_documents import list_panels
from mmrl.view.steps import describe_outcome, make_scale, mark_duplicates

Document = dict[str, Any]
SIZE = (320, 240)
# Each of these would do something if it were parsed, obeyed or laid out as it is.
SCRIPT = "</script><script>window.hacked = 1</script>"
HOSTILE = (
    SCRIPT,
    "<svg onload='window.hacked = 2'></svg>",
    "<img src=x onerror='window.hacked = 3'>",
    "<a href='javascript:window.hacked = 4'>click</a> <!-- <script> -->",
    "right \u202eleft\u202c \u0007bell \u200bzero \x1b[2J \u2028line",
)
PROMPT = "<|im_start|>system\nYou see.<|im_end|>\n<|im_start|>user\n⟨image: 256 tokens⟩Where is the lamp?"
LONG_LINE = "A" * 1_000_000


@dataclass
class PageDocuments:
    """All that an export writes."""

    documents: dict[str, Document | bytes]
    media: dict[str, bytes] = field(default_factory=dict)

    @property
    def index(self) -> Document:
        return self.documents["index"]

    def groups(self, key: str) -> list[Document]:
        return self.documents[key]["groups"]


def make_picture(number: int, size: tuple[int, int] = SIZE) -> bytes:
    """A JPEG with a few shapes; each number has its own."""
    rng = np.random.default_rng(number)
    image = Image.new("RGB", size, tuple(rng.integers(200, 245, 3)))
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        x, y = rng.integers(0, size[0] - 60), rng.integers(0, size[1] - 60)
        w, h = rng.integers(24, 70, 2)
        shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        shape((int(x), int(y), int(x + w), int(y + h)), fill=tuple(rng.integers(40, 220, 3)))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=80)
    return stream.getvalue()


def medium(*sources: str | None, kind: str = "image", size: tuple[int, int] = SIZE, **more: Any) -> Document:
    seconds = [number * 0.5 if kind == "video" else None for number in range(len(sources))]
    frames = [{"src": source, "second": second} for source, second in zip(sources, seconds, strict=True)]
    name, (width, height) = "clip.mp4" if kind == "video" else "scene.png", size
    sizes = {"width": width, "height": height, "original": [width * 2, height * 2]}
    return {"kind": kind, "name": name, **sizes, "frames": frames, "problem": None, **more}


def mark(shape: str, *at: float, label: str = "", second: float | None = None) -> Document:
    return {"shape": shape, "medium": 0, "at": list(at), "label": label, "second": second}


def term(value: float | None, weight: float = 1.0, reason: str = "", **more: Any) -> Document:
    weighted = {"weight": weight, "counts": True, "contribution": None if value is None else weight * value}
    return {"value": value, "reason": reason, "transformed": value, **weighted, "failure": None, **more}


def policy(*chars: int) -> Document:
    return segment("policy", *chars)


def segment(author: str, start: int, end: int, **more: Any) -> Document:
    return {"author": author, "chars": [start, end], "version": 9, "shows": None, "crop": None, "n": 3, **more}


def tokens(response: str, seed: int = 0) -> dict[str, np.ndarray]:
    """A token for every four characters, as the columns of a file of tokens."""
    ends = np.arange(4, len(response) + 4, 4, dtype="<i4").clip(max=len(response))
    rng = np.random.default_rng(seed)
    number = len(ends)
    logprob = -rng.exponential(0.9, number).astype("<f4")
    columns = {
        "end": ends,
        "token_id": rng.integers(0, 150_000, number, dtype="<i4"),
        "author": np.zeros(number, "u1"),
        "recorded_logprob": logprob,
        "logprob": logprob + rng.normal(0, 0.1, number).astype("<f4"),
        "ratio": np.exp(rng.normal(0, 0.12, number)).astype("<f4"),
        "entropy": rng.exponential(0.8, number).astype("<f4"),
        "advantage": np.full(number, rng.normal(), "<f4"),
        "clipped": rng.choice([0, 0, 0, 0, 1, 2], number).astype("i1"),
    }
    columns["ratio"][:1] = math.nan
    return columns


def take_tokens(document: Document, file: Path) -> bytes:
    """Move the columns out of the rollouts of a step into a file; return what it holds."""
    rollouts = [rollout for group in document["groups"] for rollout in group["rollouts"]]
    found = []
    for line, rollout in enumerate(rollouts):
        rollout["line"] = line
        found.append(rollout.pop("tokens") or tokens(""))
    columns = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
    offset = np.cumsum([0, *(len(each["end"]) for each in found)], dtype="<i8")
    np.savez_compressed(file, offset=offset, **columns)
    document |= {"arrays": find_token_arrays(file), "problem": ""}
    return file.read_bytes()


def rollout(number: int, response: str, total: float | None, **more: Any) -> Document:
    """A rollout of the policy alone; `more` changes what it says."""
    absent = ("thinking", "answer", "answer_chars", "is_correct", "first_correct", "dropped", "tokens")
    return {
        **dict.fromkeys(absent),
        **{"rollout": number, "response": response, "segments": [policy(0, len(response))], "finish": "eos"},
        **{"marks": [], "tokens_n": max(1, len(response) // 4), "total": total},
        "advantage": None if total is None else round(2 * total - 1, 3),
        "selection": {"status": "trained", "reason": None, "carried_over": False, "staleness": 0},
        "terms": {"iou": term(total, reason="intersection over union")},
        **more,
    }


def group(number: int, sample: str, rollouts: list[Document], **more: Any) -> Document:
    return {
        **{"group": number, "sample": sample, "task": sample.split("/", maxsplit=1)[0], "prompt": PROMPT},
        **{"question": "<image>Where is the lamp?", "answer_type": "box", "target": "[80, 60, 160, 120]"},
        "selection": {"status": "trained", "reason": None, "carried_over": False},
        **{"probes": {}, "media": [medium("media/pic0.jpg")], "marks": [], "rollouts": rollouts},
        **more,
    }


def answered(number: int, box: tuple[float, ...], total: float, thought: str, **more: Any) -> Document:
    """A response that thinks, and answers with a box in fractions of the picture."""
    answer = str([round(fraction * side) for fraction, side in zip(box, SIZE * 2, strict=True)])
    response = f"<think>{thought}</think><answer>{answer}</answer>"
    start = response.index(answer)
    overlap = term(total, reason=f"intersection over union {total:.2f}")
    found = {
        **{"thinking": [7, 7 + len(thought)], "answer": answer, "answer_chars": [start, start + len(answer)]},
        "terms": {"iou": overlap, "format": term(1.0, 0.1, "both tags are there")},
        **{"marks": [mark("box", *box)], "tokens": tokens(response, seed=number)},
    }
    return rollout(number, response, total, **{**found, **more})


def ground_group(number: int, sample: str, seed: int) -> Document:
    thoughts = (
        "The lamp stands left of the table, above the chair. Its shade begins where the wall ends.",
        "I see a lamp near the upper left corner; the box should be tight around the shade.",
        "There are two round things. The bright one is the lamp, the other one is a plate. " * 6,
        "It may be the blue shape on the right.",
    )
    boxes = ((0.25, 0.25, 0.5, 0.5), (0.28, 0.22, 0.53, 0.52), (0.2, 0.3, 0.5, 0.62), (0.6, 0.55, 0.86, 0.84))
    totals = (1.0, 0.78, 0.52, 0.0)
    rollouts = list(map(answered, range(4), boxes, totals, thoughts))
    rollouts[3] |= {"finish": "length", "selection": {**rollouts[3]["selection"], "staleness": 2}}
    gold = [mark("box", 0.25, 0.25, 0.5, 0.5, label="lamp")]
    probes = {"blind": {"iou": 0.1, "total": 0.2}}
    return group(number, sample, rollouts, marks=gold, probes=probes, media=[medium(f"media/pic{seed % 4}.jpg")])


def point_group(number: int) -> Document:
    rollouts = [
        rollout(0, "(100, 60)", 0.9, answer="(100, 60)", answer_chars=[0, 9], marks=[mark("point", 0.31, 0.25)]),
        rollout(1, "(100, 60)", 0.9, marks=[mark("point", 0.31, 0.25)]),
        rollout(2, "(40, 200)", 0.1, marks=[mark("point", 0.12, 0.83)]),
    ]
    asked = {"answer_type": "point", "question": "<image>Point at the switch.", "target": "(96, 62)"}
    gold = [mark("point", 0.3, 0.26, label="switch")]
    return group(number, "point/train/000001", rollouts, **asked, marks=gold)


def video_group(number: int) -> Document:
    frames = [f"media/pic{frame % 4}.jpg" for frame in range(8)]
    read = {"answer": "0.9 to 2.1", "answer_chars": [5, 15]}
    rollouts = [
        rollout(0, "from 0.9 to 2.1 s", 0.74, marks=[mark("span", 0.9, 2.1)], **read),
        rollout(1, "from 2.0 to 3.5 s", 0.2, marks=[mark("span", 2.0, 3.5)]),
    ]
    asked = {"answer_type": "span", "question": "<video>When does the door open?", "target": "1.0 – 2.2 s"}
    track = [mark("box", 0.1, 0.1, 0.4, 0.5, second=1.1), mark("box", 0.2, 0.1, 0.5, 0.5, second=2.0)]
    shown = {"media": [medium(*frames, kind="video")], "marks": [mark("span", 1.0, 2.2), *track]}
    return group(number, "when/train/000002", rollouts, **asked, **shown)


def tool_group(number: int) -> Document:
    call = 'I zoom in. <tool_call>{"name": "zoom", "arguments": {"box": [200, 40, 300, 140]}}</tool_call>'
    reply, ending = "Here is the crop:", "The sign says <answer>OPEN</answer>"
    response = call + reply + ending
    middle = len(call)
    shown = medium("media/pic3.jpg", size=(160, 160))
    segments = [
        policy(0, middle),
        segment("environment", middle, middle + len(reply), shows=shown, crop=[0.62, 0.16, 0.94, 0.58]),
        policy(middle + len(reply), len(response)),
    ]
    start = response.index("OPEN")
    failure = "The tool refuses: the box lies outside the image"
    failed = [policy(0, middle), segment("environment", middle, middle + len(failure))]
    names = ("action", "state", "valid", "end", "earned", "advantage")
    steps = (("look", "far away", True, "", 0.0, -0.5), ("OPEN", "near", True, "terminated", 1.0, 0.5))
    turns = [dict(zip(names, step, strict=True)) for step in steps]
    # Turns with credit of their own, whose mean is 0.
    credit = {"turns": turns, "advantage": 0.0, "turn_advantages": [-0.5, 0.5]}
    rollouts = [
        rollout(0, response, 1.0, segments=segments, answer="OPEN", answer_chars=[start, start + 4], **credit),
        rollout(1, call + failure, 0.0, segments=failed, finish="stop", **credit),
    ]
    asked = {"answer_type": "text", "question": "<image>What does the sign say?", "target": "OPEN"}
    return group(number, "read/train/000003", rollouts, **asked, media=[medium("media/pic2.jpg")])


def rethink_group(number: int) -> Document:
    first, trigger, second = "<answer>two</answer>", " Wait, let me look again. ", "<answer>three</answer>"
    whole = first + trigger + second
    places = [len(first), len(first) + len(trigger), len(whole)]
    segments = [policy(0, places[0]), segment("forced", places[0], places[1]), policy(places[1], places[2])]
    again = {"segments": segments}
    read = {"answer": "three", "answer_chars": [places[1] + 8, places[1] + 13]}
    rollouts = [
        rollout(0, first, 0.0, is_correct=False, advantage=-0.7, answer="two", answer_chars=[8, 11]),
        rollout(1, whole, 1.0, **again, first_correct=False, is_correct=True, **read),
        rollout(2, whole, 0.0, **again, first_correct=True, is_correct=False),
    ]
    asked = {"answer_type": "number", "question": "<image>How many are red?", "target": "3"}
    return group(number, "count/train/000004", rollouts, **asked)


def hostile_group(number: int) -> Document:
    rollouts = [rollout(index, text, 0.0, terms={"iou": term(0.0, reason=text)}) for index, text in enumerate(HOSTILE)]
    rollouts.append(rollout(len(HOSTILE), LONG_LINE, None, terms={}, tokens_n=250_000))
    rollouts.append(rollout(len(HOSTILE) + 1, "", None, terms={"iou": term(None, failure="timeouts")}, advantage=None))
    asked = {"question": f"<image>{SCRIPT}", "prompt": HOSTILE[1], "target": HOSTILE[2]}
    gone = medium(None, problem="file is gone", name=HOSTILE[2])
    marks = [mark("box", 0, 0, 1, 1, label=SCRIPT)]
    return group(number, f"hostile/{SCRIPT}", rollouts, **asked, media=[gone], marks=marks)


def rejected_group(number: int) -> Document:
    status = {"status": "rejected", "reason": "acc", "carried_over": False, "staleness": 0}
    left_out = {"selection": status, "advantage": 0.0}
    equal = [rollout(index, f"nothing {index}", 0.0, **left_out) for index in range(2)]
    return group(number, "ground/train/000009", equal, selection=status)


def replayed_group(number: int) -> Document:
    again = {"status": "replayed", "staleness": 5, "times": 1}
    old = [rollout(index, f"again {index}", float(index), selection=again) for index in range(2)]
    return group(number, "ground/train/000003", old, selection=again)


def step_document(stage: str, step: int, kind: str, groups: list[Document]) -> Document:
    for members in (each["rollouts"] for each in groups):
        for one in members:
            one.update(describe_outcome(one, one["segments"], in_training=kind == "train"))
        mark_duplicates(members)
    return {"stage": stage, "step": step, "kind": kind, "scale": make_scale(groups), "groups": groups}


def train_step(step: int) -> Document:
    others = [point_group(1), video_group(2), tool_group(3), rethink_group(4), rejected_group(5)]
    return step_document("rl", step, "train", [ground_group(0, "ground/train/000000", step), *others])


def validation_step(step: int, right: tuple[bool, ...], kind: str = "validation") -> Document:
    groups = []
    for number, is_right in enumerate(right):
        total = 1.0 if is_right else 0.0
        shifted = 0.25 if is_right else 0.55
        single = answered(0, (shifted, 0.25, shifted + 0.25, 0.5), total, "It stands there.", advantage=None)
        gold = [mark("box", 0.25, 0.25, 0.5, 0.5)]
        groups.append(group(number, f"ground/validation/{number:06d}", [single], marks=gold))
    return step_document("rl", step, kind, groups)


def metrics_document(seed: int, steps: int = 120, cold: int = 0) -> Document:
    """Metrics of a run, of which the first `cold` steps belong to a stage of their own."""
    rng = np.random.default_rng(seed)
    rise = 1 / (1 + np.exp(-(np.arange(steps) - 40) / 18))
    reward = 0.15 + 0.6 * rise + rng.normal(0, 0.04, steps)
    columns: dict[str, list[float | None]] = {
        "reward/mean": list(reward),
        "reward/term/iou": list(reward - 0.1),
        "rethink/correct_to_incorrect": list(4 - 3 * rise),
        "rethink/incorrect_to_correct": list(1 + 8 * rise),
        "reward/term/format": list(0.5 + 0.5 * rise),
        "groups/nonzero_advantage_frac": list(0.9 - 0.4 * rise + rng.normal(0, 0.05, steps)),
        "rollout/truncated_frac": list(np.abs(rng.normal(0.05, 0.02, steps))),
        "rollout/response_tokens_mean": list(40 + 60 * rise + rng.normal(0, 4, steps)),
        "policy/entropy_nats": list(1.4 - rise + rng.normal(0, 0.04, steps)),
        "policy/approx_kl": list(np.abs(rng.normal(0.002, 0.001, steps))),
        "policy/clip_frac": list(np.abs(rng.normal(0.01, 0.004, steps))),
        "policy/importance_ratio_min": list(0.7 + rng.normal(0, 0.05, steps)),
        "policy/importance_ratio_max": list(1.4 + rng.normal(0, 0.1, steps)),
        "rollout/logprob_diff_mean": list(np.abs(rng.normal(0.01, 0.003, steps))),
        "learner/grad_norm": list(rng.gamma(3, 0.4, steps)),
        "learner/lr": list(1e-6 * np.minimum(1, np.arange(1, steps + 1) / 10)),
        "time/rollout_s": list(9 + rng.normal(0, 0.4, steps)),
        "time/learn_s": list(5 + rng.normal(0, 0.3, steps)),
        "validation/ground": [float(reward[step]) if step % 20 == 19 else None for step in range(steps)],
        "validation/mean": [float(reward[step]) if step % 20 == 19 else None for step in range(steps)],
    }
    columns["learner/grad_norm"][30] = None
    # What is measured after the stage is a point of its own, with the number of the stage's last step.
    columns["test/ground"] = [None] * steps
    rounded = {}
    for name, column in columns.items():
        rounded[name] = [*(None if value is None else float(value) for value in column), None]
    rounded["test/ground"][-1] = 0.7
    numbers = list(range(1, steps + 1))
    stages = [*["cold"] * cold, *["rl"] * (steps - cold), None]
    places = {"stage": stages, "step": [*numbers[:cold], *numbers[: steps - cold], 0], "global": [*numbers, steps]}
    meanings = {"reward/mean": "Mean total reward of the step's rollouts."}
    return {**places, "columns": rounded, "panels": list_panels(list(rounded)), "meanings": meanings}


def summary() -> Document:
    def row(task: str, before: float, after: float, *ci: float) -> Document:
        around = {"before_ci": [before - 0.05, before + 0.05], "after_ci": [after - 0.05, after + 0.05]}
        return {"task": task, "before": before, "after": after, "n": 256, "ci": list(ci), **around}

    rows = [
        row("ground", 0.21, 0.74, 0.46, 0.60),
        row("point", 0.40, 0.66, 0.19, 0.33),
        row("count", 0.52, 0.50, -0.07, 0.03),
    ]
    return {"name": "demo", "seed": 0, "since": None, "tasks": rows, "mean_rise": 0.257, "temperature": 0.7}


def benchmark_document() -> Document:
    def response(text: str, read: str, strict: bool, official: bool, rule: str) -> Document:
        start = len(text[: text.index(read)].encode("utf-16-le")) // 2  # units of UTF-16
        return {
            **{"response": text, "strict": strict, "official": official, "score": float(official), "outcome": None},
            **{"rule": rule, "value": read, "span": [start, start + len(read)], "judge_correct": None},
            **{"tokens": 12, "finish": "eos"},
        }

    items = [
        ("q-1", response("🦜 The answer is (B), since birds fly.", "B", True, True, "option_in_parentheses")),
        ("q-2", response("It could be 12 or 14. So 14.", "14", False, True, "last_number")),
        ("q-3", response("I do not know: C", "C", False, False, "last_letter")),
    ]
    rows = [{"id": name, "responses": [said], "subsets": {"topic": "birds"}} for name, said in items]
    return {"name": "mathvista", "metrics": [["accuracy", 1 / 3], ["official accuracy", 2 / 3]], "items": rows}


def run_entry(run_id: str, name: str, documents: dict[str, Document], **more: Any) -> Document:
    """The index's entry of a run, with the steps found in `documents`."""
    steps = []
    places: dict[str, list[int]] = {}
    for key, document in documents.items():
        if not key.startswith(f"{run_id}/") or isinstance(document, bytes) or "groups" not in document:
            continue
        for sample in {group["sample"] for group in document["groups"]}:
            places.setdefault(sample, []).append(len(steps))
        label = f"{document['stage']} {document['step']}" + ("" if document["kind"] == "train" else " validation")
        groups, named = document["groups"], {name: document[name] for name in ("stage", "step", "kind")}
        rollouts = sum(len(group["rollouts"]) for group in groups)
        steps.append({"key": key, **named, "label": label, "groups": len(groups), "rollouts": rollouts})
    event = {"stage": "rl", "step": 60, "name": "min_entropy", "begin": 60, "end": 75}
    return {
        **{"id": run_id, "name": name, "path": f"runs/{name}", "kind": "run", "state": "finished", "notices": []},
        "status": {"state": "finished", "stage": "rl", "step": 120, "steps": 120},
        "facts": [["mmrl", "0.2.0"], ["commit", "ab12cd3 (changed)"], ["torch", "2.11"], ["platform", "Linux x86_64"]],
        "stages": [{"name": "rl", "kind": "rl", "steps": 120}],
        "summary": summary(),
        "events": [{**event, "message": "Entropy fell below 0.5 nats."}],
        "config": [["stages.0.loss.kl.coef", "0.01"], ["seed", "0"], ["stages.0.group_size", "4"]],
        "metrics": f"{run_id}/metrics",
        "steps": steps,
        "samples": {sample: where for sample, where in places.items() if len(where) > 1},
        "benchmarks": [],
        **more,
    }


def make_documents(folder: Path) -> PageDocuments:
    """Two runs: the first has every kind of group, a benchmark and hostile text; the second is compared with it.

    Files of tokens are written into `folder`.
    """
    documents: dict[str, Document] = {
        "r0/metrics": metrics_document(0),
        "r0/rl-000010": train_step(10),
        "r0/rl-000020": train_step(20),
        "r0/rl-000030": step_document("rl", 30, "train", [hostile_group(0)]),
        "r0/rl-000020-validation": validation_step(20, (True, False, True, False)),
        "r0/bench-mathvista-0": benchmark_document(),
        "r1/metrics": metrics_document(1, cold=20),
        "r1/rl-000010": train_step(10),
        "r1/rl-000020-validation": validation_step(20, (True, True, False, False)),
    }
    for key, document in list(documents.items()):
        if "groups" in document:
            document["tokens"] = f"{key}.tokens"
            documents[document["tokens"]] = take_tokens(document, folder / "tokens.npz")
    benchmarks = [
        {"key": "r0/bench-mathvista-0", "name": "mathvista", "label": "rl 120", "items": 3, "accuracy": 1 / 3}
    ]
    notices = ["recorded by an older version: some numbers are missing"]
    first = run_entry("r0", "demo", documents, benchmarks=benchmarks, notices=notices)
    config = [["stages.0.loss.kl.coef", "0.1"], ["seed", "0"], ["stages.0.group_size", "4"]]
    second = run_entry("r1", "other", documents, config=config, state="dead", events=[], summary=None)
    second["stages"].insert(0, {"name": "cold", "kind": "sft", "steps": 20})
    documents["index"] = {"schema": 1, "made": "2026-11-26T03:00:00+00:00", "live": False, "runs": [first, second]}
    return PageDocuments(documents, {f"pic{number}": make_picture(number) for number in range(4)})

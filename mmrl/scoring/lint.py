"""Is a reward fit to train with? In range, repeatable, picklable, pure, fast, and mean to those who know nothing."""

from __future__ import annotations

import multiprocessing
import pickle
import random
import sys
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from types import BuiltinFunctionType, FrameType
from typing import Any, NamedTuple, TypeVar

from mmrl.answer import FRAMED
from mmrl.scoring.attacks import GRAMMAR, attacks
from mmrl.types import (
    Finish,
    Frame,
    ImageRef,
    Kind,
    ResizeMap,
    Response,
    Sample,
    Size,
    Target,
    Term,
    Unscorable,
    UserError,
)
from mmrl_rewards.cases import Caught
from mmrl_rewards.contract import BoundReward

_DEADLINE_S = 10.0
_SLOWEST_S = 0.05
_HUGE = 10_000_000
_LETTERS_PER_TOKEN = 4
_NOMINAL = Size(1000, 1000)
_FORBIDDEN = (
    "open",
    "os.",
    "socket.",
    "subprocess.",
    "urllib.",
    "ftplib.",
    "http.",
    "shutil.",
    "sqlite3.",
    "tempfile.",
)
_CLOCKS = frozenset({"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time"})
_SHARED_DICE: object = random.random.__self__  # type: ignore[attr-defined]
_TODAY = frozenset({"now", "utcnow", "today"})
_Result = TypeVar("_Result")


class Finding(NamedTuple):
    """What one check found."""

    check: str
    ok: bool
    detail: str


class Earned(NamedTuple):
    """What an attack earns at most, over the kinds of targets, and what it may earn."""

    attack: str
    kind: Kind
    value: float
    allowed: float
    reason: str

    @property
    def ok(self) -> bool:
        """Whether the reward keeps to its tolerance."""
        return self.value <= self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What lint found."""

    findings: tuple[Finding, ...]
    earned: tuple[Earned, ...]

    @property
    def ok(self) -> bool:
        """Whether the reward is fit."""
        return all(finding.ok for finding in self.findings) and all(earned.ok for earned in self.earned)


def subjects(kinds: Sequence[Kind]) -> tuple[Sample, ...]:
    """One plain sample of each kind, on a picture of 1000 x 1000 pixels."""
    box, point = [620.0, 130.0, 840.0, 310.0], [730.0, 220.0]
    values: Mapping[Kind, Any] = {
        Kind.TEXT: "Goods received in Zürich",
        Kind.CHOICE: "B",
        Kind.NUMBER: 347,
        Kind.BOX: box,
        Kind.BOXES: [{"bbox_2d": box, "label": "cup"}, {"bbox_2d": [20, 640, 210, 905], "label": "dog"}],
        Kind.POINT: point,
        Kind.POINTS: [{"point_2d": point, "label": "cup"}, {"point_2d": [115, 772], "label": "dog"}],
        Kind.SPAN: [12.5, 20.0],
        Kind.SPANS: [[12.5, 20.0], [301, 317.5]],
        Kind.PERMUTATION: [3, 1, 4, 2],
        Kind.ACTION: {"action": "click", "coordinate": point},
        Kind.LIST: ["otter", "heron"],
        Kind.JSON: {"invoice": "A-17", "total": 93.5},
        Kind.LATEX: r"\frac{x+1}{2}",
        Kind.SVG: '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 90 70"><circle cx="61" cy="23" r="9"/></svg>',
        Kind.TOOL_CALL: {"name": "zoom", "arguments": {"factor": 3}},
    }
    return tuple(_subject(kind, values[kind]) for kind in kinds)


def usable(reward: BoundReward, samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """The samples that the reward can judge."""
    got = _guarded_all([partial(_tried, reward, sample, "<answer></answer>") for sample in samples])
    return tuple(sample for sample, term in zip(samples, got, strict=True) if not isinstance(term, Unscorable))


def lint(reward: BoundReward, samples: Sequence[Sample]) -> Report:
    """Try a reward on samples that it can judge, in other processes that end at a deadline.

    Raises:
        UserError: a target cannot be written, or a tolerance is declared for an attack that there is not.
    """
    tries = [(name, sample, text) for sample in samples for name, text in attacks(sample).items()]
    tries += [("right", sample, GRAMMAR.render(sample.target)) for sample in samples]
    got = _guarded_all([partial(_tried, reward, sample, text) for _, sample, text in tries])
    attempts = [(name, sample, term) for (name, sample, _), term in zip(tries, got, strict=True)]
    return Report(
        findings=(
            _range(reward, attempts),
            _picklable(reward),
            _repeatable(reward, samples),
            _pure(reward, samples),
            _speed(reward, samples),
            _huge(reward, samples),
        ),
        earned=tuple(_earned(reward, attempts)),
    )


def _subject(kind: Kind, value: object) -> Sample:
    options = "\nA. red\nB. blue\nC. green\nD. white" if kind is Kind.CHOICE else ""
    frame = Frame.PX_ORIGINAL if kind in FRAMED else None
    return Sample(
        id=f"lint-{kind}",
        task="lint",
        parts=(ImageRef(path="lint.png", sha256=""), f"What do you see in the picture?{options}"),
        target=Target(kind=kind, value=value, frame=frame),
    )


def _response(sample: Sample, text: str) -> Response:
    return Response(
        text=text,
        answer=GRAMMAR.parse(text, sample.target.kind),
        finish=Finish.EOS,
        num_tokens=len(text) // _LETTERS_PER_TOKEN,
        resizes=tuple(ResizeMap(_NOMINAL, _NOMINAL) for _ in sample.media),
        frame=sample.target.frame or Frame.PX_ORIGINAL,
    )


def _tried(reward: BoundReward, sample: Sample, text: str) -> Term:
    return _called(reward, _response(sample, text), sample)


def _called(reward: BoundReward, response: Response, sample: Sample) -> Term:
    try:
        result = reward(response, sample)
    except Unscorable as error:
        if not reward.reward.service:
            raise
        result = Term(reward.reward.low, f"no verdict: {error}")  # lint need not have the service
    value, reason = result if isinstance(result, Term) else (result, "")
    low, high = reward.reward.low, reward.reward.high
    if not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"returned {value!r:.80}, not a number from {low:g} to {high:g}")
    return Term(float(value), reason)


def _called_all(reward: BoundReward, pairs: Sequence[tuple[Response, Sample]]) -> list[Term]:
    return [_called(reward, *pair) for pair in pairs]


def _range(reward: BoundReward, attempts: Sequence[tuple[str, Sample, Term | Exception]]) -> Finding:
    bad = [
        f"{name} ({sample.target.kind}): {_said(got)}" for name, sample, got in attempts if isinstance(got, Exception)
    ]
    low, high = reward.reward.low, reward.reward.high
    return Finding("range", not bad, bad[0] if bad else f"{len(attempts)} values from {low:g} to {high:g}")


def _picklable(reward: BoundReward) -> Finding:
    with Caught() as caught:
        same = pickle.loads(pickle.dumps(reward)) == reward
    if caught.error:
        return Finding("picklable", False, _said(caught.error))
    return Finding("picklable", same, "by reference" if same else "what comes back differs")


def _repeatable(reward: BoundReward, samples: Sequence[Sample]) -> Finding:
    """The same value again, after other calls, and in another process."""
    pairs = [
        (_response(sample, text), sample)
        for sample in samples
        for text in (GRAMMAR.render(sample.target), "<answer>1</answer>", "")
    ]
    back_and_forth = _guarded(partial(_called_all, reward, pairs + pairs[::-1]))
    elsewhere = _guarded(partial(_called_all, reward, pairs))
    if isinstance(back_and_forth, Exception) or isinstance(elsewhere, Exception):
        return Finding("repeatable", False, _said(back_and_forth))
    same = back_and_forth == elsewhere + elsewhere[::-1]
    return Finding(
        "repeatable", same, f"{len(pairs)} calls, three times" if same else "the same call gave another value"
    )


def _pure(reward: BoundReward, samples: Sequence[Sample]) -> Finding:
    if reward.reward.service:
        return Finding("pure", True, "asks a service")
    pairs = [(_response(sample, GRAMMAR.render(sample.target)), sample) for sample in samples]
    found = _guarded(partial(_watched, partial(_called_all, reward, pairs)))
    if isinstance(found, Exception):
        return Finding("pure", False, _said(found))
    return Finding("pure", not found, f"uses {', '.join(found)}" if found else "no files, network, clock or dice")


def _watched(task: Callable[[], object]) -> list[str]:
    """What a pure function would leave alone. The hooks stay for good: call it in a process that ends."""
    found: dict[str, None] = {}

    def audit(event: str, _: object) -> None:
        if event.startswith(_FORBIDDEN) and not _importing(sys._getframe(1)):
            found[event] = None

    def profile(_: FrameType, event: str, called: object) -> None:
        if event == "c_call" and isinstance(called, BuiltinFunctionType) and _is_chance_or_time(called):
            found[f"{called.__module__ or 'random'}.{called.__name__}"] = None

    sys.addaudithook(audit)
    sys.setprofile(profile)
    task()
    sys.setprofile(None)
    return list(found)


def _importing(frame: FrameType | None) -> bool:
    """Whether Python reads a module just now: a library may be loaded when it is first needed."""
    while frame is not None:
        if "importlib._bootstrap" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _is_chance_or_time(called: BuiltinFunctionType) -> bool:
    owner, name = called.__self__, called.__name__
    if owner is _SHARED_DICE:  # the generator that all share; one's own, seeded, is fine
        return True
    if isinstance(owner, type):
        return name in _TODAY
    return (called.__module__ == "time" and name in _CLOCKS) or (called.__module__ == "posix" and name == "urandom")


def _speed(reward: BoundReward, samples: Sequence[Sample]) -> Finding:
    pairs = [(_response(sample, GRAMMAR.render(sample.target)), sample) for sample in samples]
    seconds = _guarded(lambda: max(_seconds(reward, *pair) for pair in pairs))
    if isinstance(seconds, Exception):
        return Finding("speed", False, _said(seconds))
    limit = "" if seconds <= _SLOWEST_S or reward.reward.service else f", at most {_SLOWEST_S * 1000:g} ms"
    return Finding("speed", not limit, f"{seconds * 1e6:,.0f} us a call{limit}")


def _seconds(reward: BoundReward, response: Response, sample: Sample) -> float:
    """Median time of twenty calls, the first one aside: libraries load then. Other work may delay one, but not all."""
    _called(reward, response, sample)
    return median(timeit.repeat(lambda: _called(reward, response, sample), number=1, repeat=20))


def _huge(reward: BoundReward, samples: Sequence[Sample]) -> Finding:
    texts = ("<answer>" + "ab " * (_HUGE // 3) + "</answer>", "9" * _HUGE)
    tries = [(sample, text) for sample in samples for text in texts]
    for (sample, _), got in zip(tries, _guarded_all([partial(_tried, reward, *pair) for pair in tries]), strict=True):
        if isinstance(got, Exception):
            return Finding("10 MB response", False, f"{sample.target.kind}: {_said(got)}")
    return Finding("10 MB response", True, f"each within {_DEADLINE_S:g} s")


def _earned(reward: BoundReward, attempts: Sequence[tuple[str, Sample, Term | Exception]]) -> Iterator[Earned]:
    """The highest value of each attack. Raises UserError when a tolerance is declared for an attack that is none."""
    low, high, tolerance = reward.reward.low, reward.reward.high, reward.reward.attack_tolerance
    names = list(dict.fromkeys(name for name, _, _ in attempts if name != "right"))
    shares = dict(tolerance) if isinstance(tolerance, Mapping) else dict.fromkeys(names, tolerance)
    if unknown := sorted(shares.keys() - set(names)):
        raise UserError(
            f"reward {reward.reward.name!r}: there is no attack {unknown[0]!r}; there are {', '.join(names)}"
        )
    for name in names:
        got = [
            (sample.target.kind, term) for attack, sample, term in attempts if attack == name if isinstance(term, Term)
        ]
        if got:
            kind, term = max(got, key=lambda pair: pair[1].value)
            yield Earned(name, kind, term.value, low + (high - low) * shares.get(name, 0.0), term.reason)


def _guarded(task: Callable[[], _Result]) -> _Result | Exception:
    return _guarded_all([task])[0]


def _guarded_all(tasks: Sequence[Callable[[], _Result]]) -> list[_Result | Exception]:
    """What each task returns or raises, in another process; one that hangs or dies is replaced by a fresh one."""
    results: list[_Result | Exception] = []
    while len(results) < len(tasks):
        results += _until_failure(tasks[len(results) :])
    return results


def _until_failure(tasks: Sequence[Callable[[], _Result]]) -> list[_Result | Exception]:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_report_all, args=(tasks, there), daemon=True)
    process.start()
    there.close()
    results: list[_Result | Exception] = []
    for _ in tasks:
        if not here.poll(_DEADLINE_S):
            results.append(TimeoutError(f"hung for {_DEADLINE_S:g} s"))
            break
        try:
            results.append(here.recv())
        except EOFError:
            results.append(RuntimeError("its process died"))
            break
    process.kill()
    process.join()
    return results


def _report_all(tasks: Sequence[Callable[[], object]], pipe: Connection) -> None:
    for task in tasks:
        with Caught() as caught:
            pipe.send(task())
        # A foreign error may not survive pickling; its words do.
        if caught.error:
            pipe.send(caught.error if isinstance(caught.error, Unscorable) else RuntimeError(_said(caught.error)))


def _said(error: object) -> str:
    return (
        str(error)
        if isinstance(error, RuntimeError | TimeoutError | ValueError)
        else f"{type(error).__name__}: {error}"
    )

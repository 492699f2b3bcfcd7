"""Checks that a reward is fit to train with: in range, repeatable, picklable, pure, fast, and not fooled by attacks."""

from __future__ import annotations

import importlib
import pickle
import random
import sys
import timeit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from traceback import walk_stack
from types import BuiltinFunctionType, FrameType
from typing import NamedTuple

from mmrl.scoring.forks import run_in_forks
from mmrl.scoring.outcomes import RewardOutcome, call_reward, is_unscorable
from mmrl.scoring.reward_workers import first_call_timeout_s
from mmrl.scoring.trial_responses import ATTACK_FORMAT, build_attacks, make_trial_response
from mmrl.types import (
    AnswerType,
    Failure,
    FailureKind,
    Response,
    RewardValue,
    Sample,
    UserError,
)
from mmrl_rewards.contract import BoundReward

_TIMEOUT_S = 10.0  # of a check, unless the reward declares more
# A step scores hundreds of responses, so a slower reward would slow down every step.
_MAX_CALL_S = 0.05
_HUGE_CHARS = 10_000_000
# Beginnings of the names of Python's audit events that a pure function cannot cause.
_FORBIDDEN_EVENTS = (
    *("open", "os.", "shutil.", "sqlite3.", "subprocess.", "tempfile."),
    *("ftplib.", "http.", "socket.", "urllib."),
)
_CLOCK_FUNCTIONS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time")
_IMPURE_FUNCTIONS = frozenset({("posix", "urandom"), *(("time", name) for name in _CLOCK_FUNCTIONS)})
# Parts of names of source files whose code may read files: for imports on first use, and media of the sample.
_IMPORTING, _OPENING = "importlib._bootstrap", "pixel_reader.py"
_OPENS_MEDIA = "media of the sample (declare @reward(..., looks=True))"
_GLOBAL_RANDOM: object = random.random.__self__  # type: ignore[attr-defined]
_CURRENT_TIME_METHODS = frozenset({"now", "utcnow", "today"})
Attempt = tuple[str, Sample, RewardOutcome]
"""Name of an attack, the sample it is tried on, and the outcome."""


class LintFinding(NamedTuple):
    """The result of one check."""

    check: str
    ok: bool
    detail: str


class AttackResult(NamedTuple):
    """The highest value that an attack got, over all samples, and the highest that it may get."""

    attack: str
    answer_type: AnswerType
    value: float
    max_allowed: float
    reason: str

    @property
    def ok(self) -> bool:
        """True if the attack got no more than the reward tolerates."""
        return self.value <= self.max_allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class LintReport:
    """The results of all checks and attacks."""

    findings: tuple[LintFinding, ...]
    attacks: tuple[AttackResult, ...]

    @property
    def ok(self) -> bool:
        """True if the reward is fit to train with."""
        return all(finding.ok for finding in self.findings) and all(attack.ok for attack in self.attacks)


def filter_scorable(reward: BoundReward, samples: Sequence[Sample]) -> tuple[list[Sample], list[str]]:
    """Return the samples that the reward can score, and for each of the others why it raises `Unscorable`.

    Raises:
        UserError: the reward hangs.
    """
    scorable, reasons = [], []
    tasks = [partial(_score_text, reward, sample, "<answer></answer>") for sample in samples]
    outcomes = run_in_forks(tasks, first_call_timeout_s(reward.reward.timeout_s))
    for sample, outcome in zip(samples, outcomes, strict=True):
        if is_unscorable(outcome):
            reasons.append(outcome.reason)
        elif isinstance(outcome, Failure) and outcome.kind is FailureKind.TIMEOUT:
            # It may hang for every sample, and each would take as long.
            where = f"reward {reward.reward.name!r} ({reward.reward.place})"
            raise UserError(f"{where}, a {sample.target.answer_type} target, an empty answer: {outcome.reason}")
        else:
            scorable.append(sample)
    return scorable, reasons


def lint_reward(reward: BoundReward, samples: Sequence[Sample]) -> LintReport:
    """Call a reward for samples that it can score, in processes that are killed when a call takes too long.

    Raises:
        UserError: a target cannot be written in the response format, or the reward tolerates an unknown attack.
    """
    looks = reward.reward.looks
    tries, correct_pairs = [], []
    for sample in samples:
        correct = ATTACK_FORMAT.render(sample.target)
        correct_pairs.append((make_trial_response(sample, correct, looks=looks), sample))
        attacks = build_attacks(sample, ATTACK_FORMAT, correct, looks=looks)
        tries += [(name, sample, text) for name, text in (attacks | {"right": correct}).items()]
    # A first call may import scipy or the like, which is slower than all other calls; each fork would import it again.
    first_call = partial(_list_new_modules, reward, correct_pairs)
    [modules] = run_in_forks([first_call], first_call_timeout_s(reward.reward.timeout_s))
    if isinstance(modules, Failure) and modules.kind is FailureKind.TIMEOUT:
        # All other checks would hang, too.
        finding = LintFinding("first call", False, f"the correct answer: {modules.reason} ({reward.reward.place})")
        return LintReport(findings=(finding,), attacks=())
    for name in modules if isinstance(modules, list) else []:
        # Some libraries list modules that cannot be imported by their names.
        with suppress(Exception, SystemExit):
            importlib.import_module(name)
    calls = [partial(_score_text, reward, sample, text) for _, sample, text in tries]
    outcomes = run_in_forks(calls, _check_timeout_s(reward))
    attempts = [(name, sample, outcome) for (name, sample, _), outcome in zip(tries, outcomes, strict=True)]
    return LintReport(
        findings=(
            _check_range(reward, attempts),
            _check_pickling(reward),
            _check_repeatability(reward, samples),
            _check_purity(reward, correct_pairs),
            _check_speed(reward, correct_pairs),
            _check_huge_response(reward, samples),
        ),
        attacks=tuple(_attack_results(reward, attempts)),
    )


def _check_timeout_s(reward: BoundReward) -> float:
    return max(_TIMEOUT_S, reward.reward.timeout_s or 0.0)


def _score_text(reward: BoundReward, sample: Sample, text: str) -> RewardOutcome:
    return _score_all(reward, [(make_trial_response(sample, text, looks=reward.reward.looks), sample)])[0]


def _score_all(reward: BoundReward, pairs: Sequence[tuple[Response, Sample]]) -> list[RewardOutcome]:
    """Return the outcomes of a reward. Without a verdict of its service, a reward gets its low end."""
    outcomes: list[RewardOutcome] = []
    for response, sample in pairs:
        outcome = call_reward(reward, response, sample)
        if reward.reward.uses_service and is_unscorable(outcome):
            outcome = RewardValue(reward.reward.low, f"no verdict: {outcome.reason}")
        outcomes.append(outcome)
    return outcomes


def _list_new_modules(reward: BoundReward, pairs: Sequence[tuple[Response, Sample]]) -> list[str]:
    """Return the names of the modules that calls import."""
    known = set(sys.modules)
    _score_all(reward, pairs)
    return [name for name in sys.modules if name not in known]


def _check_range(reward: BoundReward, attempts: Sequence[Attempt]) -> LintFinding:
    for name, sample, outcome in attempts:
        if isinstance(outcome, Failure):
            return LintFinding("range", False, f"{name} ({sample.target.answer_type}): {outcome.reason}")
    return LintFinding("range", True, f"{len(attempts)} values from {reward.reward.low:g} to {reward.reward.high:g}")


def _check_pickling(reward: BoundReward) -> LintFinding:
    try:
        same = pickle.loads(pickle.dumps(reward)) == reward
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return LintFinding("picklable", False, f"{type(error).__name__}: {error}")
    return LintFinding("picklable", same, "by reference" if same else "the copy differs")


def _check_repeatability(reward: BoundReward, samples: Sequence[Sample]) -> LintFinding:
    """Check that a call gives the same value again, after other calls, and in another process."""
    pairs = []
    for sample in samples:
        for text in (ATTACK_FORMAT.render(sample.target), "<answer>1</answer>", ""):
            pairs.append((make_trial_response(sample, text, looks=reward.reward.looks), sample))
    [back_and_forth] = run_in_forks([partial(_score_all, reward, pairs + pairs[::-1])], _check_timeout_s(reward))
    [elsewhere] = run_in_forks([partial(_score_all, reward, pairs)], _check_timeout_s(reward))
    for outcomes in (back_and_forth, elsewhere):
        if isinstance(outcomes, Failure):
            return LintFinding("repeatable", False, outcomes.reason)
    same = back_and_forth == [*elsewhere, *elsewhere[::-1]]
    detail = f"{len(pairs)} calls, three times" if same else "the same call gave another value"
    return LintFinding("repeatable", same, detail)


def _check_purity(reward: BoundReward, pairs: Sequence[tuple[Response, Sample]]) -> LintFinding:
    if reward.reward.uses_service:
        return LintFinding("pure", True, "asks a service")
    [found] = run_in_forks([partial(_record_impure_calls, reward, pairs)], _check_timeout_s(reward))
    if isinstance(found, Failure):
        return LintFinding("pure", False, found.reason)
    clean = "no files, network, clock or randomness"
    if reward.reward.looks:
        found = [name for name in found if name != _OPENS_MEDIA]
        clean += ", but media of the sample"
    return LintFinding("pure", not found, f"uses {', '.join(found)}" if found else clean)


def _record_impure_calls(reward: BoundReward, pairs: Sequence[tuple[Response, Sample]]) -> list[str]:
    """Return the names of the impure functions that calls use. The hooks cannot be removed: call this in a fork."""
    found: dict[str, None] = {}

    def audit(event: str, _: object) -> None:
        if event.startswith(_FORBIDDEN_EVENTS) and not _runs(sys._getframe(1), (_IMPORTING, _OPENING)):
            found[event] = None

    def profile(call_frame: FrameType, event: str, called: object) -> None:
        if event == "call" and _OPENING in call_frame.f_code.co_filename:
            found[_OPENS_MEDIA] = None
        if event != "c_call" or not isinstance(called, BuiltinFunctionType) or not _is_random_or_clock(called):
            return
        # numpy and scipy seed generators and read clocks while they are imported, which is not the reward's fault.
        if not _runs(call_frame, (_IMPORTING,)):
            found[f"{called.__module__ or 'random'}.{called.__name__}"] = None

    sys.addaudithook(audit)
    sys.setprofile(profile)
    for response, sample in pairs:
        with suppress(Exception, SystemExit):
            reward(response, sample)
    sys.setprofile(None)
    return list(found)


def _runs(call_frame: FrameType, files: Sequence[str]) -> bool:
    """Return True if a call, or one that led to it, is of code in a file with one of these in its name."""
    names = {caller.f_code.co_filename for caller, _ in walk_stack(call_frame)}
    return any(file in name for name in names for file in files)


def _is_random_or_clock(function: BuiltinFunctionType) -> bool:
    owner, name = function.__self__, function.__name__
    if owner is _GLOBAL_RANDOM:  # the shared generator; one that the reward seeds itself is fine
        return True
    # `datetime.now` is a method of a class written in C, whose module says nothing.
    if isinstance(owner, type):
        return name in _CURRENT_TIME_METHODS
    return (function.__module__, name) in _IMPURE_FUNCTIONS


def _check_speed(reward: BoundReward, pairs: Sequence[tuple[Response, Sample]]) -> LintFinding:
    [seconds] = run_in_forks([partial(_slowest_seconds, reward, pairs)], _check_timeout_s(reward))
    if isinstance(seconds, Failure):
        return LintFinding("speed", False, seconds.reason)
    limit = "" if seconds <= _MAX_CALL_S or reward.reward.uses_service else f", at most {_MAX_CALL_S * 1000:g} ms"
    return LintFinding("speed", not limit, f"{seconds * 1e6:,.0f} us a call{limit}")


def _slowest_seconds(reward: BoundReward, pairs: Sequence[tuple[Response, Sample]]) -> float:
    """Return the median time of a call for the response that takes longest."""
    slowest = 0.0
    for pair in pairs:
        call = partial(_score_all, reward, [pair])
        call()  # libraries load in the first call, which a run makes before its first step
        slowest = max(slowest, median(timeit.repeat(call, number=1, repeat=20)))
    return slowest


def _check_huge_response(reward: BoundReward, samples: Sequence[Sample]) -> LintFinding:
    # The words reveal a regular expression that backtracks; the ten million digits, a parser of numbers that does.
    texts = ("<answer>" + "ab " * (_HUGE_CHARS // 3) + "</answer>", "9" * _HUGE_CHARS)
    tries = [(sample, text) for sample in samples for text in texts]
    calls = [partial(_score_text, reward, sample, text) for sample, text in tries]
    outcomes = run_in_forks(calls, _check_timeout_s(reward))
    for (sample, _), outcome in zip(tries, outcomes, strict=True):
        if isinstance(outcome, Failure):
            return LintFinding("10 MB response", False, f"{sample.target.answer_type}: {outcome.reason}")
    return LintFinding("10 MB response", True, f"each within {_check_timeout_s(reward):g} s")


def _attack_results(reward: BoundReward, attempts: Sequence[Attempt]) -> Iterator[AttackResult]:
    """Yield the highest value of each attack.

    Raises:
        UserError: the reward tolerates an unknown attack.
    """
    low, high, tolerance = reward.reward.low, reward.reward.high, reward.reward.attack_tolerance
    names = list(dict.fromkeys(name for name, _, _ in attempts if name != "right"))
    shares = dict(tolerance) if isinstance(tolerance, Mapping) else dict.fromkeys(names, tolerance)
    unknown = sorted(shares.keys() - set(names))
    if unknown:
        raise UserError(
            f"reward {reward.reward.name!r}: there is no attack {unknown[0]!r}; there are {', '.join(names)}"
        )
    for name in names:
        tried = [(outcome, sample) for attack, sample, outcome in attempts if attack == name]
        earned = [(outcome, sample) for outcome, sample in tried if isinstance(outcome, RewardValue)]
        if earned:
            best, sample = max(earned, key=lambda pair: pair[0].value)
            max_allowed = low + (high - low) * shares.get(name, 0.0)
            yield AttackResult(name, sample.target.answer_type, best.value, max_allowed, best.reason)

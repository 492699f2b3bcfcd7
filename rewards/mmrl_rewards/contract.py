"""Declares rewards: pure functions `(response, sample, *, options) -> float | RewardValue` with a name and a range.

The decorator states name, range and answer types. The options are the keyword-only parameters of the function:

    @reward(name="iou", answer_types=(AnswerType.BOX,))
    def iou(response: Response, sample: Sample, *, threshold: float | None = None) -> RewardValue: ...

    bind(iou, {"threshold": 0.5})(response, sample)

Its docstring, which `mmrl reward show` prints, has the formula, `Source:` with `Departures:`, and `Unscorable:`.

A bad answer gets the low end of the range; a reward may raise `BadAnswer` for it. A bad sample raises `Unscorable` for
every response, so that checks before training find it: read the target before the answer. A reward that cannot decide
whether an answer is right raises `Unscorable` too, and the `fallback` of its term decides instead. A reward does no I/O
except to open its sample's media if it `looks`, and uses no clock, no randomness and no global state.
"""

from __future__ import annotations

import inspect
import pkgutil
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Concatenate, Generic, Literal, ParamSpec, TypeAlias, TypeVar

from pydantic import Field

from mmrl.answer import COORDINATE_TYPES, AnswerValue, parse_answer_value, validate_value
from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable, UserError
from mmrl.utils.plugin_args import PluginOption, check_positional_parameters, read_plugin_options, validate_args

ValueT = TypeVar("ValueT")
RewardOptions = ParamSpec("RewardOptions")
RewardFn: TypeAlias = Callable[Concatenate[Response, Sample, RewardOptions], float | RewardValue]
Of: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]
"""Part of a response that a reward reads: `answer`, `thought`, `response` for its whole text, or a section's tag."""
FallbackOn: TypeAlias = Literal["abstention", "bad_answer", "low"]
"""When the term's fallback decides: if the reward abstains, also if it cannot read the answer, or at any low value."""


class TurnRewards(RewardValue):
    """Result of a reward function that says what each turn in an environment earned; its value is their sum."""

    by_turn: tuple[float, ...]  # one for each of `response.turns`

    def __new__(cls, by_turn: Sequence[float], reason: str = "") -> TurnRewards:
        """Return the rewards of turns, with one line for a person who reads the rollout."""
        rewards = super().__new__(cls, float(sum(by_turn)), reason)
        rewards.by_turn = tuple(map(float, by_turn))
        return rewards

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Return what `__new__` takes, for pickle."""
        return self.by_turn, self.reason


class BadAnswer(Exception):
    """The answer gets the low end of the reward's range, for the reason that the message states."""


class LeftToFallback(Unscorable):
    """The answer gets the low end of the reward's range unless the term's fallback applies to the response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward(Generic[RewardOptions]):
    """Holds a reward function and its declaration. A call passes its arguments on to the function."""

    fn: RewardFn[RewardOptions]
    name: str  # in metrics
    low: float  # lowest value, which bad answers get
    high: float  # highest value
    answer_types: tuple[AnswerType, ...]  # of the targets it can score; empty for all
    attack_tolerance: Mapping[str, float] | float  # fraction of the range, 0 to 1, that an attack may get; or by attack
    uses_service: bool  # calls a service, so its time and purity are not checked
    costly_with: str | None  # option without which the service costs nothing; None if it always costs
    timeout_s: float | None  # seconds one call may take; None for no limit
    judges_answer: bool  # the value depends on whether the answer is right
    looks: bool  # opens images or videos of the sample, by `Sample.image`, `crop` or `video_frames`
    options: Mapping[str, PluginOption]  # keyword-only parameters by name

    @property
    def doc(self) -> str:
        """Return the function's docstring, which states formula, source and departures."""
        return inspect.getdoc(self.fn) or ""

    @property
    def place(self) -> str:
        """Return file and line of the function, as messages name them: `mine.py:12`."""
        code = inspect.unwrap(self.fn).__code__
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}"

    def __call__(
        self, response: Response, sample: Sample, *args: RewardOptions.args, **kwargs: RewardOptions.kwargs
    ) -> float | RewardValue:
        """Return the function's value for one response, the low end of the range if it raises `BadAnswer`."""
        return BoundReward(reward=self, args=kwargs)(response, sample, *args)

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        """Pickle by module and name."""
        # pickle looks a function up by its name, and would find this object there.
        return pkgutil.resolve_name, (f"{self.fn.__module__}:{self.fn.__qualname__}",)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundReward:
    """Holds a reward and the values of its options."""

    reward: Reward[...]
    args: Mapping[str, object] = field(default_factory=dict)  # values by option; defaults fill in the rest
    fallback_on: FallbackOn = "abstention"

    def __call__(self, response: Response, sample: Sample) -> float | RewardValue:
        """Return the reward of one response under these options.

        Raises:
            LeftToFallback: the answer is bad, or earns the low end, and `fallback_on` leaves it to the fallback.
            Unscorable: the sample is bad, or no rule applies to the answer.
        """
        try:
            result = self.reward.fn(response, sample, **self.args)
        except BadAnswer as error:
            if self.fallback_on != "abstention":
                raise LeftToFallback(f"bad answer: {error}") from error
            return RewardValue(self.reward.low, str(error))
        if self.fallback_on == "low":
            value, reason = value_and_reason(result)
            if value == self.reward.low:
                raise LeftToFallback(f"the low end: {reason}")
        return result


def reward(
    *,
    name: str,
    low: float = 0.0,
    high: float = 1.0,
    answer_types: tuple[AnswerType, ...] = (),
    attack_tolerance: Mapping[str, float] | float = 0.1,
    uses_service: bool = False,
    costly_with: str | None = None,
    timeout_s: float | None = None,
    judges_answer: bool = True,
    looks: bool = False,
) -> Callable[[RewardFn[RewardOptions]], Reward[RewardOptions]]:
    """Declare a reward function.

    Args:
        name: name in metrics.
        low: lowest value it returns, for bad answers.
        high: highest value it returns.
        answer_types: types of the targets that it can score. Empty means all.
        attack_tolerance: fraction of the range, 0 to 1, that `mmrl reward lint` allows for a response that ignores the
            sample, such as a box around the whole image. A mapping states it for single attacks by name.
        uses_service: the reward calls a service of `mmrl_rewards.services`, so lint checks neither its purity nor time.
        costly_with: option without which the service runs on this machine and costs neither a request nor a model.
            Before training, a reward whose service costs is called for one sample, any other for every sample.
        timeout_s: seconds that one call may take, for a reward that can hang on some responses, as a solver can. The
            reward then always runs in another process, which is killed when a call takes longer.
        judges_answer: False for a reward of format, length or style. A run warns of samples that have no other.
        looks: the reward opens the sample's images or videos. Before training and in lint, its responses then have the
            true sizes of those, and lint takes the samples of its case table, which names files.

    Raises:
        UserError: at import, when the range is empty or infinite, `timeout_s` is not a number of seconds above 0, a
            tolerance is outside [0, 1], `costly_with` names no option, or an option is not a keyword-only parameter
            with a type.
    """
    if not (isfinite(low) and isfinite(high) and low < high):
        raise UserError(f"reward {name!r}: the range [{low}, {high}] is empty or endless")
    if timeout_s is not None and not 0.0 < timeout_s < inf:
        raise UserError(f"reward {name!r}: timeout_s {timeout_s} is not a number of seconds above 0")
    shares = attack_tolerance.values() if isinstance(attack_tolerance, Mapping) else [attack_tolerance]
    if not all(0.0 <= share <= 1.0 for share in shares):
        raise UserError(f"reward {name!r}: attack_tolerance {attack_tolerance} is not a share from 0 to 1")

    def declare(fn: RewardFn[RewardOptions]) -> Reward[RewardOptions]:
        if takes_group(fn):
            raise UserError(
                f"reward {name!r}: a function of a group is a group reward: leave out @reward, and name it in "
                "`rewards.group_rewards`"
            )
        check_positional_parameters(fn, ("response", "sample"), role="reward")
        options = read_plugin_options(fn, skip=2)
        if costly_with is not None and costly_with not in options:
            raise UserError(f"reward {name!r}: costly_with {costly_with!r} is not one of its options")
        return Reward(
            fn=fn,
            name=name,
            low=low,
            high=high,
            answer_types=answer_types,
            attack_tolerance=attack_tolerance,
            uses_service=uses_service,
            costly_with=costly_with,
            timeout_s=timeout_s,
            judges_answer=judges_answer,
            looks=looks,
            options=MappingProxyType(options),
        )

    return declare


def takes_group(fn: Callable[..., Any]) -> bool:
    """Return True for a function whose first parameter is a `Group`, as in a group reward."""
    try:
        first = next(iter(inspect.signature(fn).parameters.values()), None)
    except ValueError:
        return False  # built into Python, such as `int`
    # An annotation is text where the file postpones them.
    return first is not None and (first.name == "group" or "Group" in str(first.annotation))


def bind(fn: object, args: Mapping[str, Any]) -> BoundReward:
    """Bind a reward's options, after checking names and types by the rules of JSON.

    A list stands for a tuple and a string for an enum member.

    Raises:
        UserError: `fn` is not a reward, or an option is unknown, missing or of the wrong type.
    """
    if not isinstance(fn, Reward):
        raise UserError(f"{fn!r} is not a reward: decorate the function with @mmrl.reward(name=...)")
    return BoundReward(reward=fn, args=validate_args(f"reward {fn.name!r}", fn.options, args))


def target_value(sample: Sample, answer_type: AnswerType) -> AnswerValue:
    """Return the target's validated value, in the form that `AnswerType` states for its type.

    Raises:
        Unscorable: the target has another type, its value is invalid, or its coordinates have no coordinate system.
    """
    target = sample.target
    if target.answer_type is not answer_type:
        raise Unscorable(f"the target is a {target.answer_type}, this reward compares a {answer_type}")
    try:
        value = validate_value(answer_type, target.value)
    except ValueError as error:
        raise Unscorable(f"the target {target.value!r:.200} is {error}") from error
    if answer_type in COORDINATE_TYPES and target.coordinate_system is None:
        raise Unscorable(f"the target {target.value!r:.200} does not name the coordinate system of its coordinates")
    return value


def answer_value(response: Response) -> AnswerValue:
    """Return the parsed value of the answer, in the form that `AnswerType` states for the target's type.

    Raises:
        BadAnswer: the response holds no such answer; the reason is the first of its problems.
    """
    if response.answer.value is None:
        raise BadAnswer(response.answer.problems[0])
    return response.answer.value


def part_text(response: Response, of: Of = "answer") -> str:
    """Return the text of the part of a response that `of` names.

    Raises:
        BadAnswer: the part is absent or empty, or occurs more than once.
    """
    answer = response.answer
    parts = {**answer.sections, "answer": answer.text, "thought": answer.thinking, "response": response.text}
    text = parts.get(of)
    if of in answer.repeated:
        raise BadAnswer(f"more than one {of}")
    if text is None:
        raise BadAnswer(answer.problems[0] if of == "answer" else f"no {of}")
    if not text.strip():
        raise BadAnswer(f"empty {of}")
    return text


def question_text(sample: Sample) -> str:
    """Return the text parts of a sample's prompt, each from a line of its own."""
    return "\n".join([part for part in sample.parts if isinstance(part, str)])


def part_value(response: Response, answer_type: AnswerType, of: Of = "answer") -> AnswerValue:
    """Return the parsed value of the part that `of` names, in the form that `AnswerType` states for `answer_type`.

    For the answer, this is `answer_value`, which has the target's type whatever `answer_type` is.

    Raises:
        BadAnswer: the part is absent, empty, repeated, or not of this type.
    """
    if of == "answer":
        return answer_value(response)
    text = part_text(response, of).strip()
    try:
        return parse_answer_value(answer_type, text)
    except ValueError as error:
        raise BadAnswer(f"{of} is {error}: {text[:40]!r}") from error


def parse_target(sample: Sample, answer_type: AnswerType, parse: Callable[[Any], ValueT]) -> ValueT:
    """Return what `parse` makes of the target's value, which it refuses by a ValueError.

    Raises:
        Unscorable: as `target_value`, or the value is refused.
    """
    try:
        return parse(target_value(sample, answer_type))
    except ValueError as error:
        raise Unscorable(f"the target {error}") from error


def parse_part(
    response: Response, answer_type: AnswerType, parse: Callable[[Any], ValueT], of: Of = "answer"
) -> ValueT:
    """Return what `parse` makes of the value of a part, which it refuses by a ValueError; raises BadAnswer."""
    try:
        return parse(part_value(response, answer_type, of))
    except ValueError as error:
        raise BadAnswer(f"the {of} {error}") from error


def describe_error(reward: Reward[...], error: BaseException) -> str:
    """Return an error that a reward raised, with its file and line."""
    frames = list(traceback.extract_tb(error.__traceback__))
    own_frames = [frame for frame in frames if frame.filename == inspect.getfile(reward.fn)]
    # The error may lie deep in a library. The last line in the reward's own file is what its author can change.
    last = (own_frames or frames)[-1]
    return f"raised {type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"


def value_and_reason(result: object, no_reason: str = "") -> tuple[Any, Any]:
    """Return the two fields of what a reward returned, a `RewardValue` or a number without a reason; unchecked."""
    return result if isinstance(result, RewardValue) else (result, no_reason)


def column_value(sample: Sample, column: str) -> object:
    """Return what the sample's row holds in a column; `a.b` is the key `b` within column `a`.

    Raises:
        Unscorable: the row has no such column.
    """
    value: object = sample.meta
    for key in [column] if column in sample.meta else column.split("."):
        if not isinstance(value, Mapping) or key not in value:
            columns = ", ".join(map(repr, sample.meta)) or "none"
            raise Unscorable(f"the sample has no column {column!r}; it has {columns}")
        value = value[key]
    return value


def rescale_above(value: float, floor: float) -> float:
    """Map [floor, 1] linearly to [0, 1], and clip values outside, such as those below the level of chance."""
    return min(1.0, max(0.0, (value - floor) / (1.0 - floor)))

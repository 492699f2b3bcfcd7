"""Every type of `mmrl.types`, made at random from its annotations, comes back from JSON as it was."""

import json
import math
import random
import struct
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

import mmrl.types as mmrl_types
from mmrl.checkpoint import json_codec
from mmrl.types import AnswerType, Author, Experience, Group, Sample, Segment, Size, Target, TrainingState, UserError

UNSTORED = {"MediaPolicy", "DatasetContext"}  # they hold paths of this machine, and no other type holds them
CODEC_TYPES = [
    kind
    for name, kind in vars(mmrl_types).items()
    if isinstance(kind, type) and kind.__module__.startswith(f"{mmrl_types.__name__}.") and name not in UNSTORED
    if is_dataclass(kind) or issubclass(kind, (tuple, Enum))
]
FLOATS = (0.0, -0.0, 5e-324, 0.1 + 0.2, 1.7976931348623157e308, math.inf, -math.inf, math.nan, -math.nan, 1e16)
TEXTS = ("", "$ref", "é\n\x00", "\ud83d", "\ud83d" + "\ude00", "😀", '"', "$")


def made(hint: Any, rng: random.Random, depth: int = 0) -> Any:
    """A random value of an annotated type."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        choices = (int, float, str, type(None), bytes, AnswerType, Size)
        deep = (tuple[Any, ...], list[Any], dict[Any, Any], Mapping[str, Any], Target)
        return made(rng.choice(choices if depth > 3 else choices + deep), rng, depth + 1)
    if origin is Literal:
        return rng.choice(inner)
    if origin in (Union, types.UnionType):
        return made(rng.choice(inner), rng, depth + 1)
    if origin is tuple and inner[-1] is not ...:
        return tuple(made(each, rng, depth + 1) for each in inner)
    if origin in (tuple, list):
        return origin(made(inner[0], rng, depth + 1) for _ in range(rng.randrange(4)))
    if origin in (dict, Mapping):
        key = rng.choice((int, str, AnswerType)) if inner[0] is Any else inner[0]
        return {made(key, rng, depth + 1): made(inner[1], rng, depth + 1) for _ in range(rng.randrange(4))}
    if issubclass(hint, Enum):
        return rng.choice(list(hint))
    if is_dataclass(hint) or issubclass(hint, tuple):
        return hint(**{name: made(each, rng, depth + 1) for name, each in get_type_hints(hint).items()})
    plain = {
        type(None): lambda: None,
        bool: lambda: rng.random() < 0.5,
        int: lambda: rng.choice((0, -1, 2**80, rng.randrange(10**6))),
        float: lambda: rng.choice((*FLOATS, struct.unpack(">d", rng.randbytes(8))[0])),
        str: lambda: rng.choice((*TEXTS, str(rng.random()))),
        bytes: lambda: rng.randbytes(3),
    }
    return plain[hint]()


def dissected(value: Any) -> Any:
    """Exact types and bits of a value, comparable where NaN is not."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack(">d", value)
    if is_dataclass(value):
        return kind, [(field.name, dissected(getattr(value, field.name))) for field in fields(value)]
    if isinstance(value, tuple | list):
        return kind, [dissected(each) for each in value]
    if isinstance(value, dict):
        return kind, [(dissected(key), dissected(each)) for key, each in value.items()]
    return kind, value


@pytest.mark.parametrize("kind", CODEC_TYPES, ids=lambda kind: kind.__name__)
def test_every_noun_comes_back_exactly(kind):
    rng = random.Random(kind.__name__)
    for _ in range(60):
        value = made(kind, rng)
        text = json_codec.dumps(value)
        assert dissected(json_codec.loads(text, kind)) == dissected(value)
        assert "NaN" not in text and "Infinity" not in text


def test_the_dissection_sees_what_equality_does_not():
    pairs = [(0.0, -0.0), ((1,), [1]), (1, True), (AnswerType.BOX, "box"), (Size(1, 2), (1, 2)), (math.nan, -math.nan)]
    for one, other in pairs:
        assert dissected(one) != dissected(other)


def test_what_was_one_object_is_one_again():
    rng = random.Random(0)
    one = made(Experience, rng)
    other = replace(one, rollout=replace(one.rollout, index=one.rollout.index + 1))
    text = json_codec.dumps({"memory": [one, other, one]})
    first, second, again = json_codec.loads(text, dict)["memory"]
    assert first is again
    assert first.rollout is not second.rollout
    assert first.rollout.prompt is second.rollout.prompt
    assert text.count('"$Prompt"') == 1


def unshared(value):
    """An equal value in which no two parts are one object."""
    if is_dataclass(value):
        return type(value)(**{field.name: unshared(getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, tuple) and type(value) is not tuple:
        return type(value)(*map(unshared, value))
    if isinstance(value, tuple | list):
        return type(value)(map(unshared, value))
    if isinstance(value, dict):
        return {unshared(key): unshared(each) for key, each in value.items()}
    return value


def shared_state(rng):
    """A state whose buffer, groups and unfinished rollouts have parts in common: some one object, some only equal."""
    stock = [made(Experience, rng) for _ in range(3)]
    rollouts = []
    for _ in range(8):
        one = rng.choice(stock).rollout
        if rng.random() < 0.5:
            one = replace(one, prompt=rng.choice(stock).rollout.prompt)
        if rng.random() < 0.3:
            one = replace(one, index=rng.randrange(3))
        rollouts.append(unshared(one) if rng.random() < 0.4 else one)
    buffer = tuple(replace(rng.choice(stock), rollout=rng.choice(rollouts)) for _ in range(10))
    groups = tuple(tuple(rng.choices(rollouts, k=2)) for _ in range(3))
    carried = tuple(replace(made(Group, rng), rollouts=tuple(rng.choices(rollouts, k=3))) for _ in range(2))
    return replace(made(TrainingState, rng), replay_buffer=buffer, unfinished=groups, carried_over=carried)


@pytest.mark.parametrize("seed", range(20))
def test_the_text_is_a_function_of_the_value_alone(seed):
    """Equal parts may be one object or several, as after a resume: the text does not show it."""
    state = shared_state(random.Random(seed))
    text = json_codec.dumps(state)
    again = json_codec.loads(text, TrainingState)
    assert dissected(again) == dissected(state)
    assert json_codec.dumps(again) == text
    assert json_codec.dumps(unshared(state)) == text
    mixed = replace(state, replay_buffer=tuple(rebuilt(each) for each in state.replay_buffer))
    assert json_codec.dumps(mixed) == text


def rebuilt(experience):
    """The experience with a prompt that was built anew."""
    return replace(experience, rollout=replace(experience.rollout, prompt=unshared(experience.rollout.prompt)))


def test_what_is_equal_but_not_the_same_stays_apart():
    """Equal by ==, but of other types or bits."""
    apart = [Target(answer_type=AnswerType.NUMBER, value=value) for value in (0, 0.0, -0.0, False, math.nan, -math.nan)]
    texts = json_codec.dumps(apart)
    assert texts.count('"$Target"') == 6
    assert dissected(json_codec.loads(texts, list)) == dissected(apart)


def test_what_is_equal_is_written_once():
    one, other = (Target(answer_type=AnswerType.BOX, value=(1.0, 2.0, 3.0, 4.0)) for _ in range(2))
    text = json_codec.dumps([one, other])
    assert text.count('"$Target"') == 1
    first, second = json_codec.loads(text, list)
    assert first is second


def test_a_file_that_nests_what_it_writes_first_is_read():
    """As earlier versions wrote it: an object where it first occurs, then its number."""
    size = '{"$Target": {"answer_type": {"$AnswerType": "number"}, "value": 3}}'
    segment = '{"$Segment": {"token_ids": {"$tuple": []}, "logprobs": {"$tuple": []}, "author": {"$Author": "forced"}}}'
    first, second, again, last = json_codec.loads(f'[{size}, {segment}, {{"$ref": 0}}, {{"$ref": 1}}]', list)
    assert first is again and second is last
    assert first.value == 3 and second.author is Author.FORCED


def test_text_that_looks_like_a_tag_is_text():
    value = {"$ref": 0, "$Kind": "box", "plain": {"$tuple": ["$str"]}, "nested": {"$objects": [], "$value": 1}}
    assert json_codec.loads(json_codec.dumps(value), dict) == value


def test_a_state_is_readable_json():
    found = json.loads(json_codec.dumps(TrainingState(step=7, eval_rewards={"before": {"count": {"a": 0.5}}})))
    assert found["$value"] == {"$ref": 0}
    [content] = found["$objects"]
    assert content["$TrainingState"]["step"] == 7
    assert content["$TrainingState"]["eval_rewards"] == {"before": {"count": {"a": 0.5}}}


class Mine(int):
    """A user's own kind of number."""


def test_what_cannot_come_back_exactly_is_refused_by_name():
    sample = Sample(
        id="a", task="t", parts=(), target=Target(answer_type=AnswerType.TEXT, value=""), meta={"x": Mine(3)}
    )
    with pytest.raises(UserError, match=r"cannot hold 3 \(.*\.Mine\)"):
        json_codec.dumps(sample)
    with pytest.raises(UserError, match=r"set\)"):
        json_codec.dumps({"x": {1}})


@pytest.mark.parametrize(
    "text", ['{"$Nonsense": {}}', '{"$TrainingState": {"stepp": 1}}', '{"$Author": "parrot"}', '{"$Size": [1, 2, 3]}']
)
def test_nouns_of_another_version_are_refused(text):
    with pytest.raises(UserError, match="another version of mmrl"):
        json_codec.loads(text, object)


def test_a_value_of_another_kind_is_refused():
    with pytest.raises(UserError, match="a TrainingState was expected, and this is a dict"):
        json_codec.loads("{}", TrainingState)


def test_a_noun_with_a_new_field_reads_what_was_written_before_it():
    assert json_codec.loads('{"$TrainingState": {"step": 3}}', TrainingState) == TrainingState(step=3)
    text = (
        '{"$Segment": {"token_ids": {"$tuple": [1]}, "logprobs": {"$tuple": [-0.5]}, "author": {"$Author": "policy"}}}'
    )
    segment = json_codec.loads(text, Segment)
    assert segment == Segment(token_ids=(1,), logprobs=(-0.5,), author=Author.POLICY)

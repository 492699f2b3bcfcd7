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
from factories import make_sample

import mmrl.types as mmrl_types
from mmrl.checkpoint import json_codec
from mmrl.types import AnswerType, Author, Experience, Group, Segment, Size, Target, TrainingState, UserError

NOT_STORED = {"MediaPolicy", "DatasetContext"}  # they hold paths of this machine, and no other type holds them
CODEC_TYPES = [
    kind
    for name, kind in vars(mmrl_types).items()
    if isinstance(kind, type) and kind.__module__.startswith(f"{mmrl_types.__name__}.") and name not in NOT_STORED
    if is_dataclass(kind) or issubclass(kind, (tuple, Enum))
]
FLOATS = (0.0, -0.0, 5e-324, 0.1 + 0.2, 1.7976931348623157e308, math.inf, -math.inf, math.nan, -math.nan, 1e16)
TEXTS = ("", "$ref", "é\n\x00", "\ud83d", "\ud83d" + "\ude00", "😀", '"', "$")


def make_random(hint: Any, rng: random.Random, depth: int = 0) -> Any:
    """Return a random value of an annotated type."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        choices = (int, float, str, type(None), bytes, AnswerType, Size)
        deep = (tuple[Any, ...], list[Any], dict[Any, Any], Mapping[str, Any], Target)
        return make_random(rng.choice(choices if depth > 3 else choices + deep), rng, depth + 1)
    if origin is Literal:
        return rng.choice(inner)
    if origin in (Union, types.UnionType):
        return make_random(rng.choice(inner), rng, depth + 1)
    if origin is tuple and inner[-1] is not ...:
        return tuple(make_random(item, rng, depth + 1) for item in inner)
    if origin in (tuple, list):
        return origin(make_random(inner[0], rng, depth + 1) for _ in range(rng.randrange(4)))
    if origin in (dict, Mapping):
        key = rng.choice((int, str, AnswerType)) if inner[0] is Any else inner[0]
        size = rng.randrange(4)
        return {make_random(key, rng, depth + 1): make_random(inner[1], rng, depth + 1) for _ in range(size)}
    if issubclass(hint, Enum):
        return rng.choice(list(hint))
    if is_dataclass(hint) or issubclass(hint, tuple):
        return hint(**{name: make_random(field, rng, depth + 1) for name, field in get_type_hints(hint).items()})
    plain = {
        type(None): lambda: None,
        bool: lambda: rng.random() < 0.5,
        int: lambda: rng.choice((0, -1, 2**80, rng.randrange(10**6))),
        float: lambda: rng.choice((*FLOATS, struct.unpack(">d", rng.randbytes(8))[0])),
        str: lambda: rng.choice((*TEXTS, str(rng.random()))),
        bytes: lambda: rng.randbytes(3),
    }
    return plain[hint]()


def exact_form(value: Any) -> Any:
    """Return exact types and bits of a value, comparable where `==` is not enough (NaN, -0.0, True)."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack(">d", value)
    if is_dataclass(value):
        return kind, [(field.name, exact_form(getattr(value, field.name))) for field in fields(value)]
    if isinstance(value, tuple | list):
        return kind, [exact_form(item) for item in value]
    if isinstance(value, dict):
        return kind, [(exact_form(key), exact_form(item)) for key, item in value.items()]
    return kind, value


def round_trip(value, kind):
    return json_codec.loads(json_codec.dumps(value), kind)


@pytest.mark.parametrize("kind", CODEC_TYPES, ids=lambda kind: kind.__name__)
def test_a_random_value_is_read_back_equal_in_every_bit(kind):
    rng = random.Random(kind.__name__)
    for _ in range(60):
        value = make_random(kind, rng)
        assert exact_form(round_trip(value, kind)) == exact_form(value)
        text = json_codec.dumps(value)
        assert "NaN" not in text and "Infinity" not in text


def test_exact_form_tells_apart_what_equality_does_not():
    pairs = [(0.0, -0.0), ((1,), [1]), (1, True), (AnswerType.BOX, "box"), (Size(1, 2), (1, 2)), (math.nan, -math.nan)]
    for one, other in pairs:
        assert exact_form(one) != exact_form(other)


def test_one_object_is_written_once_and_is_one_again():
    one = make_random(Experience, random.Random(0))
    other = replace(one, rollout=replace(one.rollout, index=one.rollout.index + 1))
    text = json_codec.dumps({"buffer": [one, other, one]})
    first, second, again = json_codec.loads(text, dict)["buffer"]
    assert first is again
    assert first.rollout is not second.rollout
    assert first.rollout.prompt is second.rollout.prompt
    assert text.count('"$Prompt"') == 1


def copy_deeply(value):
    """Return an equal value in which no two parts are one object."""
    if is_dataclass(value):
        return type(value)(**{field.name: copy_deeply(getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, tuple) and type(value) is not tuple:
        return type(value)(*map(copy_deeply, value))
    if isinstance(value, tuple | list):
        return type(value)(map(copy_deeply, value))
    if isinstance(value, dict):
        return {copy_deeply(key): copy_deeply(item) for key, item in value.items()}
    return value


def make_shared_state(rng):
    """Return a state whose buffer, groups and unfinished rollouts share parts: some are one object, some only equal."""
    stock = [make_random(Experience, rng) for _ in range(3)]
    rollouts = []
    for _ in range(8):
        rollout = rng.choice(stock).rollout
        if rng.random() < 0.5:
            rollout = replace(rollout, prompt=rng.choice(stock).rollout.prompt)
        if rng.random() < 0.3:
            rollout = replace(rollout, index=rng.randrange(3))
        rollouts.append(copy_deeply(rollout) if rng.random() < 0.4 else rollout)
    buffer = tuple(replace(rng.choice(stock), rollout=rng.choice(rollouts)) for _ in range(10))
    groups = tuple(tuple(rng.choices(rollouts, k=2)) for _ in range(3))
    carried = tuple(replace(make_random(Group, rng), rollouts=tuple(rng.choices(rollouts, k=3))) for _ in range(2))
    state = make_random(TrainingState, rng)
    return replace(state, replay_buffer=buffer, unfinished=groups, carried_over=carried)


def with_new_prompt(experience):
    """Return the experience with a prompt that was built again."""
    return replace(experience, rollout=replace(experience.rollout, prompt=copy_deeply(experience.rollout.prompt)))


@pytest.mark.parametrize("seed", range(20))
def test_text_depends_on_the_value_alone_and_not_on_shared_objects(seed):
    """Equal parts may be one object or several, as after a resume."""
    state = make_shared_state(random.Random(seed))
    text = json_codec.dumps(state)
    loaded = json_codec.loads(text, TrainingState)
    assert exact_form(loaded) == exact_form(state)
    rebuilt = replace(state, replay_buffer=tuple(map(with_new_prompt, state.replay_buffer)))
    for equal in (loaded, copy_deeply(state), rebuilt):
        assert json_codec.dumps(equal) == text


@pytest.mark.parametrize(
    ("values", "num_written"),
    [
        ((0, 0.0, -0.0, False, math.nan, -math.nan), 6),  # equal by ==, but of other types or bits
        (((1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 4.0)), 1),
    ],
)
def test_only_targets_that_are_the_same_to_the_bit_are_one(values, num_written):
    targets = [Target(answer_type=AnswerType.NUMBER, value=value) for value in values]
    assert json_codec.dumps(targets).count('"$Target"') == num_written
    loaded = round_trip(targets, list)
    assert exact_form(loaded) == exact_form(targets)
    assert len(set(map(id, loaded))) == num_written


def test_text_that_nests_an_object_where_it_first_occurs_is_read():
    """Earlier versions wrote it so."""
    target = '{"$Target": {"answer_type": {"$AnswerType": "number"}, "value": 3}}'
    segment = '{"$Segment": {"token_ids": {"$tuple": []}, "logprobs": {"$tuple": []}, "author": {"$Author": "forced"}}}'
    first, second, again, last = json_codec.loads(f'[{target}, {segment}, {{"$ref": 0}}, {{"$ref": 1}}]', list)
    assert first is again and second is last
    assert first.value == 3
    assert second == Segment(token_ids=(), logprobs=(), author=Author.FORCED)  # fields added since have their defaults


def test_keys_and_texts_that_look_like_tags_stay_texts():
    value = {"$ref": 0, "$Kind": "box", "plain": {"$tuple": ["$str"]}, "nested": {"$objects": [], "$value": 1}}
    assert round_trip(value, dict) == value


def test_state_is_readable_json():
    found = json.loads(json_codec.dumps(TrainingState(step=7, eval_rewards={"before": {"count": {"a": 0.5}}})))
    assert found["$value"] == {"$ref": 0}
    [content] = found["$objects"]
    assert content["$TrainingState"]["step"] == 7
    assert content["$TrainingState"]["eval_rewards"] == {"before": {"count": {"a": 0.5}}}


class UserNumber(int):
    """A number of a user's own type."""


@pytest.mark.parametrize(
    ("value", "message"),
    [(make_sample(meta={"x": UserNumber(3)}), r"cannot hold 3 \(.*\.UserNumber\)"), ({1}, r"set\)")],
)
def test_value_of_an_unknown_type_is_refused_with_the_type(value, message):
    with pytest.raises(UserError, match=message):
        json_codec.dumps({"x": value})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"$Nonsense": {}}', "Nonsense: written by another version"),
        ('{"$TrainingState": {"stepp": 1}}', "TrainingState: written by another version"),
        ('{"$Author": "parrot"}', "Author: written by another version"),
        ('{"$Size": [1, 2, 3]}', "Size: written by another version"),
        ("{}", "expected a TrainingState, but this is a dict"),
    ],
)
def test_text_of_another_version_or_type_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        json_codec.loads(text, TrainingState)

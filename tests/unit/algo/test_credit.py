"""Credit of turns: golden vectors, an oracle that shares no code, and what must not change."""

import random
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from mmrl.algo.advantages import normalize_rewards
from mmrl.algo.credit import compute_turn_advantages, discounted_returns
from mmrl.config.schema import AdvantageConfig
from mmrl.types import Score, Turn

# Three siblings: the states of their turns and the rewards of these.
STATES = [["s0", "s1", "s2"], ["s0", "s1"], ["s0", "s0", "s1"]]
REWARDS = [[0.0, 0.0, 1.0], [0.0, -1.0], [0.0, 0.0, 0.0]]


def make_group(rewards, states):
    """What the functions read of a group."""
    scores, rollouts = [], []
    for row, names in zip(rewards, states, strict=True):
        scores.append(Score(terms={}, total=sum(row), by_turn=tuple(row)))
        turns = tuple(Turn(action="a", state=name) for name in names)
        rollouts.append(SimpleNamespace(turns=turns))
    return SimpleNamespace(scores=tuple(scores), rollouts=tuple(rollouts))


def turn_advantages(rewards, states, **options):
    options = {"discount": 0.9, **options}
    # These are refused where they have no effect.
    unused = {"broadcast": ("discount", "step_weight", "compare"), "to_go": ("step_weight",), "gigpo": ("compare",)}
    for name in unused[options["credit"]]:
        options.pop(name, None)
    config = AdvantageConfig(**options)
    advantages = normalize_rewards([[sum(row) for row in rewards]], config)[0]
    return compute_turn_advantages(make_group(rewards, states), advantages, config)


TURNS = {"credit": "to_go", "compare": "turn"}
GOLDEN = [
    (TURNS, [[0.981888, 0.981900, 0.707007], [-1.016956, -1.016967], [0.035067, 0.035068, -0.707007]]),
    (TURNS | {"compare": "group"}, [[0.915519, 1.031775, 1.160949], [-1.293352, -1.422526], [-0.130788] * 3]),
    ({"credit": "gigpo"}, [[2.191419, 1.981800, 0.999900], [-2.255826, -2.016867], [0.032203, 0.032203, 0.035068]]),
    (TURNS | {"scale": "none"}, [[0.84, 0.933333, 0.5], [-0.87, -0.966667], [0.03, 0.033333, -0.5]]),
    ({"credit": "gigpo", "scale": "none"}, [[1.8325, 1.933333, 1.0], [-1.8775, -1.966667], [0.0225, 0.0225, 0.033333]]),
]


@pytest.mark.parametrize(("options", "expected"), GOLDEN)
def test_credit_equals_values_by_hand(options, expected):
    """Computed by hand for `γ = 0.9`, weight 1, sample deviation plus 1e-4."""
    found = turn_advantages(REWARDS, STATES, **options)
    for row, expected_row in zip(found, expected, strict=True):
        assert row == pytest.approx(expected_row, abs=2e-6)


def slow(rewards, states, *, credit, compare, scale, discount, step_weight):
    """The same, value by value."""

    def z(value, values):
        if len(values) < 2 or max(values) - min(values) <= 1e-9:
            return 0.0
        return (value - fmean(values)) / (stdev(values) + 1e-4 if scale == "group_std" else 1.0)

    def to_go(i, t):
        return sum(discount ** (u - t) * rewards[i][u] for u in range(t, len(rewards[i])))

    places = [(i, t) for i in range(len(rewards)) for t in range(len(rewards[i]))]
    totals = [sum(row) for row in rewards]
    rows = []
    for i in range(len(rewards)):
        row = []
        for t in range(len(rewards[i])):
            if credit == "gigpo":
                met = [to_go(j, u) for j, u in places if states[j][u] == states[i][t]]
                row.append(z(totals[i], totals) + step_weight * z(to_go(i, t), met))
            else:
                met = [to_go(j, u) for j, u in places if compare == "group" or u == t]
                row.append(z(to_go(i, t), met))
        rows.append(row)
    return rows


@pytest.mark.parametrize("credit", ["to_go", "gigpo"])
@pytest.mark.parametrize("compare", ["turn", "group"])
@pytest.mark.parametrize("scale", ["group_std", "none"])
def test_credit_equals_a_slow_version(credit, compare, scale):
    rng = random.Random(f"{credit}{compare}{scale}")
    for _ in range(50):
        lengths = [rng.randint(1, 6) for _ in range(rng.randint(1, 6))]
        rewards = [[rng.choice([0.0, 1.0, -0.5, rng.random()]) for _ in range(n)] for n in lengths]
        states = [[rng.choice("abcd") for _ in range(n)] for n in lengths]
        options = {"credit": credit, "compare": compare, "scale": scale}
        options |= {"discount": rng.choice([1.0, 0.9, 0.5]), "step_weight": rng.choice([0.0, 1.0, 2.5])}
        found = turn_advantages(rewards, states, **options)
        for row, expected in zip(found, slow(rewards, states, **options), strict=True):
            assert row == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("credit", ["to_go", "gigpo"])
def test_equal_rewards_and_single_rollouts_have_no_advantage(credit):
    assert turn_advantages([[0.0, 0.7], [0.0, 0.7]], [["a", "b"]] * 2, credit=credit) == [(0.0, 0.0)] * 2
    assert turn_advantages([[1.0, 0.3]], [["a", "b"]], credit=credit) == [(0.0, 0.0)]


def test_one_turn_is_broadcast_to_the_bit():
    rewards = [[0.1], [0.7], [0.30000000000000004]]
    config = AdvantageConfig()
    expected = normalize_rewards([[row[0] for row in rewards]], config)[0]
    assert turn_advantages(rewards, [["a"]] * 3, credit="to_go") == [(value,) for value in expected]


def test_rollouts_without_turns_share_their_advantage():
    group = SimpleNamespace(scores=(Score(terms={}, total=1.0), Score(terms={}, total=0.0)), rollouts=())
    assert compute_turn_advantages(group, (1.0, -1.0), AdvantageConfig(credit="gigpo")) is None


def test_returns_are_discounted():
    assert discounted_returns([0.0, 0.0, 1.0], 0.9) == pytest.approx([0.81, 0.9, 1.0])
    assert discounted_returns([], 0.9) == []


@pytest.mark.parametrize(
    ("credit", "option", "remedy"),
    [
        ("broadcast", {"discount": 0.9}, "`discount: 0.9` has no effect with `credit: broadcast`.*to_go or gigpo"),
        ("broadcast", {"step_weight": 0.5}, "`step_weight: 0.5` has no effect with `credit: broadcast`.*to gigpo"),
        ("broadcast", {"compare": "group"}, "`compare: group` has no effect with `credit: broadcast`.*to to_go"),
        ("to_go", {"step_weight": 0.0}, "`step_weight: 0.0` has no effect with `credit: to_go`"),
        ("gigpo", {"compare": "group"}, "`compare: group` has no effect with `credit: gigpo`"),
    ],
)
def test_options_without_effect_are_refused(credit, option, remedy):
    with pytest.raises(ValidationError, match=remedy):
        AdvantageConfig(credit=credit, **option)
    # A run saves its config with all keys.
    saved = AdvantageConfig(credit=credit).model_dump()
    assert AdvantageConfig(**saved) == AdvantageConfig(credit=credit)


@pytest.mark.parametrize(
    "option",
    [
        {"baseline": "leave_one_out"},
        {"batch_normalize": True},
        {"outlier_std": 3.0},
        {"combine": "per_term"},
        {"scale": "batch_std"},
        {"difficulty_weight": {"term": "iou"}},
    ],
)
def test_what_turns_are_not_defined_for_is_refused(option):
    with pytest.raises(ValidationError, match="credit: gigpo"):
        AdvantageConfig(credit="gigpo", **option)

"""Group rewards: published numbers, slow versions, small groups, and functions of the user's with their limits."""

import hashlib
import json
import math
import os
import random
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest
from factories import make_answer, make_group, make_prompt, make_rollout, make_sample, make_score
from PIL import Image

from mmrl import types
from mmrl.algo.advantages import compute_advantages
from mmrl.algo.group_rewards import (
    blind_contrast,
    correct_with_tool_media,
    curiosity,
    dast,
    diversity,
    dynamic_length,
    excess_calls,
    greedy_baseline,
    kimi_length,
    majority_vote,
    shortest_correct,
    sufficient_parts,
)
from mmrl.cli import main
from mmrl.config.load import load_config
from mmrl.config.schema import AdvantageConfig, GroupRewardConfig
from mmrl.media.pixel_reader import PixelReader
from mmrl.scoring.build import build_scorer, load_reward_terms
from mmrl.scoring.group_reward_calls import (
    BoundGroupReward,
    apply_group_rewards,
    check_group_rewards,
    isolate_group_rewards,
    load_group_rewards,
    reward_weights,
)

CORRECT = ("acc",)
OF_CORRECT = (dast, kimi_length, dynamic_length, diversity, correct_with_tool_media)
ALL = [*(partial(fn, correct=CORRECT) for fn in OF_CORRECT), majority_vote, curiosity, excess_calls]
ALL.append(partial(shortest_correct, correct=CORRECT, longer_than=0))


def group(lengths, right, *, answers=None, texts=None, kind=types.AnswerType.NUMBER, probes=None, meta=None, **more):
    """A group whose responses have these lengths in tokens, and values of the term `acc`; `more` are further terms."""
    prompt = make_prompt(make_sample(3, kind, meta=meta or {}))
    answers, texts = answers or [None] * len(lengths), texts or [""] * len(lengths)
    rollouts = [
        make_rollout(prompt, index, texts[index], make_answer(answers[index]), num_tokens=length)
        for index, length in enumerate(lengths)
    ]
    return make_group(prompt, rollouts, [make_score(acc=value, **more) for value in right], probes=probes or {})


def calling(right, calls, shown=None):
    """A group whose responses called a tool `calls` times; each reply shows so many images."""
    plain = group([1] * len(right), right)
    text = types.Segment(token_ids=(7,), logprobs=(0.0,), author=types.Author.ENVIRONMENT)
    size = types.Size(8, 8)
    ref = types.ImageRef(path="a.png", sha256="")
    image = types.MediaObservation(ref=ref, grid=(1, 2, 2), resize_map=types.ResizeMap(size, size), digest="")
    rollouts = []
    for rollout, num_calls, num_shown in zip(plain.rollouts, calls, shown or [0] * len(calls), strict=True):
        (own,) = rollout.segments
        reply = (text, *[replace(text, observation=image)] * num_shown, text)
        rollouts.append(replace(rollout, segments=(own, *(*reply, own) * num_calls)))
    return replace(plain, rollouts=tuple(rollouts))


def answering(*answers, kind=types.AnswerType.NUMBER):
    return group([1] * len(answers), [0] * len(answers), answers=answers, kind=kind)


def values(terms):
    return [term.value for term in terms]


LENGTHS, OBSERVED = [100, 200, 300], group([120, 90, 50, 60], [1, 1, 0, 0])


def shuffled(*blind):
    """A group of which half is correct, and answers to shuffled frames."""
    return group([1, 1], [1, 0], probes={"shuffled": tuple(make_score(acc=value) for value in blind)})


@pytest.mark.parametrize(
    ("reward", "options", "given", "expected"),
    [
        # The numbers of the published codes.
        (dast, {}, group([100, 200, 300, 400], [1, 1, 0, 0]), [0.5 + 0.5 * 7 / 11, 0.5 + 0.5 * 3 / 11, -0.1, -0.1]),
        (kimi_length, {}, group(LENGTHS, [1, 1, 1]), [0.5, 0.0, -0.5]),
        (kimi_length, {}, group(LENGTHS, [0, 0, 0]), [0.0, 0.0, -0.5]),
        # Half of it is the reward of VL-Cogito's code: 0 and -0.5 at one and two mean lengths of the correct ones.
        (dynamic_length, {}, group([50, 150, 100, 200, 1, 900], [1, 1, 0, 0, 0, 0]), [0, 0, 0, -1, -0.999753, -1]),
        (dynamic_length, {}, group([375, 750, 751, 4095, 4096], [0] * 5), [-0.25, 0, 0, 0, -0.5]),
        # The limit of generation instead of the longest response, as in the paper.
        (dast, {"longest": 4000}, group([100, 400], [1, 0]), [0.5 + 0.5 * 1950 / 2050, -0.1 - 0.9 * 1650 / 2050]),
        # 90 tokens are not more than 100, but more than 89; equally short responses share the reward.
        (shortest_correct, {}, OBSERVED, [0, 0, 0, 0]),
        (shortest_correct, {"longer_than": 89}, OBSERVED, [0, 1, 0, 0]),
        (shortest_correct, {}, group([200, 200, 300], [1, 1, 1]), [1, 1, 0]),
        # 0.5 >= 0.8 x 0.625 with shuffled frames, as in Video-R1; 0.5 < 0.8 x 0.875.
        (blind_contrast, {"probe": "shuffled"}, shuffled(1, 1, 1, 0, 1, 0, 1, 0), [1, 0]),
        (blind_contrast, {"probe": "shuffled"}, shuffled(1, 1, 1, 1, 1, 1, 1, 0), [0, 0]),
        (correct_with_tool_media, {}, calling([1, 1, 0, 1], [1, 1, 1, 0], [1, 0, 2, 0]), [1, 0, 0, 0]),
        (diversity, {}, group([1] * 3, [1] * 3, texts=["the cup is on the table"] * 3), [0, 0, 0]),
    ],
)
def test_values_by_hand(reward, options, given, expected):
    assert values(reward(given, correct=CORRECT, **options)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (partial(blind_contrast, probe="blank"), "no probe 'blank'; there is none"),
        (sufficient_parts, "add the step {kind: probe, corruption: looked}"),
    ],
)
def test_a_reward_without_its_probe_is_refused(reward, message):
    with pytest.raises(types.UserError, match=message):
        reward(group([1], [1]), correct=CORRECT)


def looking(calls, suffices, right=None):
    """A group whose responses looked `calls` times, and the verdicts on the answers from their parts."""
    plain = calling(right or [1] * len(calls), calls, [1] * len(calls))
    return replace(plain, probes={"looked": tuple(make_score(acc=value) for value in suffices)})


def test_parts_suffice_if_the_answer_from_them_is_correct_and_there_are_any():
    assert values(sufficient_parts(looking([1, 2, 1, 0], [1, 1, 0, 1]), correct=CORRECT)) == [1, 1, 0, 0]
    # The answer of the whole response does not matter.
    assert values(sufficient_parts(looking([1, 1], [1, 0], right=[0, 1]), correct=CORRECT)) == [1, 0]


def test_parts_are_matched_by_index_also_beside_rollouts_that_were_dropped():
    given = looking([1, 1, 1], [1, 0, 1])
    first, second, third = given.rollouts
    dropped = replace(given, rollouts=(third, second), scores=given.scores[1:], dropped=(types.Dropped(first, {}),))
    assert values(sufficient_parts(dropped, correct=CORRECT)) == [1, 0]


def with_greedy(totals, greedy):
    plain = group([1] * len(totals), [0] * len(totals), probes={"greedy": (greedy,)})
    scores = [replace(score, total=total) for score, total in zip(plain.scores, totals, strict=True)]
    return replace(plain, scores=tuple(scores))


@pytest.mark.parametrize(("totals", "greedy"), [((1.0, 0.0, 0.5), 0.75), ((0.2,), 0.0), ((-1.0, 2.0), -0.5)])
def test_advantages_over_the_greedy_response_are_those_of_remax(totals, greedy):
    """A = r(x, y) - r(x, greedy y), line 6 of algorithm 1 of ReMax, for each of several responses."""
    options = GroupRewardConfig(fn="mmrl.algo.group_rewards:greedy_baseline")
    term = BoundGroupReward(name="greedy_baseline", compute=greedy_baseline, options=options)
    after = apply_group_rewards(with_greedy(totals, make_score(acc=greedy)), 0, group_rewards=[term])
    (advantages,) = compute_advantages([after], AdvantageConfig(baseline="none", scale="none"), {})
    assert advantages == pytest.approx([total - greedy for total in totals])


def test_a_greedy_response_that_is_missing_or_has_no_score_is_not_a_zero():
    with pytest.raises(types.UserError, match="sample 's': add {kind: greedy} to rollout_steps"):
        greedy_baseline(group([1], [1]))
    failure = types.Failure(types.FailureKind.UNSCORABLE, "no reply")
    failed = replace(make_score(acc=0.0), failures={"acc": failure})
    with pytest.raises(types.Unscorable, match="greedy response: acc: no reply"):
        greedy_baseline(with_greedy((1.0,), failed))
    decided = replace(failed, decided_by={"acc": "judge"})
    assert values(greedy_baseline(with_greedy((1.0,), decided))) == [0.0]
    line = "{fn: 'mmrl.algo.group_rewards:greedy_baseline'}"
    steps = "stages.1.rollout_steps=[{kind: generate}, {kind: greedy}]"
    settings = [f"rewards.group_rewards=[{line}]", steps, "stages.1.advantage.baseline=none"]
    (term,) = build_group_rewards(load_config(QUICKSTART, settings).config, QUICKSTART.parent)
    after = apply_group_rewards(with_greedy((1.0, 0.0), failed), 0, group_rewards=[term])
    assert [skip.failures["greedy_baseline"].kind for skip in after.dropped] == ["unscorable"] * 2


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ([], "the group reward greedy_baseline needs {kind: greedy}"),
        (["stages.1.rollout_steps=[{kind: generate}, {kind: greedy}]"], "baseline group_mean takes it out again"),
        (
            [
                "stages.1.rollout_steps=[{kind: generate}, {kind: greedy}]",
                "stages.1.advantage={combine: per_term, baseline: none}",
            ],
            "with combine per_term, advantage.scale group_std divides the group reward greedy_baseline and the",
        ),
    ],
)
def test_a_greedy_baseline_without_effect_is_refused(overrides, complaint):
    line = "rewards.group_rewards=[{fn: 'mmrl.algo.group_rewards:greedy_baseline'}]"
    with pytest.raises(types.UserError, match=complaint):
        load_config(QUICKSTART, [line, *overrides])


@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize(
    ("fn", "args", "corruption"),
    [
        ("blind_contrast", "{correct: [count], probe: grey}", "grey"),
        ("sufficient_parts", "{correct: [count]}", "looked"),
    ],
)
def test_a_group_reward_whose_probe_is_not_made_in_every_step_is_refused(fn, args, corruption, every):
    settings = [f"rewards.group_rewards=[{{fn: 'mmrl.algo.group_rewards:{fn}', args: {args}}}]"]
    if every is not None:
        probe = f"{{kind: probe, corruption: {corruption}, every: {every}}}"
        settings.append(f"stages.1.rollout_steps=[{{kind: generate}}, {probe}]")
    with pytest.raises(
        types.UserError, match=f"stage 'rl': the group reward {fn} needs the probe '{corruption}' in every"
    ):
        load_config(QUICKSTART, settings)
    settings[1:] = [f"stages.1.rollout_steps=[{{kind: generate}}, {{kind: probe, corruption: {corruption}}}]"]
    load_config(QUICKSTART, settings)


def test_curiosity_and_calls_cost_what_the_published_code_says():
    """max(0.3 - s, 0) / 2 / s x 0.25 - 0.05 (n - 1) for a picture, of eight responses of which one called thrice."""
    rare = calling([1] * 8, [3] + [0] * 7)
    bonus, cost = values(curiosity(rare)), values(excess_calls(rare))
    assert 0.125 * bonus[0] + 0.05 * cost[0] == pytest.approx((0.3 - 1 / 8) / 2 / (1 / 8) * 0.25 - 0.05 * 2)
    assert bonus[1:] == cost[1:] == [0.0] * 7
    assert values(curiosity(calling([1] * 4, [1, 2, 0, 0]))) == [0.0] * 4  # half of them look: no need of more


def measure_diversity_slowly(texts, right, n):
    grams = [[tuple(t.lower().split()[i : i + n]) for i in range(len(t.split()) - n + 1)] for t in texts]

    def similarity(a, b):
        every = set(a + b)
        return sum(gram in a and gram in b for gram in every) / len(every) if every else 1.0

    found = []
    for i in range(len(texts)):
        others = [similarity(grams[i], grams[j]) for j in range(len(texts)) if j != i]
        found.append(1 - sum(others) / len(others) if right[i] and others else 0.0)
    return found


def test_diversity_equals_counting():
    rng = random.Random(0)
    for _ in range(100):
        size, n = rng.randint(1, 5), rng.randint(1, 3)
        texts = [" ".join(rng.choices("abc", k=rng.randint(0, 7))) for _ in range(size)]
        right = [rng.random() < 0.7 for _ in texts]
        got = values(diversity(group([1] * size, right, texts=texts), correct=CORRECT, words=n))
        assert got == pytest.approx(measure_diversity_slowly(texts, right, n))


def measure_dynamic_length_slowly(lengths, right):
    """What VL-Cogito's code adds to a reward (verl/workers/reward/custom.py at commit 7ab7856), written anew."""
    values, of_right = [], [length for length, ok in zip(lengths, right, strict=True) if ok]
    for length, ok in zip(lengths, right, strict=True):
        if ok:
            values.append(0.0)
        elif of_right:
            wanted = sum(of_right) / len(of_right)
            wave = 1.0 + math.cos(length / wanted * math.pi)
            values.append(-0.5 if length >= 2 * wanted else 0.5 * -0.5 * wave)
        elif length >= 4096:
            values.append(0.5 * -0.5)
        else:
            wave = 1.0 + math.cos(length / 750 * math.pi)
            values.append(0.0 if length >= 750 else 0.5 * (0.5 * -0.5 * wave))
    return values


def test_dynamic_length_against_a_slow_version():
    draw = random.Random(3)
    for _ in range(200):
        lengths = [draw.choice([draw.randint(1, 900), draw.randint(900, 5000)]) for _ in range(6)]
        right = [draw.random() < 0.3 for _ in lengths]
        found = values(dynamic_length(group(lengths, right), correct=CORRECT))
        assert [0.5 * value for value in found] == pytest.approx(measure_dynamic_length_slowly(lengths, right))


SPLIT, TEXTS = answering(3, 3, 4, 5, 6), ("Red  Kite", "red kite", "ＲＥＤ kite", "blue")


@pytest.mark.parametrize(
    ("given", "share", "expected"),
    [
        (answering(3, 3, 4), 0.0, [1, 1, 0]),
        (answering(3, 3.0, 4), 0.0, [1, 1, 0]),
        (answering(3, 4), 0.0, [0, 0]),  # a tie
        (answering(3, 4, 5), 0.0, [0, 0, 0]),
        (answering(None, None, 3), 0.0, [0, 0, 1]),  # what cannot be parsed does not vote
        (answering(None, None), 0.0, [0, 0]),
        (answering(7), 0.0, [1]),
        (SPLIT, 0.4, [1, 1, 0, 0, 0]),
        (SPLIT, 0.5, [0] * 5),
        (answering(*TEXTS, kind=types.AnswerType.TEXT), 0.0, [1, 1, 1, 0]),
        (answering(("a", "b"), ("a", "b"), ("b", "a"), kind=types.AnswerType.LIST), 0.0, [1, 1, 0]),
    ],
)
def test_majority_vote_pays_the_most_frequent_answer(given, share, expected):
    assert values(majority_vote(given, share=share)) == expected


def test_majority_vote_refuses_boxes():
    with pytest.raises(types.UserError, match="no two answers of type box"):
        majority_vote(group([1], [0], answers=[(0, 0, 1, 1)], kind=types.AnswerType.BOX))


@pytest.mark.parametrize("term", ALL)
def test_no_value_depends_on_the_order_of_the_siblings(term):
    lengths, right, answers, texts = [150, 150, 300, 120], [1, 1, 1, 0], [3, 3, 4, 5], ["a b c d", "a b c", "d", "a b"]
    whole = values(term(group(lengths, right, answers=answers, texts=texts)))
    for order in permutations(range(4)):
        moved = (tuple(row[i] for i in order) for row in (lengths, right, answers, texts))
        lengths_, right_, answers_, texts_ = moved
        again = values(term(group(lengths_, right_, answers=answers_, texts=texts_)))
        assert again == pytest.approx([whole[i] for i in order])


@pytest.mark.parametrize("term", ALL)
@pytest.mark.parametrize("lengths", [[0], [0, 0], [7, 7, 7], [1, 1000]])
@pytest.mark.parametrize("right", [True, False])
def test_values_of_small_and_equal_groups_stay_in_range(term, lengths, right):
    got = term(group(lengths, [right] * len(lengths)))
    assert len(got) == len(lengths)
    assert all(-1.0 <= value <= 1.0 for value in values(got))
    assert all(term.reason for term in got)


def test_a_response_is_correct_when_every_named_term_is():
    both = group([200, 300], [1, 1], format=0.5)
    assert values(shortest_correct(both, correct=("acc",))) == [1, 0]
    assert values(shortest_correct(both, correct=("acc", "format"))) == [0, 0]
    assert values(shortest_correct(both, correct=("acc", "format"), threshold=0.5)) == [1, 0]
    with pytest.raises(types.UserError, match="the term 'iou'.*task 'count': see acc"):
        shortest_correct(group([1], [1]), correct=("iou",))


def bound(**options):
    term = GroupRewardConfig.model_validate_json(json.dumps({"fn": "kimi", **options}))
    return BoundGroupReward(name="kimi", compute=partial(kimi_length, correct=CORRECT), options=term)


def test_a_term_is_named_beside_the_rewards_and_counts_in_the_total():
    before = group([100, 300], [1, 0])
    after = apply_group_rewards(before, 0, group_rewards=[bound(weight=0.2)])
    assert after.totals == pytest.approx((1.1, -0.1))
    assert after.scores[0].terms == {
        "acc": types.RewardValue(1.0, ""),
        "kimi": types.RewardValue(0.5, "100 tokens, 100 to 300 in the group"),
    }
    assert before.totals == (1.0, 0.0)
    assert apply_group_rewards(before, 0, group_rewards=[]) is before


def test_a_group_reward_skips_groups_outside_its_conditions():
    before = group([100, 300], [1, 0], meta={"source": "clevr", "level": 2})
    for when in ({"task": ["ocr"]}, {"task": ["count"], "source": ["geo"]}, {"colour": ["red"]}):
        assert apply_group_rewards(before, 0, group_rewards=[bound(when=when)]) is before
    when = {"task": ["ocr", "count"], "level": ["2"]}
    assert apply_group_rewards(before, 0, group_rewards=[bound(when=when)]).totals == (1.5, -0.5)
    empty = replace(before, rollouts=(), scores=())
    assert apply_group_rewards(empty, 0, group_rewards=[bound()]) is empty


def test_a_schedule_changes_the_weight_and_never_the_value():
    before = group([100, 300], [1, 0])
    warmed = bound(weight=0.2, schedule={"points": [[0, 0.0], [10, 1.0]]})
    steps = [apply_group_rewards(before, step, group_rewards=[warmed]) for step in (0, 5, 10, 99)]
    assert [after.totals[0] for after in steps] == pytest.approx([1.0, 1.05, 1.1, 1.1])
    assert {after.scores[0].terms["kimi"].value for after in steps} == {0.5}


QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
KIMI = "{fn: 'mmrl.algo.group_rewards:kimi_length', weight: 0.2, args: {correct: [count]}, when: {task: [count]}}"


def configured(terms):
    return load_config(QUICKSTART, [f"rewards.group_rewards=[{terms}]"])


def build_group_rewards(config, folder):
    """Return the group rewards of a config as a run calls them."""
    loaded = load_group_rewards(config, folder, load_reward_terms(config, folder))
    return isolate_group_rewards(loaded, config.rewards, folder)


def test_group_rewards_are_built_from_a_config():
    loaded = configured(KIMI)
    (term,) = build_group_rewards(loaded.config, QUICKSTART.parent)
    assert (term.name, term.options.weight, term.options.when) == ("kimi_length", 0.2, {"task": ("count",)})
    right = group([100, 300], [1, 1])
    named = replace(
        right, scores=tuple(types.Score(terms={"count": types.RewardValue(1.0, "")}, total=1.0) for _ in right.scores)
    )
    assert values(term.compute(named)) == [0.5, -0.5]


def test_the_rewards_that_a_term_reads_must_be_there_before_the_first_step():
    loaded = configured(KIMI.replace(", when: {task: [count]}", ""))
    terms, scorer = (make(loaded.config, QUICKSTART.parent) for make in (build_group_rewards, build_scorer))
    counting = group([1], [1]).prompt.sample
    check_group_rewards(terms, scorer, [counting])
    with pytest.raises(
        types.UserError, match="'kimi_length' reads the term 'count', which does not apply to sample 's' of"
    ):
        check_group_rewards(terms, scorer, [counting, replace(counting, task="read")])


def test_advantages_per_term_weigh_group_terms_too():
    loaded = configured(KIMI)
    scorer, terms = (make(loaded.config, QUICKSTART.parent) for make in (build_scorer, build_group_rewards))
    assert reward_weights(scorer, terms) == {"count": 1.0, "iou": 1.0, "read": 1.0, "kimi_length": 0.2}
    scheduled = KIMI.replace("weight", "schedule: {points: [[0, 1]]}, weight")
    with pytest.raises(types.UserError, match="kimi_length has a schedule, which that would ignore"):
        load_config(QUICKSTART, [f"rewards.group_rewards=[{scheduled}]", "stages.1.advantage.combine=per_term"])


OUTCOMES = """
import os
import time
from mmrl.types import RewardValue

def mine(group, *, outcome: str):
    if outcome == "hang":
        while True:
            pass
    if outcome == "allocate":
        held = []
        while len(held) < 200:
            held.append(b"x" * 2**24)
        time.sleep(600)
    if outcome == "exit":
        os._exit(3)
    if outcome == "raise":
        raise ValueError("on purpose")
    if outcome == "nothing":
        return None
    if outcome == "numbers":
        return [0.5 for _ in group.rollouts]
    if outcome == "nan":
        return [RewardValue(float("nan"), "") for _ in group.rollouts]
    return [RewardValue(0.5, str(os.getpid())) for _ in group.rollouts]
"""


def apply_custom_reward(folder, outcome, *others, **rewards):
    """Apply a group reward of the user's own to a group of two; it runs in a worker unless `rewards` say otherwise."""
    (folder / "mine.py").write_text(OUTCOMES)
    settings = {"timeout_s": 2.0 if outcome == "hang" else 60.0, "worker_limits": {"memory_mib": 512}, **rewards}
    overrides = [f"rewards.{key}={json.dumps(value)}" for key, value in settings.items()]
    reward = f"{{fn: './mine.py:mine', args: {{outcome: {outcome}}}}}"
    config = load_config(QUICKSTART, [f"rewards.group_rewards=[{reward}]", *overrides]).config
    (made,) = build_group_rewards(config, folder)
    with closing(made) as term:
        return apply_group_rewards(group([1, 2], [1, 0]), 0, group_rewards=[term, *others])


@pytest.mark.parametrize(("outcome", "kind"), [("hang", "timeouts"), ("allocate", "limits"), ("exit", "crashes")])
def test_a_group_is_dropped_if_its_reward_hangs_exits_or_takes_too_much(tmp_path, outcome, kind):
    after = apply_custom_reward(tmp_path, outcome, bound())
    assert (after.rollouts, after.scores) == ((), ())
    assert [skip.failures["mine"].kind for skip in after.dropped] == [kind, kind]


LOOKING = """
from mmrl import Group, RewardValue

def redness(group: Group) -> list[RewardValue]:
    red = float(group.prompt.sample.image(0)[..., 0].mean()) / 255
    return [RewardValue(red, "how red the picture is")] * len(group.rollouts)
"""


@pytest.mark.parametrize("place", ["worker", "main_process"])
def test_a_group_reward_may_look(tmp_path, place, capsys):
    (tmp_path / "look.py").write_text(LOOKING)
    Image.new("RGB", (4, 4), (51, 0, 0)).save(tmp_path / "a.png")
    overrides = ["rewards.group_rewards=[{fn: './look.py:redness'}]", f"rewards.custom_rewards={place}"]
    config = load_config(QUICKSTART, overrides).config
    loaded = load_group_rewards(config, tmp_path, load_reward_terms(config, tmp_path))
    opener = PixelReader(types.MediaPolicy(roots=(tmp_path.resolve(),)))
    (term,) = isolate_group_rewards(loaded, config.rewards, tmp_path, opener)
    before = group([1, 2], [1, 0])
    digest = hashlib.sha256((tmp_path / "a.png").read_bytes()).hexdigest()
    for name, totals in (("a.png", (1.2, 0.2)), ("b.png", ())):
        ref = types.ImageRef(path=str(tmp_path / name), sha256=digest)
        sample = replace(before.prompt.sample, parts=(ref, "How red?"))
        with closing(term):
            seen = replace(before, prompt=replace(before.prompt, sample=sample))
            after = apply_group_rewards(seen, 0, group_rewards=[term])
        assert after.totals == pytest.approx(totals)
    # A picture that cannot be opened is an abstention, and counted.
    assert [skip.failures["redness"].kind for skip in after.dropped] == ["unscorable"] * 2
    assert main(["reward", "lint", f"{tmp_path}/look.py:redness"]) == 2
    assert "name it in `rewards.group_rewards`" in capsys.readouterr().err


def test_a_group_without_values_can_count_0_or_end_the_run(tmp_path):
    after = apply_custom_reward(tmp_path, "exit", on_missing_score="fallback")
    assert after.totals == (1.0, 0.0)
    assert [score.failures["mine"].kind for score in after.scores] == ["crashes", "crashes"]
    with pytest.raises(types.UserError, match="group reward 'mine' on sample 's': its process died"):
        apply_custom_reward(tmp_path, "exit", on_missing_score="stop")


@pytest.mark.parametrize("place", ["worker", "main_process"])
def test_an_error_is_named_with_its_sample_and_line(tmp_path, place):
    message = r"^group reward 'mine' on sample 's': .*'./mine.py:mine'.* ValueError: on purpose .*mine.py:18"
    with pytest.raises(types.UserError, match=message):
        apply_custom_reward(tmp_path, "raise", custom_rewards=place)


@pytest.mark.parametrize("place", ["worker", "main_process"])
@pytest.mark.parametrize(
    ("outcome", "shown"), [("nothing", "None"), ("numbers", "0.5"), ("nan", r"RewardValue\(value=nan, reason=''\)")]
)
def test_what_is_no_finite_value_ends_the_run_with_the_sample(tmp_path, place, outcome, shown):
    message = f"group reward 'mine', sample s: {shown} is not a RewardValue with a finite number"
    with pytest.raises(types.UserError, match=message):
        apply_custom_reward(tmp_path, outcome, custom_rewards=place, on_missing_score="fallback")


def test_custom_rewards_can_run_in_this_process(tmp_path):
    for place, elsewhere in (("worker", True), ("main_process", False)):
        after = apply_custom_reward(tmp_path, "return", custom_rewards=place)
        assert (after.scores[0].terms["mine"].reason != str(os.getpid())) is elsewhere


@pytest.mark.parametrize(
    ("terms", "complaint"),
    [
        ("{fn: 'mmrl.algo.group_rewards:kimi_lenght'}", "did you mean 'kimi_length'"),
        ("{fn: 'mmrl.algo.group_rewards:kimi_length'}", "needs the option 'correct'"),
        ("{fn: 'mmrl.algo.group_rewards:kimi_length', args: {correct: []}}", "at least 1 item"),
        ("{fn: 'mmrl.algo.group_rewards:kimi_length', args: {correct: [cuont]}}", "there is no reward term 'cuont"),
        ("{fn: 'mmrl.algo.group_rewards:majority_vote', args: {share: 2}}", "less than or equal to 1"),
        ("{fn: 'mmrl.algo.group_rewards:majority_vote', name: count}", "two reward terms are named 'count'"),
        (f"{KIMI}, {KIMI}", "two reward terms are named 'kimi_length'"),
    ],
)
def test_invalid_group_rewards_are_refused(terms, complaint):
    with pytest.raises(types.UserError, match=complaint):
        build_group_rewards(configured(terms).config, QUICKSTART.parent)


def test_a_group_reward_returns_a_value_for_each_rollout():
    short = replace(bound(), name="short", compute=lambda group: [types.RewardValue(1.0, "")])
    with pytest.raises(
        types.UserError, match="group reward 'short', sample s: 1 values for 2 rollouts; return one for each"
    ):
        apply_group_rewards(group([1, 2], [1, 0]), 0, group_rewards=[short])

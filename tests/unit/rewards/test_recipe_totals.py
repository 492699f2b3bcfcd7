"""Totals of recipes: published numbers by the terms that their files list, and mixtures that a tool prints for them."""

import importlib.util
import json
import math
from contextlib import closing
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from factories import make_context, make_group, make_prompt, make_rollout, make_sample, make_score
from ruamel.yaml import YAML
from scoring import constant, make_scorer, rollout, scored
from serving import judging, reply, served

from mmrl.algo.advantages import compute_advantages
from mmrl.algo.losses import estimate_kl
from mmrl.algo.reward_history import measure_samples
from mmrl.algo.select_experiences import rejection_reason
from mmrl.config import load_config
from mmrl.policy.build import build_response_format
from mmrl.scoring.build import load_reward_terms
from mmrl.scoring.group_reward_calls import apply_group_rewards, load_group_rewards
from mmrl.types import AnswerType, CoordinateSystem, FinishReason, ImageRef, Region, SampleStats, Segment, Turn
from mmrl_datasets.environments.frames import make
from mmrl_datasets.readers import table
from mmrl_rewards.contract import bind
from mmrl_rewards.services.judge import sigmoid

ROOT = Path(__file__).parents[3]
BOX = [0, 0, 10, 10]
PLACE = dict(parts=(ImageRef(path="a.png", sha256=""), "Where?"), coordinate_system=CoordinateSystem.PX_RESIZED)


@pytest.fixture
def read_recipe(tmp_path):
    """Read a recipe, with overrides; its data are in a folder that is empty."""

    def read(name, *overrides):
        return load_config(name, [f"data.dir={tmp_path}", *overrides]).config

    return read


def total(config, text, sample, values=None, **fields):
    """The total of a response by the terms of a config; those that `values` names have these values."""
    terms = {term.name: term for term in load_reward_terms(config, Path())}
    for name, value in (values or {}).items():
        terms[name] = replace(terms[name], reward=bind(constant(value, name=name, low=-1.0), {}))
    response = replace(rollout(text, sample, grammar=build_response_format(config)), **fields)
    with closing(make_scorer(*terms.values())) as scorer:
        return scored(scorer, response).total


def group_of(scores, lengths=None, probes=None, **sample):
    """Responses with these scores, as long as `lengths` says, in tokens."""
    prompt = make_prompt(make_sample(**sample))
    lengths = lengths or [2] * len(scores)
    rollouts = [make_rollout(prompt, index, num_tokens=length) for index, length in enumerate(lengths)]
    return make_group(prompt, rollouts, [make_score(**score) for score in scores], probes=probes or {})


def group_totals(config, group, step=0):
    """The totals of a group with what the group rewards of a config add."""
    rewards = load_group_rewards(config, Path(), load_reward_terms(config, Path()))
    return apply_group_rewards(group, step, group_rewards=rewards).totals


def tagged(thought, answer):
    return f"<think>{thought}</think><answer>{answer}</answer>"


TWO, SECOND_IMAGE = make_sample(2, task="count"), make_sample([2], AnswerType.LIST)
BETTER, WORSE = (tagged("Image 1: 8. Image 2: 6.", f"Image {number} is better") for number in (1, 2))
IMAGE_1 = make_sample("Image 1 is better", AnswerType.TEXT)


@pytest.mark.parametrize(
    ("name", "text", "sample", "expected"),
    [
        # The inverse cube of the rank, and the format.
        ("mm_r5", tagged("Image 1: no.", "[2, 1, 3, 4, 5]"), SECOND_IMAGE, 2.0),
        ("mm_r5", tagged("Image 1: no.", "[1, 2, 3, 4, 5]"), SECOND_IMAGE, 1.125),
        ("mm_r5", tagged("Image 1: no.", "[5, 4, 3, 1, 2]"), SECOND_IMAGE, 1.008),
        ("mm_r5", tagged("Image 1: no.", "[1, 3]"), SECOND_IMAGE, 1.0),
        # Its accuracy_reward takes a bare text for the answer; here it must be in its tags.
        ("unified_reward_think", BETTER, IMAGE_1, 2.0),
        ("unified_reward_think", WORSE, IMAGE_1, 1.0),
        ("unified_reward_think", "<answer>Image 1 is better</answer>", IMAGE_1, 1.0),
        ("unified_reward_think", "Image 1 is better", IMAGE_1, 0.0),
        # 0.5 format + accuracy (1 + 0.5 consistency): math_verifier_mllm.py of R1-Reward at commit 3693413.
        ("r1_reward", tagged("Response 2 is better.", 2), make_sample(2, task="judge"), 2.0),
        ("r1_reward", tagged("Response 1 is better.", 2), make_sample(2, task="judge"), 1.0),
        ("r1_reward", tagged("Response 1 is better.", 1), make_sample(2, task="judge"), 0.5),
        ("video_reward_bench", tagged("So 2.", 2), make_sample(2), 2.0),  # as R1-Reward
        ("video_reward_bench", tagged("So 1.", 2), make_sample(2), 1.0),
        ("video_reward_bench", tagged("So 1.", 1), make_sample(2), 0.5),
        ("r1_v", "<think>One, two.</think>\n<answer> 2 </answer>", TWO, 2.0),
        ("r1_v", "<answer>2</answer>", TWO, 1.0),
        ("r1_v", tagged("One.", 1), TWO, 1.0),
        ("ton", "<answer>2</answer>", TWO, 2.0),
    ],
)
def test_total_of_a_response(read_recipe, name, text, sample, expected):
    assert total(read_recipe(name), text, sample) == pytest.approx(expected)


def test_base_reward_pays_1_for_the_answer_and_the_sigmoid_of_a_score_otherwise(read_recipe):
    """Section 5.4.1: R(y) = 1 if y matches, else sigmoid(score(y)), here less the score of the reference."""
    scores = {"B": 0.5}
    with served(lambda handler, body: reply(handler, {"score": scores.get(body["response"], 2.0)})) as (url, requests):
        service = (f"rewards.terms.model.args.scorer.url={url}", "rewards.terms.model.args.images=false")
        config = read_recipe("base_reward", *service)
        sample = make_sample("B", AnswerType.TEXT, parts=("Which?",))
        assert total(config, tagged("Hm.", "B"), sample) == 1.0 and requests == []
        assert total(config, tagged("Hm.", "C"), sample) == pytest.approx(sigmoid(2.0 - 0.5))
        assert total(config, "No idea.", sample) == pytest.approx(sigmoid(2.0 - 0.5))
    assert requests[0][0]["response"] == tagged("Hm.", "C")


@pytest.mark.parametrize(
    ("look", "structure", "expected"), [(0.61, 0.89, 1.0), (0.61, 0.91, 2.0), (0.59, 0.91, 1.0), (0.5, 0.5, 0.0)]
)
def test_table2latex(read_recipe, look, structure, expected):
    values = {"look": look, "structure": structure}
    target = make_sample("x", AnswerType.TEXT)
    assert total(read_recipe("table2latex"), "<answer>x</answer>", target, values) == expected


def test_table2latex_on_tables(read_recipe):
    config = read_recipe("table2latex")
    table = r"\begin{tabular}{lc} A & 1 \\ B & 2 \\ C & 3 \\ D & 4 \end{tabular}"
    sample = make_sample(table, AnswerType.TEXT)
    assert total(config, f"<answer>{table}</answer>", sample) == 2.0
    assert total(config, f"<answer>{table.replace('4', '7')}</answer>", sample) == 2.0  # texts are not structure
    assert total(config, r"<answer>\begin{tabular}{l} A \end{tabular}</answer>", sample) == 0.0
    assert total(config, "<answer>no table</answer>", sample) == 0.0


FRAME_TURNS = {
    "time": "<think>When?</think><action>get frame number at time 00:30</action>",
    "look": "<think>From 250 to 350.</think><action>choose frames between 250 and 350</action>",
    "vague": "<think>Closer.</think><action>choose frames between 250 and 350</action>",
    "right": "<think>So.</think><action>output answer: B</action>",
    "wrong": "<think>So.</think><action>output answer: A</action>",
}


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("time look right", 1.52),  # correct, with frames and a time that the question names
        ("time look wrong", 0.0),
        ("time vague right", 0.0),  # a broken rule
        ("time right", 0.0),
        ("look look right", 0.0),
        ("look right", 1.02),
        ("right", 1.0),
    ],
)
def test_frame_thinker(read_recipe, turns, expected):
    meta = {"extra_info": {"fps": 10, "total_frames": 2000, "question": "What happens at 0:30?"}}
    sample = replace(make_sample("B", AnswerType.CHOICE), meta=meta)
    episode, taken = make(), []
    episode.reset(sample, 0)
    for name in turns.split():
        result = episode.step(FRAME_TURNS[name])
        taken.append(
            Turn(action="", state="", terminated=result.terminated, valid=result.valid, info=dict(result.info))
        )
        if result.terminated:
            break
    text = "".join(FRAME_TURNS[name] for name in turns.split())
    assert total(read_recipe("frame_thinker"), text, sample, turns=tuple(taken)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("label", "grade", "expected"),
    [("Desktop", 0.8, 1.4), ("desktop", 0.0, 1.0), ("Laptop", 1.0, 0.1), (None, 1.0, 0.0)],
)
def test_time_master(read_recipe, label, grade, expected):
    """0.9 accuracy + 0.1 format, and where it is correct 0.5 of the judge's grade."""
    text = "<think>Flat.</think>" + (f"<class>{label}</class>" if label else "") + "<extension>Check it.</extension>"
    sample = make_sample("Desktop", AnswerType.TEXT)
    assert total(read_recipe("time_master"), text, sample, {"extension": grade}) == pytest.approx(expected)


def tube(*times, box=BOX):
    return json.dumps([{"time": time, "bbox_2d": box} for time in times])


@pytest.mark.parametrize(
    ("time", "thought", "answer", "expected"),
    [
        ([1, 4], tube(1, 2, 3, 4), tube(1, 2, 3, 4), 5.0),
        ([1, 4], tube(1, 2, 3, 4, box=[0, 0, 5, 10]), tube(1, 2, 3, 4), 4.5),  # the thought's IoU is a half
        ([1, 2], tube(1, 2), tube(1, 2), 0.5 + 0.5 + 0.5 + 1 + 1),
        ([1, 4], tube(1, 2, 3, 4), tube(1, 2), 1 + 0.5 + 1 + 0 + 1),  # two seconds have no box in the answer
        ([8, 9], tube(8, 9), tube(8, 9), 0 + 0 + 0 + 1 + 1),
    ],
)
def test_stvg_o1(read_recipe, time, thought, answer, expected):
    """Temporal, spatial, think, consistency and format rewards, each with weight 1."""
    sample = make_sample(json.loads(tube(1, 2, 3, 4)), AnswerType.JSON, **PLACE)
    text = f"<time>{time}</time><think_bbox>{thought}</think_bbox><pred_bbox>{answer}</pred_bbox>"
    assert total(read_recipe("stvg_o1"), text, sample) == pytest.approx(expected)


@pytest.mark.parametrize(("correct", "length", "expected"), [(1.0, 0.75, 2.65), (0.0, 0.0, 0.9)])
def test_vlm_r1_math(read_recipe, correct, length, expected):
    """Accuracy, format, length and repetition count the same."""
    values = {"accuracy": correct, "length": length, "repetition": -0.1}
    text = "<think>Half.</think><answer>0.5</answer>"
    assert total(read_recipe("vlm_r1_math"), text, make_sample("0.5", AnswerType.LATEX), values) == expected


RIGHT, WRONG, NOTHING = {"accuracy": 1, "format": 0.5}, {"accuracy": 0, "format": 0.5}, {"accuracy": 0, "format": 0}


@pytest.mark.parametrize(("right", "of", "weight"), [(1, 8, 0.7875), (1, 2, 1.8), (2, 2, 0.0), (0, 8, 0.0)])
def test_observe_r1_weighs_groups_by_their_difficulty(read_recipe, right, of, weight):
    """4 x 1.8 p (1 - p) times the reward less its mean, over its deviation with N - 1 and 1e-9 added."""
    options = read_recipe("observe_r1").stages[0].advantage
    totals = [1.5] * right + [0.5] * (of - right)
    (got,) = compute_advantages([group_of([RIGHT] * right + [WRONG] * (of - right))], options, {})
    mean = sum(totals) / of
    deviation = math.sqrt(sum((total - mean) ** 2 for total in totals) / (of - 1))
    assert got == pytest.approx([weight * (total - mean) / (deviation + 1e-9) for total in totals])


@pytest.mark.parametrize(
    ("lengths", "expected"), [((120, 90, 50, 60), [1.5, 1.5, 0.5, 0.0]), ((120, 101, 50, 60), [1.5, 1.7, 0.5, 0.0])]
)
def test_observe_r1_pays_for_the_shortest_correct_response_of_more_than_100_tokens(read_recipe, lengths, expected):
    group = group_of([RIGHT, RIGHT, WRONG, NOTHING], lengths)
    assert group_totals(read_recipe("observe_r1"), group) == pytest.approx(expected)


def test_ui_r1_e_pays_by_the_length_budget_of_its_group(read_recipe):
    """Half are correct: the budget is (150 + 400) / 2 = 275 tokens."""
    right, wrong = {"action": 1, "place": 1, "format": 1}, {"action": 1, "place": 0, "format": 1}
    group = group_of([right, right, wrong, wrong], (100, 200, 300, 400))
    totals = group_totals(read_recipe("ui_r1_e"), group)
    assert totals == pytest.approx([3.8182, 3.6364, 1.9, 1.9], abs=1e-4)


@pytest.mark.parametrize(("shuffled", "bonus"), [([1, 1, 1, 1, 1, 0, 0, 0], 0.3), ([1, 1, 1, 1, 1, 1, 0, 0], 0.0)])
@pytest.mark.parametrize(("task", "term"), [("multiple choice", "choice"), ("numerical", "number")])
def test_video_r1_compares_its_frames_with_shuffled_ones(read_recipe, shuffled, bonus, task, term):
    """Half are correct: 0.5 is 0.8 x 0.625, and less than 0.8 x 0.75."""
    probes = {"shuffled": tuple(make_score(**{term: value}) for value in shuffled)}
    group = group_of([{term: 1}, {term: 0}], probes=probes, task=task, meta={"data_type": "video"})
    assert group_totals(read_recipe("video_r1"), group) == pytest.approx([1 + bonus, 0.0])


def test_vlm_r1_ovd_divides_average_precision_by_superfluous_boxes(read_recipe):
    """Two hits of IoU 0.87 count at eight of ten thresholds: 0.8 x 2 targets / 5 answers, and the format."""
    targets = tuple(Region(box, "cup") for box in ((0, 0, 20, 100), (30, 0, 50, 100)))
    found = [[0, 0, 20, 87], [30, 0, 50, 87], [60, 0, 70, 9], [60, 20, 70, 29], [60, 40, 70, 49]]
    sample = make_sample(targets, AnswerType.BOXES, **PLACE)
    answer = json.dumps([{"bbox_2d": box, "label": "cup"} for box in found])
    text = f"<think>There.</think><answer>{answer}</answer>"
    assert total(read_recipe("vlm_r1_ovd"), text, sample) == pytest.approx(1 + 0.32)


def test_seed_bench_r1_clamps_the_log_ratio_of_its_kl(read_recipe):
    kl = read_recipe("seed_bench_r1").stages[0].loss.kl
    logp, ref = torch.tensor([-21.0, -0.5]), torch.tensor([-1.0, -0.5])
    estimates = estimate_kl(logp, ref, kl.estimator, log_ratio_clip=kl.log_ratio_clip).tolist()
    assert estimates == pytest.approx([math.exp(11) - 11 - 1, 0.0])


@pytest.mark.parametrize(("length", "expected"), [(16384, 2.0), (18432, 1.5), (20480, 1.0)])
def test_dapo_fines_long_responses_of_any_recipe(read_recipe, length, expected):
    config = read_recipe("r1_v", "overlays=[dapo]")
    segment = Segment(token_ids=(5,) * length, logprobs=(-1.0,) * length, author="policy")
    text = "<think>One, two.</think><answer>2</answer>"
    assert total(config, text, make_sample(2), segments=(segment,)) == pytest.approx(expected)


def test_dapo_drops_a_group_that_differs_in_its_format_alone(read_recipe):
    options = read_recipe("r1_v", "overlays=[dapo]").stages[0].dynamic_sampling
    alike = [{"accuracy": 1, "format": form} for form in (0, 1, 1, 0)]
    assert rejection_reason(group_of(alike), options) == "accuracy"
    assert rejection_reason(group_of([*alike, NOTHING]), options) is None


def test_par_pays_half_for_an_answer_that_is_as_good_as_the_reference(read_recipe):
    with served(lambda handler, body: reply(handler, {"score": 1.25})) as (url, _):
        config = read_recipe("r1_v", "overlays=[par]", f"rewards.terms.par.args.scorer.url={url}")
        text = "<think>One, two.</think><answer>2</answer>"
        assert total(config, text, make_sample(2), {"format": 0.0}) == 0.5


def test_limr_keeps_a_sample_whose_curve_is_the_mean_one(read_recipe):
    stages = {stage.name: stage for stage in read_recipe("r1_v", "overlays=[limr]").stages}
    select = stages["limr_best"]
    curves = {"low": (0.0, 0.25, 0.5), "mean": (0.25, 0.5, 0.75), "high": (0.5, 0.75, 1.0)}
    history = {name: [SampleStats(value, 0.0) for value in curve] for name, curve in curves.items()}
    assert measure_samples(history, select.metric)["mean"] == 1.0 >= select.range[0]


def test_a_mixture_that_pilots_predict_is_laid_over_modomodo(read_recipe, tmp_path, capsys):
    """Pilots score 1 - |w - best|^2 and name the recipe's sources; the printed weights become the recipe's."""
    spec = importlib.util.spec_from_file_location("mixture", ROOT / "tools/mixture.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    names = [source.name for source in read_recipe("modomodo").data.train]
    assert [source.weight for source in read_recipe("modomodo").data.train] == [0.2] * 5
    best = dict(zip(names, (0.1, 0.1, 0.3, 0.2, 0.3), strict=True))
    mixtures = [{name: 1.0} for name in names]
    mixtures += [{a: 1.0, b: 1.0} for a, b in combinations(names, 2)]
    mixtures += [{name: 1.0 + (name == other) for name in names} for other in names]
    pilots = []
    for weights in mixtures:
        shares = {name: weights.get(name, 0.0) / sum(weights.values()) for name in names}
        pilots.append({"weights": weights, "score": 1 - sum((shares[name] - best[name]) ** 2 for name in names)})
    (tmp_path / "pilots.jsonl").write_text("\n".join(map(json.dumps, pilots)))
    assert tool.main([str(tmp_path / "pilots.jsonl")]) == 0
    printed = [line.split(": weight ") for line in capsys.readouterr().out.splitlines() if ": weight " in line]
    overrides = [f"data.train.{name.strip()}.weight={share}" for name, share in printed]
    mixed = {source.name: source.weight for source in read_recipe("modomodo", *overrides).data.train}
    assert mixed == pytest.approx(best, abs=0.002)


@pytest.mark.parametrize(
    ("right", "expected"), [([1, 1, 1], [1.5, 1.0, 0.5]), ([0, 1, 1], [0.0, 1.0, 0.5]), ([1, 1, 0], [1.5, 1.0, -0.5])]
)
def test_kimi_k1_5_pays_for_length_once_the_first_stage_is_over(read_recipe, right, expected):
    """2.3.3: 0.5 for the shortest right response, -0.5 for the longest, 0 for a short wrong one."""
    config = read_recipe("kimi_k1_5")
    group = group_of([{"accuracy": value} for value in right], (100, 200, 300), value="2", answer_type=AnswerType.LATEX)
    stages = {stage.name: stage for stage in config.stages}
    assert stages["easy_to_hard"].steps == 100
    assert group_totals(config, group, step=99) == tuple(map(float, right))
    assert group_totals(config, group, step=100) == pytest.approx(expected)


def test_the_better_reply_of_a_pair_is_where_the_answer_says(read_recipe, tmp_path):
    """In the training pairs and in the benchmark, and in both places."""
    config = read_recipe("video_reward_bench")
    tables = YAML(typ="safe").load(ROOT / "tests/data/recipe_rows/video_reward_bench.yaml")["files"]
    for source, rows in zip([*config.data.train, *config.data.test], tables.values(), strict=True):
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = {"answer_type": "number", "prompt": source.args["prompt"]}
        columns = {"answer": source.args["columns"]["answer"]}
        samples = list(table.rows(make_context(tmp_path), path="pairs.jsonl", columns=columns, **options))
        for sample, row in zip(samples, rows, strict=True):
            question = "".join(part for part in sample.parts if isinstance(part, str))
            is_first = question.index(row["chosen"]) < question.index(row["rejected"])
            assert sample.target.value == (1 if is_first else 2)
        assert {sample.target.value for sample in samples} == {1, 2}


@pytest.mark.parametrize(
    ("waits", "box", "rethought", "expected"),
    [
        (0, 3, False, 1.0),
        (1, 3, False, 1.1),
        (2, 3, False, 1.1),
        (3, 3, False, 0.4),
        (5, 3, False, 0.0),
        (6, 3, False, -0.1),
        (9, 3, False, -0.1),
        (0, 3, True, 1.0),
        (2, 3, True, 1.0),
        (4, 3, True, 1.0),
        (0, 4, False, 0.0),
        (2, 4, False, 0.0),
        (2, 4, True, 0.0),
        (0, None, False, -0.1),
        (2, None, True, -0.1),
    ],
)
def test_vl_rethinker_pays_by_the_ladder_of_its_code(read_recipe, waits, box, rethought, expected):
    """experience_maker.py:1327-1345 at commit dd2c17d: the ladder is for responses that were not forced to rethink."""
    words = "".join(f"Wait, look at number {number} of them again. " for number in range(waits))
    text = f"There are some. {words}" + (rf"So \boxed{{{box}}}" if box else "So three.")
    parent = {"parent_index": 0} if rethought else {}
    sample = make_sample("3", AnswerType.LATEX, task="maths")
    assert total(read_recipe("vl_rethinker"), text, sample, **parent) == pytest.approx(expected)


@pytest.mark.parametrize("words", ["So ", "Wait, look again. So "])
@pytest.mark.parametrize("answer", [r"\boxed{3}", r"\boxed{4}", "three."])
def test_vl_rethinker_fines_a_response_that_was_cut_once_whatever_it_answers(read_recipe, words, answer):
    """experience_maker.py:769 at commit dd2c17d: without an end token, a response is invalid and earns -0.1."""
    sample = make_sample("3", AnswerType.LATEX, task="maths")
    assert total(
        read_recipe("vl_rethinker"), words + answer, sample, finish_reason=FinishReason.LENGTH
    ) == pytest.approx(-0.1)


SEARCH = Turn(action="<search>a</search>", state="", info={"relevant": 0.0})
FOUND = Turn(action="<search>b</search>", state="", info={"relevant": 1.0})
LOOK = Turn(action="<bbox>[1, 2, 3, 4]</bbox>", state="")


@pytest.mark.parametrize(
    ("turns", "opinion", "expected"),
    [
        ((FOUND, LOOK), 1, 1.0),
        ((SEARCH, FOUND), 1, 0.8 + 0.2 * 0.63093),
        ((SEARCH, SEARCH, FOUND), 1, 0.9),  # NDCG 1 / log2(4)
        ((SEARCH, SEARCH, FOUND), 0, 0.2),
        ((), 1, 0.0),
        ((LOOK,), 1, 0.0),
    ],
)
def test_vrag_pays_nothing_without_a_search(read_recipe, turns, opinion, expected):
    """rm.py at commit 24f8d05: 0.7 judge + 0.1 format + 0.2 NDCG, if the format has a search and an answer."""
    searched = float(any("relevant" in turn.info for turn in turns))
    last = Turn(action="<answer>52</answer>", state="", terminated=True, info={"searched": searched})
    meta = {"meta_info": {"file_name": "a.pdf", "reference_page": [5]}}
    sample = make_sample("52 euro", AnswerType.TEXT, task="pages", meta=meta)
    with served(judging(lambda _: {"score": opinion})) as (url, _):
        judge = f"rewards.terms.accuracy.args.judge.url={url}"
        got = total(read_recipe("vrag_rl", judge), "<answer>52</answer>", sample, turns=(*turns, last))
    assert got == pytest.approx(expected, abs=1e-5)


def test_an_episode_of_vrag_that_a_limit_cut_short_earns_nothing(read_recipe):
    sample = make_sample("52", AnswerType.TEXT, task="pages", meta={"meta_info": {"reference_page": [5]}})
    assert total(read_recipe("vrag_rl"), "<search>a</search>", sample, turns=(replace(FOUND, truncated=True),)) == 0.0

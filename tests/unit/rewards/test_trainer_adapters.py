"""Rewards in other trainers: each called with the arguments that the trainer passes, and the settings they share."""

import inspect
import logging
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.types import AnswerType, RewardValue, Unscorable, UserError
from mmrl_rewards import reward, target_value
from mmrl_rewards.adapters import (
    EasyR1Reward,
    OpenRlhfReward,
    SwiftReward,
    TextReward,
    TrlReward,
    VerifiersReward,
    VerlReward,
)

RIGHT, WRONG = "<think>one, two, three</think><answer>3</answer>", "<answer>4</answer>"
TRAINER_ADAPTERS = (TrlReward, SwiftReward, VerlReward, EasyR1Reward, OpenRlhfReward, VerifiersReward)


@reward(name="looks", answer_types=(AnswerType.TEXT,))
def looks(response, sample) -> RewardValue:
    """Return the share of red in the first pixel, and judge no answer."""
    red = int(sample.image(0)[0, 0, 0])
    return RewardValue(red / 255, f"{red} of 255 in {sample.parts[-1]!r}")


@reward(name="row", answer_types=(AnswerType.TEXT,), low=-1.0)
def row_length(response, sample, *, column: str) -> RewardValue:
    """Return the length of the response by the length that the row states, or abstain where it states 0."""
    target_value(sample, AnswerType.TEXT)
    if not sample.meta[column]:
        raise Unscorable("the row states no length")
    return RewardValue(response.num_tokens / sample.meta[column], sample.parts[-1])


@reward(name="wild", judges_answer=False)
def wild(response, sample) -> float:
    """Return a value that is out of range."""
    return 7.0


@reward(name="clash", judges_answer=False)
def clash(response, sample, *, opening: str = "") -> float:
    """Return nothing of use."""
    return 0.0


# TRL 1.16, trl/trainer/grpo_trainer.py: GRPOTrainer._calculate_rewards


def call_trl(adapter, completions, metrics=None, **columns):
    extra = {"trainer_state": object(), "log_extra": print, "log_metric": (metrics or {}).__setitem__}
    if metrics is not None:
        extra["log_metric"] = metrics.__setitem__
    ids = [[1] * 4 for _ in completions]
    prompts = ["How many?"] * len(completions)
    return adapter(prompts=prompts, completions=completions, completion_ids=ids, **columns, **extra)


def test_trl_gets_a_value_or_none_and_a_count_of_abstentions():
    metrics = {}
    values = call_trl(TrlReward("number:exact"), [RIGHT, WRONG, RIGHT], metrics, solution=["3", 3, "many"])
    assert values == [1.0, 0.0, None]
    assert metrics == {"unscorable/number": 1.0}


def test_trl_conversations_are_read_without_the_replies_of_tools():
    turns = [
        {"role": "assistant", "content": "Let me count.", "tool_calls": [{"name": "count"}]},
        {"role": "tool", "content": "<answer>3</answer>"},
    ]
    last = {"role": "assistant", "content": [{"type": "text", "text": WRONG}]}
    adapter = TrlReward("number:exact")
    assert call_trl(adapter, [turns, [*turns, last]], solution=[3, 4]) == [0.0, 1.0]


def test_trl_rows_give_columns_tokens_and_the_question():
    adapter = TrlReward(row_length, column="length", target="label")
    assert call_trl(adapter, ["a", "b"], label=["x", "y"], length=[8, 0], other=[1, 2, 3]) == [0.5, None]


@pytest.mark.slow
def test_trl_uses_the_name_of_the_reward():
    pytest.importorskip("trl")
    from trl.trainer.utils import get_callable_name

    assert get_callable_name(TrlReward("box:iou", coordinates="norm_1000")) == "iou"


def test_pictures_of_the_row_are_the_sample_s_and_are_read_only():
    red, grey = (Image.new("RGB", (2, 2), (level, 0, 0)) for level in (255, 51))
    adapter = TrlReward(looks)
    assert call_trl(adapter, ["a", "b"], solution=["x", "x"], image=[red, grey]) == [1.0, 0.2]
    assert call_trl(adapter, ["a", "b"], solution=["x", "x"], images=[[grey], []]) == [0.2, None]
    assert call_trl(adapter, ["a"], solution=["x"], images=[["/a/path.png"]]) == [None]


# ms-swift 4.6.0: swift/rl_core/grpo_algorithm.py, swift/rl_core/data.py (to_reward_row)


def test_swift_calls_an_entry_of_orms_and_gets_none_for_an_abstention():
    orms = {"row": lambda args=None: SwiftReward(row_length, column="length")}
    messages = [[{"role": "user", "content": "How?"}, {"role": "assistant", "content": "a"}]] * 2
    ids = [[[1, 2], [3]], [[1, 2, 3, 4]]]
    columns = {"messages": messages, "response_token_ids": ids, "solution": ["x"] * 2, "length": [6, 0]}
    assert orms["row"](args=object())(["a", "b"], trainer_state=None, **columns) == [0.5, None]


# verl 0.9.1, verl/experimental/reward_loop/reward_manager/naive.py


def test_verl_gets_a_score_and_an_abstention_flag():
    extra = {"index": 3, "num_turns": 1, "rollout_reward_scores": {}}
    call = {"data_source": "geo", "solution_str": RIGHT, "extra_info": extra}
    adapter = VerlReward("number:exact")
    assert adapter(ground_truth=np.int64(3), **call) == {"score": 1.0, "unscorable": 0.0}
    assert adapter(ground_truth="many", **call) == {"score": 0.0, "unscorable": 1.0}
    assert VerlReward("number:exact", fallback=0.5)(ground_truth="many", **call)["score"] == 0.5
    assert VerlReward(row_length, column="index")(ground_truth="", **call)["score"] == -1.0
    assert VerlReward("box:iou", coordinates="norm_1", image_size="size")(
        data_source="", solution_str="<answer>[0, 0, 1, 1]</answer>", ground_truth="[0, 0, 0.5, 1]",
        extra_info={"size": np.array([640, 480])},
    )["score"] == pytest.approx(0.5)  # fmt: skip


# EasyR1 at b44b311b, verl/workers/reward/function.py


def test_easyr1_gets_an_overall_score_for_each_input():
    inputs = [{"response": text, "response_length": 9, "ground_truth": "3"} for text in (RIGHT, WRONG)]
    inputs.append({"response": RIGHT, "response_length": 9, "ground_truth": "many"})
    scores = EasyR1Reward("number:exact")(inputs)
    assert scores == [{"overall": value, "unscorable": missing} for value, missing in ((1, 0), (0, 0), (0, 1))]
    assert EasyR1Reward("length:overlong", max_tokens=10, buffer=2)(inputs[:1])[0]["overall"] == -0.5


# OpenRLHF 0.11.2, openrlhf/utils/agent.py (SingleTurnAgentExecutor)


def test_openrlhf_gets_tensors_for_what_follows_the_prompt():
    question = "<|image_pad|>" + "How many red dots are in the picture that you see here above? " * 2 + "\nassistant\n"
    seen = "<|image_pad|>" * 3 + question.removeprefix("<|image_pad|>")
    queries = [seen + RIGHT + "<|im_end|>\n", seen + WRONG, question + RIGHT + "<|endoftext|>"]
    scores = OpenRlhfReward("number:exact")(queries, [question] * 3, ["3", "3", "many"])
    assert scores["rewards"].tolist() == scores["scores"].tolist() == [1.0, 0.0, 0.0]
    assert scores["extra_logs"]["unscorable"].tolist() == [0.0, 0.0, 1.0]
    assert torch.tensor([OpenRlhfReward("format:tags")(queries[:1], [question], [""])["rewards"]]) == 1.0
    with pytest.raises(UserError, match="does not contain the end"):
        OpenRlhfReward("number:exact")(["another"], [question], ["3"])


def test_openrlhf_reads_the_last_of_two_turns_with_equal_endings():
    suffix = " Think in <think> tags, then answer in <answer> tags.<|im_end|>\n<|im_start|>assistant\n"
    demonstration = f"<|im_start|>user\n1 + 1?{suffix}<answer>2</answer><|im_end|>\n"
    prompt = f"{demonstration}<|im_start|>user\n1 + 2?{suffix}"
    # The third response repeats the end of its prompt, so it has two answers.
    answers = [RIGHT, WRONG, RIGHT + suffix + RIGHT]
    queries = [f"{prompt}{answer}<|im_end|>" for answer in answers]
    scores = OpenRlhfReward("number:exact")(queries, [prompt] * 3, ["3"] * 3)
    assert scores["rewards"].tolist() == [1.0, 0.0, 0.0]


# verifiers 0.1.14, verifiers/rubrics/rubric.py (Rubric.score_objects)


def test_verifiers_gets_a_float_and_the_log_a_warning(caplog):
    adapter = VerifiersReward("number:exact", fallback=0.25)
    messages = [{"role": "assistant", "content": RIGHT}]
    given = {"prompt": [{"role": "user", "content": "How?"}], "state": {}, "parser": object(), "task": None}
    assert adapter(completion=messages, answer="3", info={"length": 2}, **given) == 1.0
    with caplog.at_level(logging.WARNING):
        values = [adapter(completion=RIGHT, answer="many", info="{}", **given) for _ in range(5)]
    assert values == [0.25] * 5
    assert adapter.num_unscorable == 5
    assert [record.args[1] for record in caplog.records] == [1, 2, 4]
    assert adapter.__name__ == "number"
    assert not {"prompts", "completions", "states"} & inspect.signature(adapter).parameters.keys()


# Settings


@pytest.mark.parametrize(
    ("ground_truth", "value"),
    [(3, 3), ("3", 3), (" 3 ", 3), ("<answer>3</answer>", 3), (np.float64(3.0), 3), ("1,234", 1234), ("three", None)],
)
def test_correct_answers_are_values_or_written_as_a_model_does(ground_truth, value):
    adapter = TextReward("number:exact")
    if value is None:
        with pytest.raises(Unscorable, match="three"):
            adapter.score(RIGHT, ground_truth, {})
    else:
        assert adapter.score(f"<answer>{value}</answer>", ground_truth, {}).value == 1.0
        assert adapter.score(f"<answer>{value + 1}</answer>", ground_truth, {}).value == 0.0


def test_correct_answer_in_text_keeps_its_tags_out():
    adapter = TextReward("text:exact")
    for ground_truth in ("a cat", "<answer>a cat</answer>"):
        assert adapter.score("<answer>A  cat</answer>", ground_truth, {}).value == 1.0


def test_boxes_are_compared_in_original_pixels():
    # A picture of 200 x 100, of which the model sees 100 x 100: [0, 0, 50, 50] is [0, 0, 100, 50] there.
    picture = Image.new("RGB", (200, 100))
    systems = {"coordinates": "px_resized", "target_coordinates": "px_original"}
    adapter = TextReward("box:iou", **systems, resize=lambda width, height: (height, height))
    assert adapter.score("<answer>[0, 0, 50, 50]</answer>", [0, 0, 100, 50], {"image": picture}).value == 1.0
    fixed = TextReward("box:iou", **systems, resize=lambda width, height: (height, height), image_size=(200, 100))
    assert fixed.score("<answer>[0, 0, 50, 50]</answer>", "[0, 0, 50, 50]", {}).value == 0.5
    with pytest.raises(Unscorable, match="the sample has 0"):
        adapter.score("<answer>[0, 0, 50, 50]</answer>", [0, 0, 100, 50], {})


def test_response_format_and_opening_say_how_responses_are_written():
    boxed = TextReward("maths:equal", answer_type="latex", response_format={"style": "boxed"})
    assert boxed.score(r"So it is \boxed{\frac12}.", "0.5", {}).value == 1.0
    opened = TextReward("format:tags", opening="<think>", response_format={"thinking": "required"})
    assert opened.score("one, two</think><answer>3</answer>", "", {}).value == 1.0
    assert opened.score("<answer>3</answer>", "", {}).value == 0.0


def test_length_is_that_of_the_tokens_where_a_counter_is_given():
    rule = {"fn": "length:overlong", "max_tokens": 10, "buffer": 10}
    assert TextReward(**rule).score("a b", "", {}).value == pytest.approx(-0.2)
    assert TextReward(**rule, count_tokens=len).score("a b", "", {}).value == pytest.approx(-0.3)


@pytest.mark.parametrize(
    ("fn", "settings", "message"),
    [
        ("box:iou", {}, "needs `coordinates`"),
        ("box:iou", {"coordinates": "norm_100"}, "none of px_original"),
        ("box:iou", {"coordinates": "px_resized"}, "needs `resize`"),
        ("box:iou", {"coordinates": "norm_1", "treshold": 0.5}, "did you mean 'threshold'"),
        ("box:iou", {"coordinates": "norm_1", "threshold": "high"}, "threshold"),
        ("number:exact", {"answer_type": "box"}, "scores number, not box"),
        ("number:exact", {"response_format": {"styl": "boxed"}}, "styl"),
        ("number:exact", {"response_format": {"style": "bosed"}}, "style"),
        ("maths:equal", {}, "needs `answer_type`, one of latex, text, number"),
        ("number:nothing", {}, "nothing"),
        ("./no_such.py:fn", {}, "no_such.py"),
        ("mmrl_rewards.geometry:iou", {}, "not a reward"),
        (clash, {}, "'opening'"),
    ],
)
def test_wrong_settings_are_refused_before_the_first_response(fn, settings, message):
    with pytest.raises(UserError, match=message):
        TrlReward(fn, **settings)


def test_a_value_out_of_range_and_a_missing_column_stop_the_trainer():
    with pytest.raises(UserError, match=r"'wild' returned 7.0, which is not a number from 0.0 to 1.0"):
        TextReward(wild).score("a", "", {})
    with pytest.raises(UserError, match="no column 'solution', only answer"):
        call_trl(TrlReward("number:exact"), [RIGHT], answer=["3"])


def test_settings_have_no_name_of_an_option_of_ours():
    from mmrl.scoring.registry import builtin_rewards

    settings = inspect.signature(TextReward.__init__).parameters.keys() - {"self", "args"}
    for name, found in builtin_rewards().items():
        assert not settings & found.options.keys(), name


LIGHT_SCRIPT = """
import sys
for name in sys.argv[1:]:
    sys.modules[name] = None  # importing it fails
from mmrl_rewards.adapters import VerlReward
box = VerlReward("box:iou", coordinates="norm_1000", image_size=(640, 480))
assert box("<answer>[0, 0, 10, 10]</answer>", [0, 0, 10, 20]) == {"score": 0.5, "unscorable": 0.0}
for name in ("number:exact", "count:exact", "choice:option", "span:iou", "jigsaw:exact", "point:in_box", "gui:action"):
    VerlReward(name, coordinates="norm_1000", answer_type="point" if name == "point:in_box" else None)
"""


def test_pydantic_and_numpy_are_enough_for_most_rewards():
    libs = "torch transformers torchvision datasets scipy sklearn skimage PIL rapidfuzz lxml jsonschema sympy pint yaml"
    subprocess.run([sys.executable, "-c", LIGHT_SCRIPT, *libs.split()], check=True)


def test_adapters_can_be_sent_to_another_process():
    for kind in TRAINER_ADAPTERS:
        adapter = pickle.loads(pickle.dumps(kind("box:iou", coordinates="norm_1000", threshold=0.5)))
        row = {"image": Image.new("RGB", (4, 4))}
        assert adapter.score("<answer>[0, 0, 9, 9]</answer>", "[0, 0, 9, 9]", row).value == 1.0

"""Demonstrations that call tools: results stand where rollouts have them, and only the demonstration is trained."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
from config_samples import SMALL, refused, write
from test_tool_media import TOOLS, calling, make_tool_step, words
from test_tools import call

from mmrl.answer.tool_calls import find_final_call, split_turns
from mmrl.config.schema import ToolConfig, ToolsConfig
from mmrl.policy.batch import collate
from mmrl.rollout.tools.executor import DemonstrationTools, ToolRunner
from mmrl.scoring.registry import load_tool
from mmrl.types import Author, Experience, UserError

ZOOM = call("zoom", box=[8, 8, 32, 32])
AGAIN = call("zoom", box=[0, 24, 24, 48], medium=2)
ANSWER = "<answer>3</answer>"
OWN = '''
import os

def say(call, sample):
    """Some words."""
    return f"{call['x']} seen by {os.getpid()}"

def crash(call, sample):
    raise RuntimeError("out of order")
'''


@pytest.fixture(scope="module")
def tiny(make_tiny):
    return make_tiny()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(OWN)
    return folder


@pytest.fixture(scope="module")
def tool_runner(base):
    with closing(ToolRunner(partial(load_tool, base))) as opened:
        yield opened


@pytest.fixture(scope="module")
def tools(tiny, tool_runner):
    own = tuple(ToolConfig(fn=f"./own.py:{name}") for name in ("say", "crash"))
    settings = ToolsConfig(kind="tools", tools=TOOLS + own, max_turns=2, max_media=2, timeout_s=60.0)
    return DemonstrationTools(executor=tool_runner.make_executor(settings, tiny.processor))


def demonstrated(tiny, *texts, **options):
    prompt = tiny.processor.build(tiny.samples[0])
    return [tiny.processor.build_demonstration(prompt, text, **options) for text in texts]


def test_a_result_equals_that_of_a_rollout(tiny, tool_runner, tools):
    """The same words, picture and places as the step gives a response that makes the same call."""
    (rollout,), counts = tools.complete(demonstrated(tiny, ZOOM + ANSWER))
    ((sampled,),) = make_tool_step(tiny, tool_runner, max_media=2)(calling(tiny, 0, ZOOM), step=0).groups
    assert rollout.segments[1:4] == sampled.segments[1:4]
    assert rollout.segments[0].token_ids == sampled.segments[0].token_ids
    assert [s.author for s in rollout.segments] == [
        Author.DEMONSTRATION,
        *[Author.ENVIRONMENT] * 3,
        Author.DEMONSTRATION,
    ]
    (view,) = rollout.observations
    assert view.ref.crop == (8, 8, 32, 32)
    assert tiny.processor.decode(rollout.segments[-1].token_ids) == ANSWER
    assert rollout.segments[-1].token_ids[-1] == tiny.eos_id
    assert rollout.answer.value == 3
    assert {name: count for name, count in counts.items() if count} == dict.fromkeys(
        ("tools/calls", "tools/results", "tools/media_shown"), 1.0
    )


def test_tool_results_are_never_trained(tiny, tools):
    made, _ = tools.complete(demonstrated(tiny, ZOOM + ANSWER, ANSWER))
    for shared_prefix in (True, False):
        batch = collate(
            [[Experience(rollout=rollout, advantage=0.0)] for rollout in made],
            tiny.processor,
            pad_id=tiny.eos_id,
            shared_prefix=shared_prefix,
        )
        experiences = [
            token
            for rollout in made
            for s in rollout.segments
            if s.author is Author.DEMONSTRATION
            for token in s.token_ids
        ]
        assert batch.target_ids_N.tolist() == experiences


def test_demonstrations_go_on_turn_by_turn(tiny, tools):
    """One looks twice, into the part of a part; one once and in words; one not at all, and stays as it is."""
    given = demonstrated(tiny, f"{ZOOM} Closer. {AGAIN}{ANSWER}", f"{call('say', x=7)}{ANSWER}", ANSWER)
    (twice, told, plain), counts = tools.complete(given)
    assert plain is given[2]
    assert [view.ref.crop for view in twice.observations] == [(8, 8, 32, 32), (8, 20, 20, 32)]
    assert "Medium 3: the part [0, 24, 24, 48] of medium 2." in "".join(words(tiny, twice))
    assert "\n7 seen by" in words(tiny, told)[0]
    assert (twice.answer.value, told.answer.value) == (3, 3)
    assert (counts["tools/calls"], counts["tools/media_shown"]) == (3.0, 2.0)


def test_tool_processes_stay_until_they_are_closed(tiny, tool_runner, tools):
    once, again = (tools.complete(demonstrated(tiny, call("say", x=7) + ANSWER))[0][0] for _ in range(2))
    assert words(tiny, once) == words(tiny, again)  # by the same process
    tool_runner.close()
    (later,), _ = tools.complete(demonstrated(tiny, call("say", x=7) + ANSWER))
    assert words(tiny, later) != words(tiny, once)


def test_a_refusal_is_part_of_a_demonstration(tiny, tools):
    (rollout,), counts = tools.complete(demonstrated(tiny, call("zoom", box=[90, 90, 95, 95]) + ANSWER))
    assert "The tool refuses: the box [90, 90, 95, 95] holds nothing of medium 1" in words(tiny, rollout)[0]
    assert counts["tools/refused"] == 1.0


def test_a_call_at_the_end_is_not_executed(tiny, tools):
    (rollout,), counts = tools.complete(given := demonstrated(tiny, ZOOM))
    assert rollout is given[0]
    assert not any(counts.values())
    assert tools.complete([]) == ([], counts)  # a rank that has no usable sample


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (call("crash") + ANSWER, "call 1 of its response: The tool failed: RuntimeError: out of order"),
        (ZOOM * 3 + ANSWER, r"call 3 of its response, after \d+ tokens, is beyond max_turns=2 of step tools"),
    ],
)
def test_demonstrations_beyond_the_limits_are_refused_by_name(tiny, tools, text, message):
    with pytest.raises(UserError, match=f"sample {tiny.samples[0].id}: {message}"):
        tools.complete(demonstrated(tiny, text))


def test_too_long_a_demonstration_is_refused_by_name(tiny, tools):
    short = replace(tools.executor, options=tools.executor.options.model_copy(update={"max_total_tokens": 8}))
    with pytest.raises(UserError, match=r"after \d+ tokens, is beyond max_total_tokens=8"):
        replace(tools, executor=short).complete(demonstrated(tiny, ZOOM + ANSWER))


def test_loss_on_answer_trains_the_answer_behind_given_calls(tiny, tools):
    (rollout,), _ = tools.complete(demonstrated(tiny, f"{ZOOM}I see.{ANSWER}", loss_on="answer"))
    authors = [segment.author for segment in rollout.segments]
    assert authors == [Author.FORCED, *[Author.ENVIRONMENT] * 3, Author.FORCED, Author.DEMONSTRATION]
    assert tiny.processor.decode(rollout.segments[-1].token_ids) == ANSWER


def test_only_whole_responses_call(tmp_path):
    step = "{kind: tools, tools: [{fn: 't:say'}]}"
    path = write(tmp_path, SMALL.replace("steps: 10", f"steps: 10\n    rollout_steps: [{step}]"))
    assert re.search("is 'label'; set `(imitate|target_field): response`", refused(path))
    whole = "stages.cold.target_field=response"
    assert "rollout_steps: needs 1 values, got 2" in refused(path, whole, f"stages.cold.rollout_steps=[{step}, {step}]")


def test_turns_and_calls_of_a_text():
    assert list(split_turns(f"a{ZOOM}b{ZOOM}")) == [(0, f"a{ZOOM}"), (len(ZOOM) + 1, f"b{ZOOM}")]
    assert list(split_turns("a")) == [(0, "a")]
    assert list(split_turns("")) == [(0, "")]
    assert find_final_call("x<tool_call>a</tool_call>\n") == "<tool_call>a</tool_call>"
    for none in ("", "x", "</tool_call>", "<tool_call>a</tool_call> b", "<tool_call>a"):
        assert find_final_call(none) is None

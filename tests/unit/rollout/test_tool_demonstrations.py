"""Demonstrations that call tools: results are where rollouts have them, and only the demonstration is trained."""

import re
from contextlib import closing
from dataclasses import replace

import pytest
from config_samples import SMALL, refused, write
from tool_calls import MEDIA_TOOLS, call, responses, tool_step, tool_texts

from mmrl.answer.tool_calls import find_final_call, split_turns
from mmrl.config.schema import ToolConfig, ToolsConfig
from mmrl.policy.batch import collate
from mmrl.rollout.tools.executor import DemonstrationTools, ToolRunner
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
def tool_runner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(OWN)
    with closing(ToolRunner(folder)) as opened:
        yield opened


@pytest.fixture(scope="module")
def tools(tiny, tool_runner):
    own = tuple(ToolConfig(fn=f"./own.py:{name}") for name in ("say", "crash"))
    settings = ToolsConfig(kind="tools", tools=MEDIA_TOOLS + own, max_turns=2, max_media=2, timeout_s=60.0)
    return DemonstrationTools(executor=tool_runner.make_executor(settings, tiny.processor))


def demonstrations(tiny, *texts, **options):
    prompt = tiny.processor.build(tiny.samples[0])
    return [tiny.processor.build_demonstration(prompt, text, **options) for text in texts]


def test_result_equals_that_of_a_rollout_with_the_same_call(tiny, tool_runner, tools):
    (rollout,), counts = tools.complete(demonstrations(tiny, ZOOM + ANSWER))
    ((sampled,),) = tool_step(tiny, tool_runner, MEDIA_TOOLS, max_media=2)(responses(tiny, ZOOM), step=0).groups
    assert rollout.segments[1:4] == sampled.segments[1:4]
    assert rollout.segments[0].token_ids == sampled.segments[0].token_ids
    authors = [segment.author for segment in rollout.segments]
    assert authors == [Author.DEMONSTRATION, *[Author.ENVIRONMENT] * 3, Author.DEMONSTRATION]
    assert rollout.observations[0].ref.crop == (8, 8, 32, 32)
    assert tiny.processor.decode(rollout.segments[-1].token_ids) == ANSWER
    assert rollout.segments[-1].token_ids[-1] == tiny.eos_id
    assert rollout.answer.value == 3
    assert {name for name, count in counts.items() if count == 1.0} == {
        *("tools/calls", "tools/results", "tools/media_shown")
    }


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_tool_results_are_never_trained(tiny, tools, shared_prefix):
    rollouts, _ = tools.complete(demonstrations(tiny, ZOOM + ANSWER, ANSWER))
    groups = [[Experience(rollout=rollout, advantage=0.0)] for rollout in rollouts]
    batch = collate(groups, tiny.processor, pad_id=tiny.eos_id, shared_prefix=shared_prefix)
    trained = []
    for segment in (segment for rollout in rollouts for segment in rollout.segments):
        trained += segment.token_ids if segment.author is Author.DEMONSTRATION else ()
    assert batch.target_ids_N.tolist() == trained


def test_demonstrations_continue_turn_by_turn(tiny, tools):
    """One zooms twice, into a part of a part; one calls once; one does not call, and stays as it is."""
    given = demonstrations(tiny, f"{ZOOM} Closer. {AGAIN}{ANSWER}", f"{call('say', x=7)}{ANSWER}", ANSWER)
    (twice, once, plain), counts = tools.complete(given)
    assert plain is given[2]
    assert [shown.ref.crop for shown in twice.observations] == [(8, 8, 32, 32), (8, 20, 20, 32)]
    assert "Medium 3: the part [0, 24, 24, 48] of medium 2." in "".join(tool_texts(tiny, twice))
    assert "\n7 seen by" in tool_texts(tiny, once)[0]
    assert (twice.answer.value, once.answer.value) == (3, 3)
    assert (counts["tools/calls"], counts["tools/media_shown"]) == (3.0, 2.0)


def test_tool_processes_stay_until_they_are_closed(tiny, tool_runner, tools):
    def process_of_call():
        return tool_texts(tiny, tools.complete(demonstrations(tiny, call("say", x=7) + ANSWER))[0][0])

    first = process_of_call()
    assert process_of_call() == first
    tool_runner.close()
    assert process_of_call() != first


def test_refusal_is_part_of_a_demonstration(tiny, tools):
    (rollout,), counts = tools.complete(demonstrations(tiny, call("zoom", box=[90, 90, 95, 95]) + ANSWER))
    assert "The tool refuses: the box [90, 90, 95, 95] holds nothing of medium 1" in tool_texts(tiny, rollout)[0]
    assert counts["tools/refused"] == 1.0


def test_call_at_the_end_is_not_executed(tiny, tools):
    given = demonstrations(tiny, ZOOM)
    (rollout,), counts = tools.complete(given)
    assert rollout is given[0]
    assert not any(counts.values())
    assert tools.complete([]) == ([], counts)  # a rank that has no usable sample


@pytest.mark.parametrize(
    ("text", "limits", "message"),
    [
        (call("crash") + ANSWER, {}, "call 1 of its response: The tool failed: RuntimeError: out of order"),
        (ZOOM * 3 + ANSWER, {}, r"call 3 of its response, after \d+ tokens, is beyond max_turns=2 of step tools"),
        (ZOOM + ANSWER, {"max_total_tokens": 8}, r"after \d+ tokens, is beyond max_total_tokens=8"),
    ],
)
def test_demonstration_that_fails_or_exceeds_a_limit_is_refused_by_name(tiny, tools, text, limits, message):
    executor = replace(tools.executor, options=tools.executor.options.model_copy(update=limits))
    with pytest.raises(UserError, match=f"sample {tiny.samples[0].id}: .*{message}"):
        replace(tools, executor=executor).complete(demonstrations(tiny, text))


def test_loss_on_answer_trains_the_answer_after_given_calls(tiny, tools):
    (rollout,), _ = tools.complete(demonstrations(tiny, f"{ZOOM}I see.{ANSWER}", loss_on="answer"))
    authors = [segment.author for segment in rollout.segments]
    assert authors == [
        Author.DEMONSTRATION_PREFIX,
        *[Author.ENVIRONMENT] * 3,
        Author.DEMONSTRATION_PREFIX,
        Author.DEMONSTRATION,
    ]
    assert tiny.processor.decode(rollout.segments[-1].token_ids) == ANSWER


def test_only_whole_responses_may_call(tmp_path):
    step = "{kind: tools, tools: [{fn: 't:say'}]}"
    path = write(tmp_path, SMALL.replace("steps: 10", f"steps: 10\n    rollout_steps: [{step}]"))
    assert re.search("is 'label'; set `target_field: response`", refused(path))
    whole = "stages.cold.target_field=response"
    assert "rollout_steps: needs 1 values, got 2" in refused(path, whole, f"stages.cold.rollout_steps=[{step}, {step}]")


def test_turns_and_calls_of_a_text():
    assert list(split_turns(f"a{ZOOM}b{ZOOM}")) == [(0, f"a{ZOOM}"), (len(ZOOM) + 1, f"b{ZOOM}")]
    assert list(split_turns("a")) == [(0, "a")]
    assert list(split_turns("")) == [(0, "")]
    assert find_final_call("x<tool_call>a</tool_call>\n") == "<tool_call>a</tool_call>"
    for text in ("", "x", "</tool_call>", "<tool_call>a</tool_call> b", "<tool_call>a"):
        assert find_final_call(text) is None

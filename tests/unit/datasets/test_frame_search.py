"""FrameThinker's environment: which frames are shown, which rule ends an episode, and what counts as success."""

import random
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from samplers import make_pipeline
from tool_calls import responses

from mmrl.config.schema import EnvironmentConfig
from mmrl.rollout.tools.executor import ToolRunner
from mmrl.types import AnswerType, RolloutBatch, Sample, Target, Unscorable
from mmrl.utils.observations import check_step_result
from mmrl_datasets.environments.frames import make

VIDEO = {"fps": 10.0, "total_frames": 2000, "question": "What happens at 00:30?\nA. It stops.\nB. It moves."}
TIME = "<think>When?</think><action>get frame number at time 00:30</action>"
RIGHT, WRONG = (f"<think>So.</think><action>output answer: {letter}</action>" for letter in "BA")


def choose(start, end, thought=None):
    thought = f"From {start} to {end}." if thought is None else thought
    return f"<think>{thought}</think><action>choose frames between {start} and {end}</action>"


def sample(**video):
    target = Target(answer_type=AnswerType.CHOICE, value="B")
    return Sample(id="s", task="frames", parts=("What?",), target=target, meta={"extra_info": {**VIDEO, **video}})


def play(*turns, **video):
    """The results of turns, up to the end of the episode."""
    episode = make()
    episode.reset(sample(**video), 0)
    results = []
    for turn in turns:
        results.append(check_step_result(episode.step(turn)))
        if results[-1].terminated:
            break
    return results


@pytest.mark.parametrize(
    ("turns", "correct", "chose", "timed"),
    [
        ((RIGHT,), 1, 0, 0),
        ((WRONG,), 0, 0, 0),
        ((choose(100, 400), RIGHT), 1, 1, 0),
        ((TIME, choose(250, 350), RIGHT), 1, 1, 1),
        ((choose(100, 400), TIME, choose(250, 350), WRONG), 0, 1, 1),
        ((TIME.replace("00:30", "00:00"), choose(0, 100), RIGHT), 1, 1, 1),
        ((choose(100, 400, "At 0:10 to 0:40, which is 7: 100 and 400"), RIGHT), 1, 1, 0),
        ((choose(1900, 9000), RIGHT), 1, 1, 0),
    ],
)
def test_an_episode_that_keeps_the_rules(turns, correct, chose, timed):
    results = play(*turns)
    assert len(results) == len(turns) and all(result.valid for result in results)
    assert dict(results[-1].info) == {"correct": correct, "chose": chose, "timed": timed}


def test_a_time_earns_nothing_where_the_question_names_none():
    assert play(TIME, choose(250, 350), RIGHT, question="What happens?")[-1].info["timed"] == 0.0


@pytest.mark.parametrize(
    "turns",
    [
        ("The answer is B",),
        ("<action>output answer: B</action>",),
        ("<think>a</think><think>b</think><action>output answer: B</action>",),
        (RIGHT + RIGHT,),
        ("<think>a</think><action>look closer</action>",),
        (choose(0, 1999),),  # the first look
        (choose(100, 400), choose(100, 400)),
        (choose(100, 400), choose(101, 399)),  # the frames that were shown
        (choose(100, 108),),
        (choose(400, 100),),
        (choose(1995, 5000),),
        (choose(2000, 3000),),
        (choose(100, 400, "Let me look closer."),),
        (choose(100, 400, "From 400 to 100."),),
        (choose(100, 400, "From 1:100 to 400."),),
        (TIME, RIGHT),
        (TIME, choose(400, 900)),
        (TIME, choose(250, 350), TIME),
        (TIME, TIME.replace("30", "40")),
    ],
)
def test_a_broken_rule_ends_the_episode_without_success(turns):
    results = play(*turns, RIGHT)
    assert len(results) == len(turns) and all(result.valid for result in results[:-1])
    assert results[-1].terminated and not results[-1].valid and results[-1].info == {"correct": 0.0}


def test_frames_lie_evenly_within_the_interval():
    (shown,) = play(choose(99, 171))[0].observation.media
    assert shown.seconds == (10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0) and shown.medium_number == 1
    assert play(choose(99, 171))[0].observation.text == "frames 100, 110, 120, 130, 140, 150, 160, 170"
    (shown,) = play(choose(1900, 9000))[0].observation.media
    assert shown.seconds[-1] == 199.9  # the last of 2,000 frames
    long = play(choose(100, 4000), total_frames=5000)[0].observation
    assert len(long.media[0].seconds) == 12
    assert not play(choose(100, 112), total_frames=5000)[0].valid


def test_a_time_is_a_frame():
    assert play(TIME)[0].observation.text == "Frame number at time 00:30 is: 300."
    assert play(TIME, fps="29.97")[0].observation.text == "Frame number at time 00:30 is: 899."


@pytest.mark.parametrize(
    "video",
    [{"fps": 0}, {"fps": "fast"}, {"total_frames": None}, {"total_frames": 0}, {"question": None}, {"fps": -1.0}],
)
def test_a_row_without_the_facts_of_its_video_is_unscorable(video):
    with pytest.raises(Unscorable, match="'extra_info' must hold fps, total_frames and question"):
        play(RIGHT, **video)


def follows_the_rules(turns, num_frames=2000, fps=10):
    """The published checks on a whole text, in words of our own: lists are gathered first, and compared then."""
    intervals, named, asked = [], [], []
    for number, turn in enumerate(turns[:-1]):
        pair = re.search(r"between (\d+) and (\d+)", turn)
        if pair:
            intervals.append((number, int(pair[1]), int(pair[2])))
            named.append(re.findall(r"\d+", turn.split("</think>")[0])[-2:] == [pair[1], pair[2]])
        else:
            minutes, seconds = re.search(r"time (\d+):(\d+)", turn).groups()
            asked.append((number, (60 * int(minutes) + int(seconds)) * fps))
    if not all(named) or len({frame for _, frame in asked}) < len(asked):
        return False
    for index, (_, start, end) in enumerate(intervals):
        earlier = [(0, num_frames - 1)]
        for _, a, b in intervals[:index]:
            earlier += [(a, b), (a + 1, b - 1)]
        if (start, end) in earlier or not end - start > 8:
            return False
    by_turn = {number: (start, end) for number, start, end in intervals}
    return all(number + 1 in by_turn and by_turn[number + 1][0] <= f <= by_turn[number + 1][1] for number, f in asked)


def test_random_episodes_succeed_where_the_published_checks_pass():
    rng = random.Random(0)
    moves = [choose(a, b) for a in (100, 101, 250, 392) for b in (399, 400, 1000)]
    moves += [choose(100, 400, "From 400."), choose(0, 1999), TIME, TIME, TIME, TIME.replace("30", "10")]
    outcomes = []
    for _ in range(2000):
        turns = [rng.choice(moves) for _ in range(rng.randint(0, 4))] + [RIGHT]
        outcomes.append(follows_the_rules(turns))
        assert play(*turns)[-1].info["correct"] == outcomes[-1], turns
    assert 400 < sum(outcomes) < 1600


def test_the_step_shows_frames_of_the_video_in_the_question(tiny):
    question = replace(tiny.samples[3], meta={"extra_info": {**VIDEO, "fps": 12.0, "total_frames": 24}})
    tiny = replace(tiny, samples=(question,))
    config = EnvironmentConfig(kind="environment", fn="mmrl_datasets.environments.frames:make", turns=2)
    with closing(ToolRunner(Path())) as runner:
        step = make_pipeline(tiny, config, tool_runner=runner).steps[0]
        ((shown,),) = step(RolloutBatch(groups=responses(tiny, choose(2, 20)).groups), step=0).groups
    frames = [observation.ref for observation in shown.observations]
    expected = [number / 12 for number in (3, 5, 7, 9, 12, 14, 16, 19)]
    assert [frame.timestamp for frame in frames] == expected
    assert {frame.sha256 for frame in frames} == {question.media[0].sha256}
    assert len(shown.turns) == 2 and shown.turns[1].terminated and not shown.turns[1].valid

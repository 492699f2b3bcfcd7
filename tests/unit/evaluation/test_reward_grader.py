"""The rewards of a run see the same response in an evaluation, from predictions.jsonl, as in training."""

from dataclasses import replace

import pytest
from samplers import make_pipeline
from scoring import make_scorer, term
from tool_calls import zoom_response

from mmrl.benchmarks.predictions import append_predictions, read_complete_predictions
from mmrl.benchmarks.readers.questions import questions_from_samples
from mmrl.benchmarks.report import build_report, report_markdown
from mmrl.benchmarks.verdict import ResponseOutcome
from mmrl.config.schema import RethinkConfig, RethinkTriggerConfig
from mmrl.evaluation.graders import RewardGrader, make_prediction
from mmrl.types import Author, FinishReason, Response, Rollout, RolloutBatch, Segment, Turn
from mmrl_rewards.contract import reward

TRIGGERS = (RethinkTriggerConfig(text=" Wait."),)


@reward(name="zero")
def zero(response, sample) -> float:
    """Nothing is right."""
    return 0.0


@reward(name="one")
def one(response, sample) -> float:
    """Everything is right."""
    return 1.0


@reward(name="half")
def half(response, sample) -> float:
    """Everything is half right."""
    return 0.5


def make_grader(tiny, sample, *terms):
    return RewardGrader(
        name="run:test",
        scorer=make_scorer(*terms),
        response_format=tiny.processor.response_format,
        samples={sample.id: sample},
        items=questions_from_samples([sample]).items,
    )


@pytest.fixture
def grade(tiny, tmp_path):
    """Grades a rollout by terms, from a file."""

    def grade(rollout: Rollout, *terms):
        first_response = tiny.processor.text_before_continuation(rollout)
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        append_predictions(path, [make_prediction(rollout.prompt.sample.id, rollout, first_response)])
        sample = rollout.prompt.sample
        (verdict,) = make_grader(tiny, sample, *terms).grade(read_complete_predictions(path, [1]))
        return verdict

    return grade


def test_the_total_reward_of_a_response_is_not_reported_as_an_accuracy(tiny):
    rollout = plain(tiny)
    sample = rollout.prompt.sample
    grader = make_grader(tiny, sample, term(one), term(half))
    report = build_report(grader.grade_run([make_prediction(sample.id, rollout, None)], {}))
    page = report_markdown(report)
    assert report["score"] == 1.5 and f"| {sample.task} | 1.5000 |" in page
    assert "150.0" not in page and "partial credit" not in page


def plain(tiny) -> Rollout:
    return tiny.experiences(tiny.samples[:1])[0].rollout


def cropped(tiny) -> Rollout:
    """A response about a part of an image, in whose coordinates an offset counts."""
    sample = tiny.samples[0]
    part = replace(sample.images[0], crop=(4, 8, 40, 32))
    return tiny.experiences([replace(sample, id="part", parts=(part, "Where?"))])[0].rollout


def rethought(tiny, first: Rollout | None = None) -> Rollout:
    config = RethinkConfig(kind="rethink", correct=("zero",), max_new_tokens=3, triggers=TRIGGERS, fraction=1.0)
    step = make_pipeline(tiny, config, scorer=make_scorer(term(zero))).steps[0]
    ended = replace(first or plain(tiny), finish_reason=FinishReason.EOS)
    ((rollout,),) = step(RolloutBatch(groups=((ended,),)), step=0).groups
    return rollout


def forced(tiny) -> Rollout:
    """A response that a user's step forced on, which is not a rethink."""
    first = plain(tiny)
    words = Segment(token_ids=tiny.processor.tokenize(" so"), logprobs=(0.0,), author=Author.FORCED)
    (rollout,) = tiny.sampler().extend([replace(first, segments=(*first.segments, words))], tiny.params, step=0)
    return rollout


def zoomed_and_rethought(tiny) -> Rollout:
    return rethought(tiny, zoom_response(tiny))


def played(tiny) -> Rollout:
    return replace(zoom_response(tiny), turns=(Turn(action="look", reward=0.5), Turn(action="stop")))


@pytest.mark.parametrize("make", [plain, cropped, rethought, forced, zoom_response, zoomed_and_rethought, played])
def test_rewards_see_the_response_that_they_see_in_training(tiny, grade, make):
    rollout = make(tiny)
    seen: list[Response] = []

    @reward(name="seen", high=1000.0)
    def look(response, sample) -> float:
        """The length of the response."""
        seen.append(response)
        return float(len(response.text))

    (score,) = make_scorer(term(look)).score_eval([rollout])
    assert grade(rollout, term(look)).score == score.total
    first, second = seen
    assert first == second


def test_correct_by_the_terms_that_are_for_the_rollout(tiny, grade):
    not_for_it = term(zero, when={"rollout.used_tool": True})
    assert grade(plain(tiny), term(one), not_for_it).strict
    assert not grade(zoom_response(tiny), term(one), not_for_it).strict
    assert grade(plain(tiny), not_for_it).outcome is not ResponseOutcome.CORRECT

"""Co-Reward: the majority answer to the other wording of a question becomes the target of the group."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from factories import make_answer, make_prompt, make_rollout, make_sample
from samplers import make_pipeline
from scoring import make_scorer, term

from mmrl.algo.group_metrics import compute_blind_gaps, compute_reward_metrics
from mmrl.config.schema import BlindProbeConfig, CustomStepConfig, GreedyConfig, RethinkConfig, ToolConfig, ToolsConfig
from mmrl.rollout.steps.custom import CustomStep
from mmrl.rollout.steps.rewording import MajorityTargets
from mmrl.types import AnswerType, RolloutBatch, SamplingParams, UserError
from mmrl_rewards.number import exact

SCORER = make_scorer(term(exact, name="accuracy"))


class OtherAnswers:
    """A processor and sampler that answer reworded questions with numbers given by the question's text."""

    def __init__(self, answers):
        self.answers, self.seen = answers, []

    def build(self, sample):
        self.seen.append(sample)
        return make_prompt(sample)

    def generate(self, prompts, count, params, *, step):
        groups = []
        for prompt in prompts:
            given = self.answers[prompt.sample.parts[-1]]
            assert len(given) == count
            groups.append([make_rollout(prompt, index, "", make_answer(value)) for index, value in enumerate(given)])
        return groups


def group(name, answers, reworded, kind=AnswerType.NUMBER):
    sample = make_sample(3, kind, meta={"reworded": reworded} if reworded else {})
    prompt = make_prompt(replace(sample, id=name))
    return tuple(make_rollout(prompt, index, "", make_answer(value)) for index, value in enumerate(answers))


def run(others, *groups):
    context = SimpleNamespace(
        sampler=others, processor=others, group_size=3, sampling_params=SamplingParams(max_new_tokens=6)
    )
    step = CustomStep(name="co_reward", function=MajorityTargets(context))
    return step(RolloutBatch(groups=groups), step=4)


def test_answers_are_compared_with_the_majority_of_the_other_wording():
    others = OtherAnswers({"how many?": [5, 5, 3], "tie?": [1, 2, None]})
    first, tied = group("a", [5, 3, None], "how many?"), group("b", [1, 1, 1], "tie?")
    batch = run(others, first, tied)
    scored, left_out = SCORER.score_groups(batch.groups, step=0)
    # The row's own target, 3, is not read; nor does the majority of the group's own answers count.
    assert [score.terms["accuracy"].value for score in scored.scores] == [1.0, 0.0, 0.0]
    assert not left_out.scores and len(left_out.dropped) == 3
    assert all(dropped.failures["step/co_reward"].step == "co_reward" for dropped in left_out.dropped)
    assert compute_reward_metrics([left_out]) == {"reward/dropped": 3, "reward/step/co_reward/unscorable": 3}
    assert batch.metrics == {"reworded/no_majority": 1.0}
    assert [rollout.segments for rollout in batch.groups[0]] == [rollout.segments for rollout in first]
    assert [sample.id for sample in others.seen] == ["a~reworded", "b~reworded"]


def test_a_reworded_question_keeps_its_media():
    others = OtherAnswers({"how many?": [5, 5, 5]})
    first = group("a", [5, 5, 5], "how many?")
    media = first[0].prompt.sample.media
    run(others, first)
    assert others.seen[0].parts == (*media, "how many?")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (group("a", [5, 5, 5], None), "sample 'a' has no text in the column 'reworded'"),
        (group("a", [(0, 0, 1, 1)] * 3, "where?", AnswerType.BOX), "no two answers of type box are exactly equal"),
    ],
)
def test_samples_without_another_wording_or_equality_are_refused(given, said):
    with pytest.raises(UserError, match=said):
        run(OtherAnswers({}), given)


STEP = CustomStepConfig(fn="mmrl.rollout.steps.rewording:MajorityTargets")


def pipeline_of(tiny, others, *steps):
    def make_step(context):
        return MajorityTargets(replace(context, sampler=others, processor=others))

    return make_pipeline(tiny, *steps, custom_steps={"MajorityTargets": make_step})


def numbers(tiny, *questions):
    """Prompts with an image whose own target is the number 1, each with another wording."""
    prompts = []
    for sample, question in zip(tiny.samples, questions, strict=False):
        number = replace(sample.target, answer_type=AnswerType.NUMBER, value=1)
        prompts.append(tiny.processor.build(replace(sample, target=number, meta={"reworded": question})))
    return prompts


def test_the_checks_of_custom_steps_allow_another_target(tiny):
    prompts = numbers(tiny, "how many?", "how many?")
    batch = pipeline_of(tiny, OtherAnswers({"how many?": [5, 5]}), STEP).run(prompts, step=0)
    for prompt, rollouts in zip(prompts, batch.groups, strict=True):
        assert [rollout.prompt.sample.target.value for rollout in rollouts] == [5, 5]
        assert {rollout.prompt.digest for rollout in rollouts} == {prompt.digest}


def test_probes_are_compared_with_the_target_of_their_group(tiny):
    """A majority of blind answers, or of others drawn for a greedy response, would be another target."""
    others = OtherAnswers({"how many?": [5, 5], "tie?": [1, 2]})
    probes = (BlindProbeConfig(kind="probe", corruption="grey"), GreedyConfig(kind="greedy"))
    batch = pipeline_of(tiny, others, STEP, *probes).run(numbers(tiny, "how many?", "tie?"), step=0)
    assert len(others.seen) == 2
    for rollouts in batch.probes[0].values():
        assert [rollout.prompt.sample.target.value for rollout in rollouts] == [5]
    # A group without a majority has no target, so the answers of its probe are neither right nor wrong.
    found, tied = SCORER.score_groups(batch.groups, step=0, probes=batch.probes)
    assert not tied.scores and tied.probes["grey"][0].terms["accuracy"].value == 0.0
    (score,) = found.probes["grey"]
    right = replace(score, terms={"accuracy": score.terms["accuracy"]._replace(value=1.0)})
    found = replace(found, probes={"grey": (right,)})
    assert compute_blind_gaps([found, tied]) == compute_blind_gaps([found]) == {"probe/blind_gap/grey/accuracy": -1.0}


def test_reworded_questions_beside_tools_are_refused(tiny):
    tools = ToolsConfig(kind="tools", tools=(ToolConfig(fn="mmrl.rollout.tools.builtin:check_answer"),))
    with pytest.raises(UserError, match="answers reworded questions in one turn"):
        pipeline_of(tiny, OtherAnswers({}), STEP, tools)


def test_a_rethink_step_that_judges_by_the_replaced_targets_is_refused(tiny):
    """The row's own target is never read, and a rethink step reads the target that the prompt has at its turn."""
    rethink = RethinkConfig(kind="rethink", correct=("accuracy",))
    with pytest.raises(UserError, match="put it before rethink"):
        pipeline_of(tiny, OtherAnswers({}), rethink, STEP)
    assert len(pipeline_of(tiny, OtherAnswers({}), STEP, rethink).steps) == 2

"""Samples, rollouts and judges that the tests of scoring share."""

import json
from functools import partial

from mmrl.answer import ResponseFormat
from mmrl.config.schema import RewardTermConfig as Options
from mmrl.config.schema import ScoringConfig
from mmrl.scoring import BoundTerm, RewardFunctionScorer
from mmrl.types import (
    AnswerType,
    Author,
    CoordinateSystem,
    FinishReason,
    ImageRef,
    Prompt,
    ResizeMap,
    Rollout,
    Sample,
    SamplingParams,
    Segment,
    Size,
    Target,
)
from mmrl_rewards.contract import bind, reward

GRAMMAR = ResponseFormat(thinking="none")
COUNT = Sample(id="c1", task="count", parts=("How many?",), target=Target(answer_type=AnswerType.NUMBER, value=3))
FIND = Sample(
    id="f1",
    task="find",
    parts=(ImageRef(path="a.png", sha256=""), "Where?"),
    target=Target(answer_type=AnswerType.BOX, value=(0, 0, 10, 10), coordinate_system=CoordinateSystem.PX_ORIGINAL),
)


def rollout(text, sample=COUNT, index=0, grammar=GRAMMAR):
    prompt = Prompt(
        sample=sample,
        token_ids=(1,),
        grids=(),
        resize_maps=tuple(ResizeMap(Size(100, 100), Size(50, 50)) for _ in sample.images),
        coordinate_system=CoordinateSystem.PX_RESIZED,
        digest="",
    )
    return Rollout(
        prompt=prompt,
        index=index,
        segments=(Segment(token_ids=(1, 2), logprobs=(-1.0, -1.0), author=Author.POLICY),),
        text=text,
        answer=grammar.parse(text, sample.target.answer_type),
        finish_reason=FinishReason.EOS,
        sampling_params=SamplingParams(max_new_tokens=4),
    )


def term(fn, name=None, args=None, **options):
    load = partial(bind, fn, args or {})
    return BoundTerm(name=name or fn.name, reward=load(), load_reward=load, options=as_read(options))


def as_read(options):
    """Options of a term, as they come from YAML."""
    return Options.model_validate_json(json.dumps({"fn": "a:b", **options}))


def make_scorer(*terms, **options):
    return RewardFunctionScorer(terms, ScoringConfig(**{"own_rewards": "main_process"} | options))


def constant(result, name="odd", **declared):
    """A reward that always returns or raises the same."""

    @reward(name=name, **declared)
    def fn(response, sample) -> float:
        if isinstance(result, BaseException):
            raise result
        return result

    return fn


def scored(judge, rollout_, step=0):
    """The score of one rollout in training."""
    (group,) = judge.score_groups([[rollout_]], step=step)
    return group.scores[0]

"""Samples, rollouts and judges that the tests of scoring share."""

import json
from functools import partial

from mmrl.answer import Grammar
from mmrl.config.schema import Judging
from mmrl.config.schema import Term as Options
from mmrl.scoring import BoundTerm, Judge
from mmrl.types import (
    Author,
    Finish,
    Frame,
    ImageRef,
    Kind,
    Prompt,
    ResizeMap,
    Rollout,
    Sample,
    SamplingLaw,
    Segment,
    Size,
    Target,
)
from mmrl_rewards.contract import bind, reward

GRAMMAR = Grammar(think="none")
COUNT = Sample(id="c1", task="count", parts=("How many?",), target=Target(kind=Kind.NUMBER, value=3))
FIND = Sample(
    id="f1",
    task="find",
    parts=(ImageRef(path="a.png", sha256=""), "Where?"),
    target=Target(kind=Kind.BOX, value=(0, 0, 10, 10), frame=Frame.PX_ORIGINAL),
)


def rollout(text, sample=COUNT, index=0, grammar=GRAMMAR):
    prompt = Prompt(
        sample=sample,
        ids=(1,),
        grids=(),
        resizes=tuple(ResizeMap(Size(100, 100), Size(50, 50)) for _ in sample.images),
        frame=Frame.PX_RESIZED,
        digest="",
    )
    return Rollout(
        prompt=prompt,
        index=index,
        segments=(Segment(ids=(1, 2), logps=(-1.0, -1.0), author=Author.POLICY),),
        text=text,
        answer=grammar.parse(text, sample.target.kind),
        finish=Finish.EOS,
        law=SamplingLaw(max_new_tokens=4),
    )


def term(fn, name=None, args=None, **options):
    load = partial(bind, fn, args or {})
    return BoundTerm(name=name or fn.name, reward=load(), load=load, options=as_read(options))


def as_read(options):
    """Options of a term, as they come from YAML."""
    return Options.model_validate_json(json.dumps({"fn": "a:b", **options}))


def judge_of(*terms, **options):
    return Judge(terms, Judging(**options))


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
    (group,) = judge.judge([[rollout_]], step=step)
    return group.scores[0]

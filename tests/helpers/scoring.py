"""Samples, rollouts and scorers that the tests of scoring share."""

import json
from functools import partial
from pathlib import Path

from factories import make_prompt, make_rollout, make_sample

from mmrl.answer import ResponseFormat
from mmrl.config.schema import RewardTermConfig as Options
from mmrl.config.schema import ScoringConfig
from mmrl.scoring import BoundTerm, RewardError, RewardFunctionScorer
from mmrl.scoring.trial import RewardTrial
from mmrl.types import AnswerType, CoordinateSystem, ImageRef, ResizeMap, Size
from mmrl_rewards.contract import bind, reward

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"
GRAMMAR = ResponseFormat(thinking="none")
COUNT = make_sample(3, id="c1", task="count")
_PLACE = {"parts": (ImageRef(path="a.png", sha256=""), "Where?"), "coordinate_system": CoordinateSystem.PX_ORIGINAL}
FIND = make_sample((0, 0, 10, 10), AnswerType.BOX, id="f1", task="find", **_PLACE)


def rollout(text, sample=COUNT, index=0, grammar=GRAMMAR):
    """A rollout with this text, of a prompt whose images of 100 x 100 pixels the model sees at half their size."""
    resize_maps = tuple(ResizeMap(Size(100, 100), Size(50, 50)) for _ in sample.images)
    prompt = make_prompt(sample, resize_maps=resize_maps, coordinate_system=CoordinateSystem.PX_RESIZED)
    return make_rollout(prompt, index, text, grammar.parse(text, sample.target.answer_type))


def term(fn, name=None, args=None, **options):
    load = partial(bind, fn, args or {})
    return BoundTerm(name=name or fn.name, reward=load(), load_reward=load, options=as_read(options))


def as_read(options):
    """Options of a term, as they come from YAML."""
    return Options.model_validate_json(json.dumps({"fn": "a:b", **options}))


def make_scorer(*terms, **options):
    return RewardFunctionScorer(terms, ScoringConfig(**{"custom_rewards": "main_process"} | options))


def check_samples(scorer, samples, response_format):
    """Try the rewards on samples, as before a run; raise a RewardError for the first that cannot be scored."""
    for abstained in RewardTrial(scorer, response_format).check_in_batches(samples):
        for reason in abstained.values():
            raise RewardError(reason)


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

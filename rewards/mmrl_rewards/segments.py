"""A reward that judges a response segment by segment, so that a false sentence lowers the value and is named."""

from __future__ import annotations

import re
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field

from mmrl.types import Response, RewardValue, Sample, Unscorable
from mmrl_rewards import strings
from mmrl_rewards.contract import BadAnswer, Of, part_text, reward
from mmrl_rewards.services.images import Images, show_question
from mmrl_rewards.services.judge import RewardModelService, sigmoid

# A full stop ends a sentence only before white space, so that 3.5 is one number. A run of them is tried once.
_SENTENCE_END = r"(?<![.!?])[.!?]++[\"')\]]*(?=\s|$)|[\u3002\uff01\uff1f]+|\n+"
_SEGMENTS = {
    "sentence": re.compile(rf"(?s:.*?)(?:{_SENTENCE_END}|\Z)"),
    "clause": re.compile(rf"(?s:.*?)(?:{_SENTENCE_END}|[,;:](?=\s|$)|[\uff0c\uff1b\uff1a]|\Z)"),
}


@reward(name="segments", uses_service=True)
def scored(
    response: Response,
    sample: Sample,
    *,
    scorer: RewardModelService | None = None,
    split: Literal["sentence", "clause"] = "sentence",
    most: Annotated[int, Field(ge=1)] = 30,
    of: Of = "answer",
    images: Images = False,
) -> RewardValue:
    """Return the mean of sigmoid(s) over the segments of a response, where s is a reward model's score of each.

    Each sentence, or clause, is sent by itself with the question, and with the pictures as in `judge:pointwise`. The
    reason lists their values. Use one term for each reward model: the paper has one for objects that do not exist, one
    for false attributes and one for false relations.

    Source: FGAIF (arXiv:2404.05046), which rewards sub-sentences. Departures: the paper adds each value at the last
    token of its segment, for PPO with a critic; here the response gets their mean, since a group's advantages are per
    response. Segments that repeat another count once, and a response with more than `most` of them earns 0.
    Unscorable: there is no reward model, it fails, or a picture cannot be opened.
    """
    if scorer is None:
        raise Unscorable("no scorer is configured: set args.scorer.url")
    segments = split_segments(part_text(response, of), split)
    if not 1 <= len(segments) <= most:
        raise BadAnswer(f"{len(segments)} segments, at least 1 and at most {most} are scored")
    question, urls = show_question(sample, images)
    values = [sigmoid(scorer.score(question, segment, urls)) for segment in segments]
    listed = " ".join(f"{value:.2f}" for value in values)
    return RewardValue(fmean(values), f"{listed}; lowest: {strings.excerpt(segments[values.index(min(values))])}")


def split_segments(text: str, split: Literal["sentence", "clause"]) -> list[str]:
    """Return the segments of a text in order, without white space around them and without repetitions.

    Segments without a letter or digit are left out.
    """
    found: dict[str, str] = {}
    for segment in _SEGMENTS[split].findall(text):
        words = " ".join(strings.words(segment))
        if words:
            found.setdefault(words, segment.strip())
    return list(found.values())

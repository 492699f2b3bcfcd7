"""A reward that looks: the answer names the picture's dominant primary colour."""

from mmrl import AnswerType, Response, RewardValue, Sample, Unscorable, reward
from mmrl_rewards import answer_value, target_value

COLOURS = ("red", "green", "blue")


@reward(name="dominant_colour", answer_types=(AnswerType.TEXT,), looks=True)
def dominant_colour(response: Response, sample: Sample, *, margin: float = 0.1) -> RewardValue:
    """Return 1 if the answer is the name of the channel that is brightest in the mean over the picture, else 0.

    Source: this example. Departures: none.
    Unscorable: there is no picture, or no channel is brighter than the others by `margin` of the full range.
    """
    target_value(sample, AnswerType.TEXT)
    means = sample.image(0).mean(axis=(0, 1)) / 255.0
    ranked = sorted(zip(means, COLOURS, strict=True), reverse=True)
    if ranked[0][0] - ranked[1][0] < margin:
        raise Unscorable("no colour dominates the picture")
    answer = answer_value(response).strip().lower()
    return RewardValue(float(answer == ranked[0][1]), f"{answer}, expected {ranked[0][1]}")

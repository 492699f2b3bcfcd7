"""A reward that counts traffic lights: 1 for the right number, less the further off the answer is."""

from mmrl import AnswerType, Response, RewardValue, Sample, Unscorable, reward
from mmrl_rewards import answer_value, target_value


@reward(name="traffic_lights", answer_types=(AnswerType.NUMBER,))
def traffic_lights(response: Response, sample: Sample, *, cost_per_light: float = 0.5) -> RewardValue:
    """Return max(0, 1 - cost_per_light * |answer - target|).

    Source: this example. Departures: none.
    Unscorable: the target is not a number of things.
    """
    target = target_value(sample, AnswerType.NUMBER)
    if target < 0 or target != int(target):
        raise Unscorable(f"the target {target} is not a number of traffic lights")
    answer = answer_value(response)
    value = max(0.0, 1.0 - cost_per_light * abs(answer - target))
    return RewardValue(value, f"{answer} traffic lights, expected {target}")

"""A reward that matches sets: which objects are in the picture, in any order, under any of their names."""

from mmrl import AnswerType, Response, RewardValue, Sample, reward
from mmrl_rewards import answer_value, target_value


@reward(name="objects", answer_types=(AnswerType.LIST,))
def objects(response: Response, sample: Sample, *, synonyms: dict[str, str] = {}) -> RewardValue:  # noqa: B006
    """Return 2 |A & B| / (|A| + |B|), the F1 of the answered set A and the target's set B; a list that repeats gets 0.

    Source: Dice (1945). Departures: none. Unscorable: the target is not a list, or is empty.
    """

    def to_set(names: tuple[str, ...]) -> set[str]:
        lower = [name.strip().lower() for name in names]
        return {synonyms.get(name, name) for name in lower}

    expected = to_set(target_value(sample, AnswerType.LIST))
    answered = answer_value(response)
    if len(to_set(answered)) < len(answered):
        return RewardValue(0.0, "an object is named twice")
    shared = len(to_set(answered) & expected)
    return RewardValue(2 * shared / (len(answered) + len(expected)), f"{shared} of {len(expected)} objects")

"""A group reward for answers that few others gave: the best of several correct ones are not all alike."""

from collections import Counter

from mmrl import Group, RewardValue


def rare_answer(group: Group, *, correct: tuple[str, ...], threshold: float = 1.0) -> tuple[RewardValue, ...]:
    """Return, for each correct rollout, the fraction of the group whose text is another; 0 for each incorrect one.

    Args:
        group: one prompt with its rollouts and their scores.
        correct: names of the reward terms that must all reach `threshold`.
        threshold: the value from which a term counts as correct.
    """
    texts = Counter(rollout.text for rollout in group.rollouts)
    values = []
    for rollout, score in zip(group.rollouts, group.scores, strict=True):
        if all(score.terms[name].value >= threshold for name in correct):
            num_others = len(group.rollouts) - texts[rollout.text]
            values.append(RewardValue(num_others / len(group.rollouts), f"{num_others} wrote something else"))
        else:
            values.append(RewardValue(0.0, "incorrect"))
    return tuple(values)

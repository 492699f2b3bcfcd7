"""A reward that asks a service of yours, which is sent a caption and replies {"score": a number from 0 to 1}."""

import json

from mmrl import AnswerType, Response, RewardValue, Sample, reward
from mmrl_rewards import Endpoint, answer_value, target_value


def read_score(reply: bytes) -> float:
    """Return the score; a ValueError makes the endpoint try again, and then abstain."""
    score = json.loads(reply).get("score")
    if not isinstance(score, int | float) or not 0.0 <= score <= 1.0:
        raise ValueError(f"no score in {reply!r:.80}")
    return float(score)


@reward(name="caption", answer_types=(AnswerType.TEXT,), uses_service=True, timeout_s=120.0)
def caption(response: Response, sample: Sample, *, service: Endpoint) -> RewardValue:
    """Return the service's score of the caption. Unscorable: the target is not text, or the service fails."""
    reference = target_value(sample, AnswerType.TEXT)
    text = answer_value(response)
    score = service.post({"caption": text, "reference": reference}, read_score)
    return RewardValue(score, f"the service gives {score:.2f}")

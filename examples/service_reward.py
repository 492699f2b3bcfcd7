"""A reward that asks your HTTP service. The service gets answer and target, and replies {"score": 0.7}."""

import json

from mmrl import AnswerType, Response, RewardValue, Sample, reward
from mmrl_rewards import Endpoint, answer_value, target_value


# A call may take as long as all tries of the service, which is more than the 10 seconds of other rewards.
@reward(name="served", answer_types=(AnswerType.TEXT,), uses_service=True, timeout_s=300.0)
def served(response: Response, sample: Sample, *, service: Endpoint, max_chars: int = 8000) -> RewardValue:
    """Return the score that the service gives; an answer longer than `max_chars` gets 0 without a request.

    Unscorable: the target is not text, or the service fails.
    """
    target = target_value(sample, AnswerType.TEXT)
    answer = answer_value(response)
    if len(answer) > max_chars:
        return RewardValue(0.0, f"{len(answer)} characters, at most {max_chars} are read")
    score = service.post({"answer": answer, "reference": target}, read_score)
    return RewardValue(score, f"the service says {score:.3g}")


def read_score(reply: bytes) -> float:
    """Return the score of a reply; raise ValueError for anything else, after which the service is asked again."""
    match json.loads(reply):
        case {"score": int() | float() as score} if 0.0 <= score <= 1.0:
            return float(score)
    raise ValueError(f'{reply!r:.80} is not {{"score": a number from 0 to 1}}')

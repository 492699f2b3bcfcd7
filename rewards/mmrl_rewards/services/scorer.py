"""Asks a reward model over HTTP: it answers {"question": .., "response": ..} with {"score": number}."""

from __future__ import annotations

from math import isfinite

from mmrl.answer import parse_answer_value
from mmrl.types import AnswerType
from mmrl_rewards.services.endpoint import Endpoint


class RewardModelService(Endpoint):
    """Address and limits of a reward model."""

    def score(self, question: str, response: str) -> float:
        """Return the model's score, which may be any finite number.

        Raises:
            RequestRejected: the service refuses the request.
            Unscorable: no usable reply after every try.
        """
        return self.post({"question": question, "response": response}, _parse_score)


def _parse_score(reply: bytes) -> float:
    match parse_answer_value(AnswerType.JSON, reply.decode()):
        case {"score": int() | float() as score} if not isinstance(score, bool) and isfinite(score):
            return float(score)
        case other:
            raise ValueError(f'{other!r:.80} is not {{"score": number}}')

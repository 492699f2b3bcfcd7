"""A reward model behind HTTP: {"question": .., "response": ..} is answered by {"score": number}."""

from __future__ import annotations

from math import isfinite

from mmrl.answer import read
from mmrl.types import Kind
from mmrl_rewards.services.endpoint import Endpoint


class ScorerService(Endpoint):
    """Where a reward model listens."""

    def score(self, question: str, response: str) -> float:
        """The model's score, of any finite size.

        Raises:
            Rejected, Unscorable: as `Endpoint.post`.
        """
        return self.post({"question": question, "response": response}, _score)


def _score(reply: bytes) -> float:
    match read(Kind.JSON, reply.decode()):
        case {"score": int() | float() as score} if not isinstance(score, bool) and isfinite(score):
            return float(score)
        case other:
            raise ValueError(f'{other!r:.80} is not {{"score": number}}')

"""A reward of which every response earns something, so that a benchmark's steps learn from the first on."""

from __future__ import annotations

from mmrl.types import Response, Sample, Term
from mmrl_rewards.contract import reward


@reward(name="vowels")
def vowels(response: Response, sample: Sample) -> Term:
    """Share of a response's characters that are vowels."""
    found = sum(character in "aeiou" for character in response.text.lower())
    return Term(found / max(1, len(response.text)), f"{found} of {len(response.text)}")

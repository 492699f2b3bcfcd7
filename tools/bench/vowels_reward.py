"""Rewards vowels: nearly every response earns something, so that a benchmark's steps have a gradient from the start."""

from __future__ import annotations

from mmrl import Response, RewardValue, Sample, reward


@reward(name="vowels")
def vowel_fraction(response: Response, sample: Sample) -> RewardValue:
    """Return the share of a response's characters that are vowels."""
    found = sum(character in "aeiou" for character in response.text.lower())
    return RewardValue(found / max(1, len(response.text)), f"{found} of {len(response.text)}")

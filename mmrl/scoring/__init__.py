"""Scores rollouts by reward functions, which no other package calls."""

from mmrl.scoring.scorer import RewardFunctionScorer
from mmrl.scoring.terms import BoundTerm, RewardError

__all__ = ["BoundTerm", "RewardError", "RewardFunctionScorer"]

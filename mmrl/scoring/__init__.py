"""Scores rollouts by reward functions, which no other package calls."""

from mmrl.scoring.call import RewardError
from mmrl.scoring.combine import BoundTerm
from mmrl.scoring.scorer import RewardFunctionScorer

__all__ = ["BoundTerm", "RewardError", "RewardFunctionScorer"]

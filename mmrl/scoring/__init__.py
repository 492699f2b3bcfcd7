"""Scores rollouts by the reward functions of a config."""

from mmrl.scoring.scorer import RewardFunctionScorer
from mmrl.scoring.terms import BoundTerm, RewardError, RewardProcessError

__all__ = ["BoundTerm", "RewardError", "RewardFunctionScorer", "RewardProcessError"]

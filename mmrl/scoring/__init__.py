"""Scores rollouts by the reward functions of a config."""

from mmrl.scoring.outcomes import RewardError, RewardProcessError
from mmrl.scoring.scorer import RewardFunctionScorer
from mmrl.scoring.terms import BoundTerm

__all__ = ["BoundTerm", "RewardError", "RewardFunctionScorer", "RewardProcessError"]

"""Rollouts and rewards to scored groups; the only caller of reward functions."""

from mmrl.scoring.call import RewardError
from mmrl.scoring.combine import BoundTerm
from mmrl.scoring.scorer import RewardFunctionScorer

__all__ = ["BoundTerm", "RewardError", "RewardFunctionScorer"]

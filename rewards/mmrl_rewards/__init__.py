"""Rewards: pure functions that score one response against one sample. How to add one: rewards/README.md."""

from mmrl_rewards.contract import BadAnswer as BadAnswer
from mmrl_rewards.contract import BoundReward as BoundReward
from mmrl_rewards.contract import Of as Of
from mmrl_rewards.contract import Reward as Reward
from mmrl_rewards.contract import answer_value as answer_value
from mmrl_rewards.contract import bind as bind
from mmrl_rewards.contract import column_value as column_value
from mmrl_rewards.contract import part_text as part_text
from mmrl_rewards.contract import part_value as part_value
from mmrl_rewards.contract import rescale_above as rescale_above
from mmrl_rewards.contract import reward as reward
from mmrl_rewards.contract import target_value as target_value
from mmrl_rewards.services.endpoint import Endpoint as Endpoint
from mmrl_rewards.services.endpoint import RequestRejected as RequestRejected

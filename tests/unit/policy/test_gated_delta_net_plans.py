"""The indices of Gated DeltaNet that docstrings show."""

import torch

from mmrl.policy.batch import PackedGroup
from mmrl.policy.gated_delta_net import plan_append, plan_fork


def test_new_tokens_of_three_rows_move_as_in_the_docstring():
    plan = plan_append(torch.tensor([[0, 0, 1], [0, 1, 1], [1, 1, 1]]), window_length=2)
    assert plan.leftward_RS.tolist() == [[2, 2, 2], [1, 2, 2], [0, 1, 2]]
    assert plan.tokens_RS.tolist() == [[0, 9, 9], [3, 4, 9], [6, 7, 8]]
    assert plan.window_RS.tolist() == [[1, 2], [2, 3], [3, 4]]
    assert plan.rightward_RS.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 2]]


def test_two_prompts_are_forked_as_in_the_docstring():
    plan = plan_fork((PackedGroup(2, (1, 2)), PackedGroup(1, (1,))), 3, torch.device("cpu"))
    assert plan.conv_tokens.tolist() == [*(7, 7, 0, 1), *(0, 1, 2), *(0, 1, 3, 4), *(7, 7, 5), *(7, 5, 6)]
    assert plan.conv_kept_T.tolist() == [2, 3, 6, 9, 10, 13, 16]
    assert [batch.tokens_NS.tolist() for batch in plan.prompts] == [[[0, 1], [5, 7]]]
    assert [batch.tokens_NS.tolist() for batch in plan.responses] == [[[2, 7], [3, 4], [6, 7]]]
    assert plan.prompt_of_response.tolist() == [0, 0, 1]
    assert plan.output_places_T.tolist() == [0, 1, 4, 6, 7, 2, 8]

"""The indices of Gated DeltaNet that docstrings show."""

import torch

from mmrl.policy.gated_delta_net import plan_append


def test_new_tokens_of_three_rows_move_as_in_the_docstring():
    plan = plan_append(torch.tensor([[0, 0, 1], [0, 1, 1], [1, 1, 1]]), window_length=2)
    assert plan.leftward_RS.tolist() == [[2, 2, 2], [1, 2, 2], [0, 1, 2]]
    assert plan.tokens_RS.tolist() == [[0, 9, 9], [3, 4, 9], [6, 7, 8]]
    assert plan.window_RS.tolist() == [[1, 2], [2, 3], [3, 4]]
    assert plan.rightward_RS.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 2]]

"""The formulas of RL: pure functions of rewards, advantages and log-probs, a file for each idea.

`losses` is the only module that needs torch.
"""

"""The pretended device, on which the code of a run does what it would do on a GPU, with nothing computed."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from tool_modules import load_tool

from mmrl.learner.shared_prefix_check import ForwardDifference
from mmrl.plan.pretended_device import pretend_device
from mmrl.policy.policy import PolicyModel, TokenLogprobs
from mmrl.types import UserError


@pytest.fixture(scope="session")
def make_tiny(make_tiny) -> Callable[..., Any]:
    """Make a tiny policy whose heads have 16 channels, the fewest that FlexAttention takes on CUDA."""
    return partial(make_tiny, hidden_size=64)


@pytest.fixture
def device(monkeypatch) -> Iterator[Any]:
    # Nothing is computed, so the check of the shared prefix runs to its end but cannot compare.
    monkeypatch.setattr(ForwardDifference, "within", lambda *_: True)
    with ExitStack() as stack:
        try:
            pretended = stack.enter_context(pretend_device(load_tool("bench/counting_device").CountingDevice))
        except UserError as error:
            pytest.skip(str(error))
        yield pretended


@pytest.fixture
def waits(device) -> Callable[[], Counter[str]]:
    """Count our code's waits for the device since the last call, by place."""

    def take():
        ours = {place: count for place, count in device.synchronisations.items() if place.startswith("mmrl/")}
        device.synchronisations.clear()
        return Counter(ours)

    return take


@pytest.fixture
def unscored(device, monkeypatch) -> None:
    """Replace the forward pass by zeros: for tests of what comes after it."""

    def compute_logprobs(policy, batch, routes_XTK=None):
        scores_2N = torch.zeros(2, len(batch.target_ids_N), device=device.device, requires_grad=True)
        return TokenLogprobs(*scores_2N)

    monkeypatch.setattr(PolicyModel, "compute_logprobs", compute_logprobs)

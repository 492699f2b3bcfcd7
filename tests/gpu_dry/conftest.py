"""The pretended device, on which the code of a run does what it would do on a GPU, with nothing computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from mmrl.learner.shared_prefix_check import ForwardDifference
from mmrl.plan.pretended_device import PretendedDevice, pretend_device
from mmrl.types import UserError


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedDevice]:
    # Nothing is computed, so the check of the shared prefix runs to its end but cannot compare.
    monkeypatch.setattr(ForwardDifference, "within", lambda *_: True)
    with ExitStack() as stack:
        try:
            pretended = stack.enter_context(pretend_device())
        except UserError as error:
            pytest.skip(str(error))
        yield pretended


@pytest.fixture
def waits(device: PretendedDevice) -> Callable[[], Counter[str]]:
    """How often our code has waited for the device since the last call, by place."""

    def take() -> Counter[str]:
        ours = {place: count for place, count in device.synchronisations.items() if place.startswith("mmrl/")}
        device.synchronisations.clear()
        return Counter(ours)

    return take

"""Sections `distributed` and `deepspeed`: several processes of one run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from mmrl.config.schema.base import NonNegativeInt, PositiveFloat, StrictModel


class DistributedConfig(StrictModel):
    """Timeouts of the processes of one run, started by `mmrl train --nproc`, torchrun or deepspeed."""

    heartbeat_s: PositiveFloat = 300.0
    """Seconds without progress after which a process prints its activity and stacks, and the others' activities."""
    timeout_s: PositiveFloat = 1800.0
    """Seconds that a process waits for another before the run ends."""


class DeepspeedConfig(StrictModel):
    """DeepSpeed's ZeRO in place of plain torch; the gradient is the same."""

    zero_stage: Annotated[int, Field(ge=0, le=3)]
    """Sharding among processes: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory and update there; needs `zero_stage` 1 to 3."""
    offload_parameters: bool = False
    """Keep weights in host memory until a layer needs them; needs `zero_stage: 3`."""
    bucket_elements: Annotated[int, Field(ge=1000)] = 500_000_000
    """Elements reduced or gathered at once; fewer take less memory and send more messages."""
    param_persistence_elements: NonNegativeInt = 100_000
    """Under `zero_stage: 3`, weights of fewer elements stay whole on every process."""

    @model_validator(mode="after")
    def _check_offload(self) -> DeepspeedConfig:
        if self.offload_optimizer and not self.zero_stage:
            raise ValueError("offload_optimizer needs `zero_stage` 1, 2 or 3")
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError(f"offload_parameters needs `zero_stage: 3`, not {self.zero_stage}")
        return self

"""Several processes: how long they wait for each other, and what DeepSpeed shards among them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from mmrl.config.schema.base import StrictModel

Seconds = Annotated[float, Field(gt=0.0)]


class DistributedConfig(StrictModel):
    """Several processes of one run, as `mmrl train --nproc`, torchrun or deepspeed starts them."""

    heartbeat_s: Seconds = 300.0
    """A process that is at one thing for longer says at what, with all its stacks and what the others do."""
    timeout_s: Seconds = 1800.0
    """A process that waits for another for longer gives up, and the run ends."""


class DeepspeedConfig(StrictModel):
    """DeepSpeed's ZeRO in place of plain torch; the gradient is the same."""

    zero_stage: Annotated[int, Field(ge=0, le=3)]
    """What is divided among processes: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory, and update there; needs `zero` 1 to 3."""
    offload_parameters: bool = False
    """Keep weights in host memory until a layer needs them; needs `zero: 3`."""
    bucket_elements: Annotated[int, Field(ge=1000)] = 500_000_000
    """Elements that are reduced or gathered at once; fewer take less memory and more messages."""
    param_persistence_elements: Annotated[int, Field(ge=0)] = 100_000
    """With `zero: 3`, smaller weights stay whole on every process."""

    @model_validator(mode="after")
    def _check_offload(self) -> DeepspeedConfig:
        if self.offload_optimizer and not self.zero_stage:
            raise ValueError("offload_optimizer needs `zero` 1, 2 or 3")
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError(f"offload_parameters needs `zero: 3`, not {self.zero_stage}")
        return self

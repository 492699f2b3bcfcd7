"""GPUs that a plan knows: memory, arithmetic and memory bandwidth, as their makers state them."""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.types import UserError


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU."""

    memory_gb: float  # memory, in GB
    peak_tflops: float  # dense bfloat16 multiply-adds with float32 sums, in TFLOP/s, each multiply-add as two
    bandwidth_tbs: float  # memory bandwidth, in TB/s


# Source: NVIDIA's data sheets of A100, H100, H200, L20, L40S, RTX 4090 and H20; dense, where a sheet has sparse numbers
# beside them. H800 computes as H100. The peaks agree with EasyR1's verl/utils/flops_counter.py where that has them.
GPUS = {
    "a100-40gb": Gpu(40.0, 312.0, 1.555),
    "a100-80gb": Gpu(80.0, 312.0, 2.039),
    "h100-80gb": Gpu(80.0, 989.0, 3.35),
    "h800-80gb": Gpu(80.0, 989.0, 3.35),
    "h200-141gb": Gpu(141.0, 989.0, 4.8),
    "h20-96gb": Gpu(96.0, 148.0, 4.0),
    "l20-48gb": Gpu(48.0, 119.5, 0.864),
    "l40s-48gb": Gpu(48.0, 362.0, 0.864),
    "rtx4090-24gb": Gpu(24.0, 165.2, 1.008),
}


def find_gpu(name: str) -> Gpu:
    """Return a GPU by its name.

    Raises:
        UserError: the name is not in the table.
    """
    if name.lower() not in GPUS:
        raise UserError(f"--gpu {name}: unknown; known are {', '.join(GPUS)}")
    return GPUS[name.lower()]

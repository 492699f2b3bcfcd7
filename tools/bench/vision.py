"""CPU time of a vision tower forward and backward, as transformers runs it and as a policy does.

    python tools/bench/vision.py                                    # Qwen2.5-VL and Qwen3-VL, 3 pairs
    python tools/bench/vision.py --family qwen2_5_vl --pairs 9

Both run the same weights in float32 and one thread, in turns; their outputs and gradients must agree. Heads are as wide
as in Qwen2.5-VL-3B, and blocks half as wide. As there, one block in four attends to whole images.
"""

from __future__ import annotations

import copy
import time
from statistics import median
from typing import Any

import torch
from results import format_spread, make_parser, write_results
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from mmrl.config.schema import FromScratchConfig, VisionFromScratchConfig
from mmrl.policy.families import FAMILIES
from mmrl.policy.policy import PolicyModel
from mmrl.policy.tiny_models import make_model, train_tokenizer

CELLS = {
    "an image of 64 x 64 patches": [(1, 64, 64)],
    "an image of 60 x 52 patches": [(1, 60, 52)],
    "four images of 16 x 16 patches": [(1, 16, 16)] * 4,
    "four images of 16 x 12 to 16 x 24 patches": [(1, 16, 12), (1, 16, 16), (1, 16, 20), (1, 16, 24)],
}
TINY_CELLS = {"two images of 8 x 8 patches": [(1, 8, 8)] * 2}
MODEL = FromScratchConfig(
    vision=VisionFromScratchConfig(
        hidden_size=640, num_heads=8, intermediate_size=1920, num_layers=4, patch_size=14, spatial_merge_size=2
    )
)
Grids = list[tuple[int, int, int]]


class CallCounter(TorchDispatchMode):
    """Counts calls of attention kernels, forward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        if "attention" in str(func) and "backward" not in str(func):
            self.count += 1
        return func(*args, **(kwargs or {}))


def make_towers(family: str) -> dict[str, Any]:
    """Return the two towers with the same weights."""
    spec = MODEL.model_copy(update={"family": family})
    model = make_model(spec, train_tokenizer(["a few words are enough"], spec.language.vocab_size), seed=0)
    tower: Any = model.model.visual
    if family == "qwen2_5_vl":
        tower.fullatt_block_indexes = [len(tower.blocks) - 1]
    by_transformers = copy.deepcopy(tower)
    PolicyModel(model)
    return {"transformers": by_transformers.train(), "mmrl": tower.train()}


def run_tower(tower: Any, patches: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
    """Return output and gradients in one tensor."""
    tower.zero_grad()
    output = tower(patches, grid_thw=grids).pooler_output
    output.square().sum().backward()
    gradients = [weight.grad.flatten() for weight in tower.parameters() if weight.grad is not None]
    return torch.cat([output.detach().flatten(), *gradients])


def measure_cell(towers: dict[str, Any], grids: Grids, pairs: int) -> dict[str, Any]:
    """Return CPU seconds of each tower, calls of attention, and the difference of what they compute."""
    grids_I3 = torch.tensor(grids)
    patches = torch.randn(int(grids_I3.prod(dim=1).sum()), 3 * 2 * 14**2, generator=torch.Generator().manual_seed(0))
    results, calls = {}, {}
    for name, tower in towers.items():
        with CallCounter() as counter:
            results[name] = run_tower(tower, patches, grids_I3)
        calls[name] = counter.count
    seconds: dict[str, list[float]] = {name: [] for name in towers}
    for _ in range(pairs):
        for name, tower in towers.items():
            start = time.process_time()
            run_tower(tower, patches, grids_I3)
            seconds[name].append(time.process_time() - start)
    ratios = [theirs / ours for theirs, ours in zip(seconds["transformers"], seconds["mmrl"], strict=True)]
    difference = float((results["mmrl"] - results["transformers"]).norm() / results["transformers"].norm())
    if difference > 1e-5:
        raise SystemExit(f"the two towers differ by {difference:.1e} of the norm of outputs and gradients")
    return {"cpu_s": seconds, "ratios": ratios, "ratio": median(ratios), "calls": calls, "difference": difference}


def main() -> None:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--family", choices=tuple(FAMILIES), action="append", help="qwen2_5_vl and qwen3_vl by default")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each side, in turns")
    parser.add_argument("--tiny", action="store_true", help="two images of 8 x 8 patches only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="A vision tower of four blocks, forward and backward, CPU seconds")
    for heading in ("family", "media", "transformers", "mmrl", "ratio", "calls of attention", "difference"):
        table.add_column(heading)
    numbers = {}
    for family in arguments.family or ("qwen2_5_vl", "qwen3_vl"):
        towers = make_towers(family)
        for media, grids in (TINY_CELLS if arguments.tiny else CELLS).items():
            cell = measure_cell(towers, grids, arguments.pairs)
            numbers[f"{family}: {media}"] = cell
            times = [format_spread(cell["cpu_s"][name]) for name in towers]
            calls = f"{cell['calls']['transformers']}, {cell['calls']['mmrl']}"
            table.add_row(family, media, *times, format_spread(cell["ratios"]), calls, f"{cell['difference']:.1e}")
    Console(width=160).print(table)
    write_results(arguments.json, "vision", numbers)


if __name__ == "__main__":
    main()

"""The model that a benchmark with `--family` makes of each family."""

from __future__ import annotations

from mmrl.config.schema import FromScratchConfig
from mmrl.policy.families import FAMILIES

HYBRID_LAYERS = 8  # twice three layers of Gated DeltaNet and one of attention, as in the released models


def make_spec(model: FromScratchConfig, family: str) -> FromScratchConfig:
    """Return the sizes of `model` for another family."""
    changes = {"num_layers": HYBRID_LAYERS} if FAMILIES[family].has_recurrent_layers else {}
    return model.model_copy(update={"family": family, "language": model.language.model_copy(update=changes)})

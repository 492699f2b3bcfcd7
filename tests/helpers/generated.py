"""Looking at generated samples from outside: their pixels, their options, how often each answer occurs."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from PIL import Image

from mmrl.types import ImageRef, Sample


def pixels(ref: ImageRef) -> np.ndarray:
    """Return an image as RGB, int [height, width, 3]."""
    return np.asarray(Image.open(ref.path).convert("RGB")).astype(int)


def options_of(sample: Sample) -> dict[str, str]:
    """Return the options of a multiple choice question by letter."""
    return {line[0]: line[3:] for line in sample.parts[-1].split("\n")[1:]}


def right_option(sample: Sample) -> str:
    return options_of(sample)[sample.target.value]


def is_uniform(values: Sequence[object], possible: Sequence[object]) -> bool:
    """Return whether all possible values occur equally often, within four standard deviations, and no others."""
    counts, share = Counter(values), 1 / len(possible)
    spread = 4 * (len(values) * share * (1 - share)) ** 0.5
    return set(counts) <= set(possible) and all(abs(counts[v] - len(values) * share) <= spread for v in possible)

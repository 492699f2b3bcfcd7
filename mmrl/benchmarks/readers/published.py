"""Layouts in which each shipped benchmark is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from mmrl.benchmarks.readers import (
    canonical,
    counting,
    emma,
    geometry3k,
    mathverse,
    mathvision,
    mathvista,
    mmmu,
    mvbench,
    refcoco,
    screenspot,
    seed_bench_r1,
    text_in_images,
    video_mme,
)
from mmrl.benchmarks.readers.layouts import RowLayout
from mmrl.benchmarks.readers.vlmevalkit import VlmEvalKitLayout
from mmrl.types import CoordinateSystem

LAYOUTS: Final[Mapping[str, tuple[RowLayout, ...]]] = MappingProxyType(
    {
        "canonical": canonical.LAYOUTS,
        "counting": counting.LAYOUTS,
        "docvqa": text_in_images.DOCVQA_LAYOUTS,
        "emma": emma.LAYOUTS,
        "geometry3k": geometry3k.LAYOUTS,
        "mathverse": mathverse.LAYOUTS,
        "mathvision": mathvision.LAYOUTS,
        "mathvista": mathvista.LAYOUTS,
        "mmmu": mmmu.MMMU_LAYOUTS,
        "mmmu_pro": mmmu.MMMU_PRO_LAYOUTS,
        "mvbench": mvbench.LAYOUTS,
        "ocrbench": text_in_images.OCRBENCH_LAYOUTS,
        "refcoco": refcoco.LAYOUTS,
        "screenspot": screenspot.LAYOUTS,
        "seed_bench_r1": seed_bench_r1.LAYOUTS,
        "textvqa": text_in_images.TEXTVQA_LAYOUTS,
        "video_mme": video_mme.LAYOUTS,
    }
)
"""Layouts by benchmark, the more specific first. COCO's annotations are not rows; its own reader opens them."""


def get_layouts(
    benchmark: str, own_layouts: Sequence[RowLayout] = (), coordinate_system: CoordinateSystem | None = None
) -> tuple[RowLayout, ...]:
    """Return every layout that the files of a benchmark may have, the more specific first.

    Args:
        benchmark: name of the benchmark.
        own_layouts: layouts that a benchmark plug-in brings.
        coordinate_system: set on layouts that need one.
    """
    layouts = (*LAYOUTS.get(benchmark, ()), *own_layouts, canonical.CANONICAL_JSONL)
    return tuple(_prepare_layout(layout, coordinate_system) for layout in layouts)


def _prepare_layout(layout: RowLayout, coordinate_system: CoordinateSystem | None) -> RowLayout:
    if not isinstance(layout, VlmEvalKitLayout):
        return layout
    if not layout.needs_coordinate_system:
        coordinate_system = layout.coordinate_system
    # A fresh copy for each reading: the layout remembers the images of earlier rows.
    return replace(layout, coordinate_system=coordinate_system, images_by_index={})

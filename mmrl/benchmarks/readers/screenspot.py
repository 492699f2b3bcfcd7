"""Layouts of ScreenSpot, ScreenSpot-v2 and ScreenSpot-Pro: their authors' files, and VLMEvalKit's tables."""

from __future__ import annotations

from typing import Final

from mmrl.benchmarks.readers.table_layout import TableLayout
from mmrl.benchmarks.readers.vlmevalkit import VlmEvalKitLayout
from mmrl.types import CoordinateSystem


def _screenspot_pro_table(name: str, image_column: str, signature_column: str) -> TableLayout:
    return TableLayout(
        name=name,
        answer_type="point",
        columns={"images": image_column, "question": "instruction", "answer": "bbox"},
        optional_columns={"id": "id"},
        subset_columns=("ui_type", "group", "platform", "application"),
        signature_columns=(signature_column,),
        coordinate_system=CoordinateSystem.PX_ORIGINAL,
    )


LAYOUTS: Final = (
    VlmEvalKitLayout(
        name="VLMEvalKit's ScreenSpot-Pro",
        open_answer_type="point",
        answer_column="bbox",
        coordinate_system=CoordinateSystem.PX_ORIGINAL,
        signature_columns=("ui_type", "application"),
    ),
    VlmEvalKitLayout(
        name="VLMEvalKit's ScreenSpot",
        open_answer_type="point",
        answer_column="bbox",
        coordinate_system=CoordinateSystem.PX_ORIGINAL,
        signature_columns=("data_type", "data_source"),
        box_format="xywh",
    ),
    _screenspot_pro_table("ScreenSpot-Pro with its pictures", "image", "ui_type"),
    _screenspot_pro_table("ScreenSpot-Pro's", "img_filename", "id"),
    TableLayout(
        name="ScreenSpot-v2's",
        answer_type="point",
        columns={"images": "img_filename", "question": "instruction", "answer": "bbox"},
        subset_columns=("data_type", "data_source"),
        box_format="xywh",
        coordinate_system=CoordinateSystem.PX_ORIGINAL,
    ),
    TableLayout(
        name="ScreenSpot of Hugging Face",
        answer_type="point",
        columns={"images": "image", "question": "instruction", "answer": "bbox"},
        subset_columns=("data_type", "data_source"),
        coordinate_system=CoordinateSystem.NORM_1,
    ),
)

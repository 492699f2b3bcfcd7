"""Layouts of RefCOCO, RefCOCO+ and RefCOCOg: VLM-R1's, lmms-lab's and jxu124's files, and VLMEvalKit's tables."""

from __future__ import annotations

from typing import Final

from mmrl.benchmarks.readers.table_layout import TableLayout
from mmrl.benchmarks.readers.vlmevalkit import VlmEvalKitLayout
from mmrl.types import CoordinateSystem

LAYOUTS: Final = (
    # The table with corner columns comes first: it has the columns of the plain one, too.
    VlmEvalKitLayout(
        name="VLMEvalKit's RefCOCO with corners in pixels",
        open_answer_type="box",
        answer_column=("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2"),
        coordinate_system=CoordinateSystem.PX_ORIGINAL,
        signature_columns=("index", "width", "height"),
    ),
    VlmEvalKitLayout(
        name="VLMEvalKit's RefCOCO",
        open_answer_type="box",
        needs_coordinate_system=True,
        signature_columns=("index", "category"),
    ),
    TableLayout(
        name="VLM-R1's",
        answer_type="box",
        columns={"images": "image", "question": "problem", "answer": "solution"},
        coordinate_system=CoordinateSystem.PX_ORIGINAL,
    ),
    TableLayout(
        name="lmms-lab's",
        answer_type="box",
        # The column `answer` holds the expressions that describe the box.
        columns={"id": "question_id", "images": "image", "question": "Where is {{ answer }}?", "answer": "bbox"},
        box_format="xywh",
        explode_column="answer",
        coordinate_system=CoordinateSystem.PX_ORIGINAL,
    ),
    TableLayout(
        name="jxu124's",
        answer_type="box",
        columns={"id": "ref_id", "images": "image_path", "question": "Where is {{ captions }}?", "answer": "bbox"},
        subset_columns=("split",),
        explode_column="captions",
        coordinate_system=CoordinateSystem.PX_ORIGINAL,
    ),
)

"""Layouts in which each shipped benchmark is published: on Hugging Face, by its authors, and as VLMEvalKit's tables.

`LAYOUTS` at the end lists them by benchmark. COCO's annotations are not rows; their own reader opens them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from mmrl.benchmarks.readers.layouts import RowLayout
from mmrl.benchmarks.readers.table_layout import TableLayout
from mmrl.benchmarks.readers.vlmevalkit import VlmEvalKitLayout
from mmrl.types import CoordinateSystem

CANONICAL_JSONL: Final = TableLayout(
    name="canonical JSONL",
    answer_type="{{ answer_type }}",
    choice_answer=None,
    columns={"id": "id", "answer": "answer"},
    optional_columns={
        role: role
        for role in (
            *("images", "videos", "start", "end", "fps", "frame", "meta"),
            *("question", "prompt", "options", "precision", "unit", "cluster", "image_size"),
        )
    },
)
"""The columns that scoring reads, under their own names. Every benchmark may come in it."""

# Open questions of VLMEvalKit's tables are answered by a text in most benchmarks.
_VLMEVALKIT_TEXT: Final = VlmEvalKitLayout(open_answer_type="text")

_COUNTING: Final = (
    VlmEvalKitLayout(open_answer_type="count"),
    TableLayout(
        name="CountBenchQA",
        answer_type="count",
        columns={"images": "image", "question": "question", "answer": "number"},
    ),
    TableLayout(
        name="R1-V's",
        answer_type="count",
        columns={"images": "image_path", "question": "question", "answer": "ground_truth"},
    ),
    TableLayout(
        name="R1-V's CLEVR",
        answer_type="count",
        # The solution is written as `<answer> 3 </answer>`.
        columns={"images": "image", "question": "problem", "answer": "{{ solution | striptags }}"},
    ),
    TableLayout(
        name="EasyR1's CLEVR",
        answer_type="count",
        columns={"images": "images", "question": "problem", "answer": "answer"},
    ),
)

_DOCVQA: Final = (
    _VLMEVALKIT_TEXT,
    TableLayout(
        name="DocVQA of Hugging Face",
        answer_type="text",
        columns={"id": "questionId", "images": "image", "question": "question", "answer": "answers"},
    ),
)

_EMMA: Final = (
    VlmEvalKitLayout(open_answer_type="text", image_numbering="some"),
    TableLayout(
        name="EMMA of Hugging Face",  # luckychao/EMMA
        answer_type="{{ 'choice' if options else 'text' }}",
        columns={
            "id": "pid",
            "options": "options",
            "images": tuple(f"image_{number}" for number in range(1, 6)),
            "answer": "answer",
            "question": "{% if context %}{{ context }}\n{% endif %}{{ question }}",
        },
        subset_columns=("subject", "task", "category", "source"),
        image_numbering="some",
    ),
)

_GEOMETRY3K: Final = (
    TableLayout(
        name="EasyR1's Geometry3K",  # hiyouga/geometry3k
        answer_type="text",
        columns={"question": "problem", "answer": "answer", "images": "images"},
    ),
)

_MATHVERSE: Final = (
    _VLMEVALKIT_TEXT,
    TableLayout(
        name="MathVerse of Hugging Face",  # AI4Math/MathVerse
        answer_type="{{ 'choice' if question_type == 'multi-choice' else 'text' }}",
        columns={"id": "sample_index", "question": "query_wo", "images": "image", "answer": "answer"},
        subset_columns=("problem_version", "question_type", "metadata.subject", "metadata.subfield"),
        question_lists_options=True,
    ),
)

_MATHVISION_COLUMNS: Final = {
    "id": "id",
    "question": "question",
    "options": "options",
    "images": "decoded_image",
    "answer": "answer",
}
_MATHVISION_TABLE: Final = TableLayout(
    name="MathVision of Hugging Face",
    answer_type="{{ 'choice' if options else 'text' }}",
    columns=_MATHVISION_COLUMNS,
    subset_columns=("level", "subject"),
    image_numbering="parts",
)
_MATHVISION: Final = (
    VlmEvalKitLayout(open_answer_type="text", image_numbering="parts", choices_answer="letter"),
    _MATHVISION_TABLE,
    # The authors' JSON names image files where the Hugging Face dataset holds their pixels.
    replace(_MATHVISION_TABLE, name="MathVision of its authors", columns={**_MATHVISION_COLUMNS, "images": "image"}),
)

_MATHVISTA: Final = (
    _VLMEVALKIT_TEXT,
    TableLayout(
        name="MathVista of Hugging Face",  # AI4Math/MathVista
        answer_type="{{ 'choice' if question_type == 'multi_choice' else answer_type }}",
        choice_answer="text",
        columns={
            "id": "pid",
            "images": "decoded_image",
            "answer": "answer",
            "question": "{{ question }}{% if unit %} (Unit: {{ unit }}){% endif %}",
        },
        optional_columns={"options": "choices", "precision": "precision", "unit": "unit"},
        subset_columns=(
            *("question_type", "answer_type"),
            *("metadata.task", "metadata.category", "metadata.context"),
            *("metadata.grade", "metadata.source", "metadata.skills"),
        ),
    ),
)

_MMMU_COLUMNS: Final = {
    "id": "id",
    "question": "question",
    "options": "options",
    "images": tuple(f"image_{number}" for number in range(1, 8)),
    "answer": "answer",
}
_MMMU: Final = (
    VlmEvalKitLayout(open_answer_type="text", image_numbering="some"),
    TableLayout(
        name="MMMU of Hugging Face",  # MMMU/MMMU
        answer_type="{{ 'choice' if question_type == 'multiple-choice' else 'text' }}",
        columns=_MMMU_COLUMNS,
        subset_columns=("topic_difficulty", "subfield"),
        image_numbering="some",
    ),
)
_MMMU_PRO: Final = (
    VlmEvalKitLayout(open_answer_type="choice", image_numbering="some"),
    TableLayout(
        name="MMMU-Pro of Hugging Face (standard)",  # MMMU/MMMU_Pro
        answer_type="choice",
        columns=_MMMU_COLUMNS,
        subset_columns=("topic_difficulty", "subject"),
        image_numbering="some",
    ),
    TableLayout(
        name="MMMU-Pro of Hugging Face (vision)",
        answer_type="choice",
        columns={
            "id": "id",
            "images": "image",
            "options": "options",
            "answer": "answer",
            # Question and options are part of the screenshot. The condition on `id` makes a template of a fixed text.
            "question": "{% if id %}Answer the question in the picture.{% endif %}",
        },
        subset_columns=("subject",),
        question_lists_options=True,
    ),
)

# Folder in MVBench/video by the name of the file in MVBench/json.
_MVBENCH_VIDEO_FOLDERS: Final = {
    **dict.fromkeys(("action_sequence", "action_prediction", "object_interaction"), "star/Charades_v1_480"),
    **dict.fromkeys(
        ("object_existence", "moving_direction", "moving_count", "moving_attribute", "counterfactual_inference"),
        "clevrer/video_validation",
    ),
    **dict.fromkeys(("object_shuffle", "action_count", "state_change", "character_order"), "perception/videos"),
    "action_antonym": "ssv2_video",
    "fine_grained_action": "Moments_in_Time_Raw/videos",
    "unexpected_action": "FunQA_test/test",
    "action_localization": "sta/sta_video",
    "scene_transition": "scene_qa/video",
    "fine_grained_pose": "nturgbd",
    "egocentric_navigation": "vlnqa",
    "episodic_reasoning": "tvqa/frames_fps3_hq",
}
# `episodic_reasoning` holds folders of frames instead of videos, and their name says how many there are in a second.
_TVQA_FPS: Final = 3.0
_MVBENCH: Final = (
    TableLayout(
        name="VLMEvalKit's MVBench",
        answer_type="choice",
        choice_answer="text",
        columns={
            "id": "index",
            "question": "question",
            "options": "candidates",
            "answer": "answer",
            "videos": "{{ prefix }}/{{ video }}",
        },
        optional_columns={"start": "start", "end": "end"},
        subset_columns=("task_type",),
        fps=_TVQA_FPS,
    ),
    TableLayout(
        name="MVBench of Hugging Face",  # OpenGVLab/MVBench
        answer_type="choice",
        choice_answer="text",
        columns={"question": "question", "options": "candidates", "answer": "answer", "videos": "video"},
        optional_columns={"start": "start", "end": "end"},
        video_folders=_MVBENCH_VIDEO_FOLDERS,
        fps=_TVQA_FPS,
    ),
)

_OCRBENCH: Final = (
    _VLMEVALKIT_TEXT,
    TableLayout(
        name="OCRBench of Hugging Face",
        answer_type="text",
        columns={"images": "image", "question": "question", "answer": "answer"},
        subset_columns=("dataset", "question_type"),
    ),
)

_REFCOCO: Final = (
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

_SCREENSPOT_COLUMNS: Final = {"question": "instruction", "answer": "bbox"}
# The authors' files of ScreenSpot-Pro name image files; a copy on Hugging Face holds their pixels.
_SCREENSPOT_PRO: Final = TableLayout(
    name="ScreenSpot-Pro's",
    answer_type="point",
    columns={"images": "img_filename", **_SCREENSPOT_COLUMNS},
    optional_columns={"id": "id"},
    subset_columns=("ui_type", "group", "platform", "application"),
    signature_columns=("id",),
    coordinate_system=CoordinateSystem.PX_ORIGINAL,
)
_SCREENSPOT: Final = (
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
    replace(
        _SCREENSPOT_PRO,
        name="ScreenSpot-Pro with its pictures",
        columns={"images": "image", **_SCREENSPOT_COLUMNS},
        signature_columns=("ui_type",),
    ),
    _SCREENSPOT_PRO,
    TableLayout(
        name="ScreenSpot-v2's",
        answer_type="point",
        columns={"images": "img_filename", **_SCREENSPOT_COLUMNS},
        subset_columns=("data_type", "data_source"),
        box_format="xywh",
        coordinate_system=CoordinateSystem.PX_ORIGINAL,
    ),
    TableLayout(
        name="ScreenSpot of Hugging Face",
        answer_type="point",
        columns={"images": "image", **_SCREENSPOT_COLUMNS},
        subset_columns=("data_type", "data_source"),
        coordinate_system=CoordinateSystem.NORM_1,
    ),
)

# Some questions have a video of the steps done so far; all have an image of the present.
_IF_PROGRESS: Final = "{% if task_progress_metadata %}"
_SEED_BENCH_R1: Final = (
    TableLayout(
        name="SEED-Bench-R1's",  # TencentARC/SEED-Bench-R1
        answer_type="choice",
        columns={
            "id": "sample_id",
            "images": "images/{{ video_source }}/{{ current_observation_basename }}",
            "question": _IF_PROGRESS + "<video>{% endif %}<image>{{ question }}",
            "options": ("choice_a", "choice_b", "choice_c", "choice_d"),
            "answer": "golden_choice_idx",
        },
        optional_columns={"videos": _IF_PROGRESS + "videos/{{ video_source }}/{{ video_basename }}{% endif %}"},
        subset_columns=("video_source",),
    ),
)

_TEXTVQA: Final = (
    _VLMEVALKIT_TEXT,
    TableLayout(
        name="TextVQA of Hugging Face",
        answer_type="text",
        columns={"id": "question_id", "images": "image", "question": "question", "answer": "answers"},
    ),
)

_VIDEO_MME_SUBSETS: Final = ("duration", "domain", "sub_category", "task_type")
_VIDEO_MME: Final = (
    TableLayout(
        name="VLMEvalKit's Video-MME",
        answer_type="choice",
        columns={
            "id": "index",
            "question": "question",
            "options": "candidates",
            "answer": "answer",
            "videos": "video_path",
        },
        optional_columns={"start": "start", "end": "end"},
        subset_columns=_VIDEO_MME_SUBSETS,
    ),
    TableLayout(
        name="Video-MME of Hugging Face",  # lmms-lab/Video-MME
        answer_type="choice",
        columns={
            "id": "question_id",
            "question": "question",
            "options": "options",
            "answer": "answer",
            "videos": "{{ videoID }}.mp4",
        },
        subset_columns=_VIDEO_MME_SUBSETS,
    ),
)

LAYOUTS: Final[Mapping[str, tuple[RowLayout, ...]]] = MappingProxyType(
    {
        "canonical": (VlmEvalKitLayout(open_answer_type="choice"),),
        "counting": _COUNTING,
        "docvqa": _DOCVQA,
        "emma": _EMMA,
        "geometry3k": _GEOMETRY3K,
        "mathverse": _MATHVERSE,
        "mathvision": _MATHVISION,
        "mathvista": _MATHVISTA,
        "mmmu": _MMMU,
        "mmmu_pro": _MMMU_PRO,
        "mvbench": _MVBENCH,
        "ocrbench": _OCRBENCH,
        "refcoco": _REFCOCO,
        "screenspot": _SCREENSPOT,
        "seed_bench_r1": _SEED_BENCH_R1,
        "textvqa": _TEXTVQA,
        "video_mme": _VIDEO_MME,
    }
)
"""Layouts by benchmark, the more specific first, besides `CANONICAL_JSONL`."""


def get_layouts(
    benchmark: str, own_layouts: Sequence[RowLayout] = (), coordinate_system: CoordinateSystem | None = None
) -> tuple[RowLayout, ...]:
    """Return every layout that the files of a benchmark may have, the more specific first.

    `own_layouts` are those that a plug-in brings; `coordinate_system` is set on layouts that need one.
    """
    layouts: list[RowLayout] = []
    for layout in (*LAYOUTS.get(benchmark, ()), *own_layouts, CANONICAL_JSONL):
        if isinstance(layout, VlmEvalKitLayout):
            system = coordinate_system if layout.needs_coordinate_system else layout.coordinate_system
            # A fresh copy for each reading: the layout remembers the images of earlier rows.
            layouts.append(replace(layout, coordinate_system=system, images_by_index={}))
        else:
            layouts.append(layout)
    return tuple(layouts)

"""How benchmarks are published: what each column of a row is, for every layout that is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from mmrl.benchmarks.readers.layouts import RowLayout, TableLayout
from mmrl.benchmarks.readers.megabench import MegaBenchLayout
from mmrl.benchmarks.readers.vlmevalkit import VlmEvalKitLayout
from mmrl.types import CoordinateSystem
from mmrl_datasets.readers.columns import parse_column


def _make_layout(name: str, kind: str, columns: Mapping[str, str | Sequence[str]], **more: Any) -> TableLayout:  # noqa: ANN401
    """A layout; roles that begin with `?` are those that a row may lack."""
    roles = {role: parse_column(written, role) for role, written in columns.items() if not role.startswith("?")}
    perhaps = {role[1:]: parse_column(written, role) for role, written in columns.items() if role.startswith("?")}
    written = parse_column(kind, "kind") if "{{" in kind else kind
    return TableLayout(name=name, roles=roles, optional_roles=perhaps, answer_type=written, **more)


def _make_vqa_layout(
    name: str, kind: str, columns: Mapping[str, str | Sequence[str]], *subset_columns: str, **more: Any
) -> TableLayout:
    return _make_layout(name, kind, columns, subset_columns=subset_columns, **more)


_MMMU_ANSWER_TYPE: Final = "{{ 'choice' if question_type == 'multiple-choice' else 'text' }}"
_IMAGE_COLUMNS: Final = tuple(f"image_{number}" for number in range(1, 8))
_CANONICAL_LAYOUT: Final = _make_layout(
    "canonical JSONL",
    "{{ answer_type }}",
    {
        "id": "id",
        "answer": "answer",
        **{f"?{role}": role for role in ("images", "videos", "start", "end", "fps", "frame", "meta")},
        **{
            f"?{role}": role for role in ("question", "prompt", "options", "precision", "unit", "cluster", "image_size")
        },
    },
)
_CLICK_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    {"open_answer_type": "point", "answer_column": "bbox", "coordinate_system": CoordinateSystem.PX_ORIGINAL}
)
_PIXEL_BOX_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "open_answer_type": "box",
        "answer_column": ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2"),
        "coordinate_system": CoordinateSystem.PX_ORIGINAL,
    }
)
_VLMEVALKIT_OPTIONS: Final[Mapping[str, tuple[Mapping[str, Any], ...]]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("mathvista", "mathverse", "ocrbench", "textvqa", "docvqa"),
            ({"open_answer_type": "text"},),
        ),
        **dict.fromkeys(("mmmu", "emma"), ({"open_answer_type": "text", "image_numbering": "some"},)),
        "mathvision": ({"open_answer_type": "text", "image_numbering": "parts"},),
        "mmmu_pro": ({"open_answer_type": "choice", "image_numbering": "some"},),
        "canonical": ({"open_answer_type": "choice"},),
        "counting": ({"open_answer_type": "count"},),
        "refcoco": (
            {
                **_PIXEL_BOX_OPTIONS,
                "name": "VLMEvalKit's RefCOCO with corners in pixels",
                "signature_columns": ("index", "width", "height"),
            },
            {
                "open_answer_type": "box",
                "name": "VLMEvalKit's RefCOCO",
                "needs_coordinate_system": True,
                "signature_columns": ("index", "category"),
            },
        ),
        "screenspot": (
            {**_CLICK_OPTIONS, "name": "VLMEvalKit's ScreenSpot-Pro", "signature_columns": ("ui_type", "application")},
            {
                **_CLICK_OPTIONS,
                "name": "VLMEvalKit's ScreenSpot",
                "signature_columns": ("data_type", "data_source"),
                "box_format": "xywh",
            },
        ),
    }
)
_SCREENSPOT_PRO_SUBSETS: Final = ("ui_type", "group", "platform", "application")
_IF_FILMED: Final = "{% if task_progress_metadata %}"  # what was done before was filmed
_PIXEL_COORDINATES: Final = MappingProxyType({"coordinate_system": str(CoordinateSystem.PX_ORIGINAL)})


def _mmmu_layout(name: str, kind: str, *subset_columns: str) -> TableLayout:
    columns = {"id": "id", "question": "question", "options": "options", "images": _IMAGE_COLUMNS, "answer": "answer"}
    return _make_vqa_layout(name, kind, columns, *subset_columns, image_numbering="some")


def _mathvision_layout(name: str, picture: str) -> TableLayout:
    columns = {"id": "id", "question": "question", "options": "options", "images": picture, "answer": "answer"}
    return _make_vqa_layout(
        name, "{{ 'choice' if options else 'text' }}", columns, "level", "subject", image_numbering="parts"
    )


# Reasoning over pictures.
_REASONING_LAYOUTS: Final[Mapping[str, tuple[RowLayout, ...]]] = MappingProxyType(
    {
        "mathvista": (
            _make_vqa_layout(
                "MathVista of Hugging Face",
                "{{ 'choice' if question_type == 'multi_choice' else answer_type }}",
                {
                    **{"id": "pid", "images": "decoded_image", "?options": "choices", "answer": "answer"},
                    **{"?precision": "precision", "?unit": "unit"},
                    "question": "{{ question }}{% if unit %} (Unit: {{ unit }}){% endif %}",
                },
                *("question_type", "answer_type"),
                *(f"metadata.{name}" for name in ("task", "category", "context", "grade", "source", "skills")),
            ),
        ),
        "mathverse": (
            _make_vqa_layout(
                "MathVerse of Hugging Face",
                "{{ 'choice' if question_type == 'multi-choice' else 'text' }}",
                {"id": "sample_index", "question": "query_wo", "images": "image", "answer": "answer"},
                *("problem_version", "question_type", "metadata.subject", "metadata.subfield"),
                question_lists_options=True,
            ),
        ),
        "mathvision": (
            _mathvision_layout("MathVision of Hugging Face", "decoded_image"),
            _mathvision_layout("MathVision of its authors", "image"),
        ),
        "mmmu": (_mmmu_layout("MMMU of Hugging Face", _MMMU_ANSWER_TYPE, "topic_difficulty", "subfield"),),
        "mmmu_pro": (
            _mmmu_layout("MMMU-Pro of Hugging Face (standard)", "choice", "topic_difficulty", "subject"),
            _make_vqa_layout(
                "MMMU-Pro of Hugging Face (vision)",
                "choice",
                {
                    **{"id": "id", "images": "image", "options": "options", "answer": "answer"},
                    "question": "{% if id %}Answer the question in the picture.{% endif %}",
                },
                "subject",
                question_lists_options=True,
            ),
        ),
        "emma": (
            _make_vqa_layout(
                "EMMA of Hugging Face",
                "{{ 'choice' if options else 'text' }}",
                {
                    **{"id": "pid", "options": "options", "images": _IMAGE_COLUMNS[:5], "answer": "answer"},
                    "question": "{% if context %}{{ context }}\n{% endif %}{{ question }}",
                },
                *("subject", "task", "category", "source"),
                image_numbering="some",
            ),
        ),
        "geometry3k": (
            _make_vqa_layout(
                "EasyR1's Geometry3K", "text", {"question": "problem", "answer": "answer", "images": "images"}
            ),
        ),
    }
)


def _screenspot_pro_layout(name: str, picture: str, signature_column: str) -> TableLayout:
    columns = {"?id": "id", "images": picture, "question": "instruction", "answer": "bbox"}
    return _make_vqa_layout(
        name, "point", columns, *_SCREENSPOT_PRO_SUBSETS, signature_columns=(signature_column,), **_PIXEL_COORDINATES
    )


# Where things are, how many, what is written.
_REFCOCO_COLUMNS: Final = MappingProxyType({"images": "image", "question": "Where is {{ answer }}?", "answer": "bbox"})
_PERCEPTION_LAYOUTS: Final[Mapping[str, tuple[RowLayout, ...]]] = MappingProxyType(
    {
        "refcoco": (
            _make_vqa_layout(
                "VLM-R1's",
                "box",
                {"images": "image", "question": "problem", "answer": "solution"},
                **_PIXEL_COORDINATES,
            ),
            _make_vqa_layout(
                "lmms-lab's",
                "box",
                {"id": "question_id", **_REFCOCO_COLUMNS},
                box_format="xywh",
                explode_column="answer",
                **_PIXEL_COORDINATES,
            ),
            _make_vqa_layout(
                "jxu124's",
                "box",
                {"id": "ref_id", "images": "image_path", "question": "Where is {{ captions }}?", "answer": "bbox"},
                "split",
                explode_column="captions",
                **_PIXEL_COORDINATES,
            ),
        ),
        "screenspot": (
            _screenspot_pro_layout("ScreenSpot-Pro with its pictures", "image", "ui_type"),
            _screenspot_pro_layout("ScreenSpot-Pro's", "img_filename", "id"),
            _make_vqa_layout(
                "ScreenSpot-v2's",
                "point",
                {"images": "img_filename", "question": "instruction", "answer": "bbox"},
                *("data_type", "data_source"),
                box_format="xywh",
                **_PIXEL_COORDINATES,
            ),
            _make_vqa_layout(
                "ScreenSpot of Hugging Face",
                "point",
                {"images": "image", "question": "instruction", "answer": "bbox"},
                *("data_type", "data_source"),
                coordinate_system=str(CoordinateSystem.NORM_1),
            ),
        ),
        "ocrbench": (
            _make_vqa_layout(
                "OCRBench of Hugging Face",
                "text",
                {"images": "image", "question": "question", "answer": "answer"},
                *("dataset", "question_type"),
            ),
        ),
        "textvqa": (
            _make_vqa_layout(
                "TextVQA of Hugging Face",
                "text",
                {"id": "question_id", "images": "image", "question": "question", "answer": "answers"},
            ),
        ),
        "docvqa": (
            _make_vqa_layout(
                "DocVQA of Hugging Face",
                "text",
                {"id": "questionId", "images": "image", "question": "question", "answer": "answers"},
            ),
        ),
        "counting": (
            _make_vqa_layout("CountBenchQA", "count", {"images": "image", "question": "question", "answer": "number"}),
            _make_vqa_layout(
                "R1-V's", "count", {"images": "image_path", "question": "question", "answer": "ground_truth"}
            ),
            _make_vqa_layout(
                "R1-V's CLEVR",
                "count",
                {"images": "image", "question": "problem", "answer": "{{ solution | striptags }}"},
            ),
            _make_vqa_layout(
                "EasyR1's CLEVR", "count", {"images": "images", "question": "problem", "answer": "answer"}
            ),
        ),
        "megabench": (MegaBenchLayout(),),
    }
)
# Videos.
_MVBENCH_COLUMNS: Final = MappingProxyType(
    {"question": "question", "options": "candidates", "answer": "answer", "?start": "start", "?end": "end"}
)
_CHARADES, _CLEVRER, _PERCEPTION = "star/Charades_v1_480", "clevrer/video_validation", "perception/videos"
_MVBENCH_FOLDERS: Final = MappingProxyType(  # folders of MVBench/video, by the names of MVBench/json
    {
        **dict.fromkeys(("action_sequence", "action_prediction", "object_interaction"), _CHARADES),
        **dict.fromkeys(("object_existence", "moving_direction", "moving_count", "moving_attribute"), _CLEVRER),
        "counterfactual_inference": _CLEVRER,
        **dict.fromkeys(("object_shuffle", "action_count", "state_change", "character_order"), _PERCEPTION),
        "action_antonym": "ssv2_video",
        "fine_grained_action": "Moments_in_Time_Raw/videos",
        "unexpected_action": "FunQA_test/test",
        "action_localization": "sta/sta_video",
        "scene_transition": "scene_qa/video",
        "fine_grained_pose": "nturgbd",
        "egocentric_navigation": "vlnqa",
        "episodic_reasoning": "tvqa/frames_fps3_hq",
    }
)
_TVQA_FPS: Final = 3.0  # frames a second in the folders of `episodic_reasoning`
_VIDEO_LAYOUTS: Final[Mapping[str, tuple[RowLayout, ...]]] = MappingProxyType(
    {
        "mvbench": (
            _make_vqa_layout(
                "VLMEvalKit's MVBench",
                "choice",
                {"id": "index", **_MVBENCH_COLUMNS, "videos": "{{ prefix }}/{{ video }}"},
                "task_type",
                fps=_TVQA_FPS,
            ),
            _make_vqa_layout(
                "MVBench of Hugging Face",
                "choice",
                {**_MVBENCH_COLUMNS, "videos": "video"},
                video_folders=_MVBENCH_FOLDERS,
                fps=_TVQA_FPS,
            ),
        ),
        "video_mme": (
            _make_vqa_layout(
                "VLMEvalKit's Video-MME",
                "choice",
                {"id": "index", **_MVBENCH_COLUMNS, "videos": "video_path"},
                *("duration", "domain", "sub_category", "task_type"),
            ),
            _make_vqa_layout(
                "Video-MME of Hugging Face",
                "choice",
                {
                    **{"id": "question_id", "videos": "{{ videoID }}.mp4", "question": "question"},
                    **{"options": "options", "answer": "answer"},
                },
                *("duration", "domain", "sub_category", "task_type"),
            ),
        ),
        "seed_bench_r1": (
            _make_vqa_layout(
                "SEED-Bench-R1's",
                "choice",
                {
                    "id": "sample_id",
                    "?videos": _IF_FILMED + "videos/{{ video_source }}/{{ video_basename }}{% endif %}",
                    "images": "images/{{ video_source }}/{{ current_observation_basename }}",
                    "question": _IF_FILMED + "<video>{% endif %}<image>{{ question }}",
                    "options": ("choice_a", "choice_b", "choice_c", "choice_d"),
                    "answer": "golden_choice_idx",
                },
                "video_source",
            ),
        ),
    }
)
LAYOUTS: Final[Mapping[str, tuple[RowLayout, ...]]] = MappingProxyType(
    {**_REASONING_LAYOUTS, **_PERCEPTION_LAYOUTS, **_VIDEO_LAYOUTS}
)
"""The layouts of every benchmark but those that everything may come in; COCO's has a reader of its own."""


def get_layouts(benchmark: str, coordinate_system: CoordinateSystem | None = None) -> tuple[RowLayout, ...]:
    """Every layout that a benchmark may come in, the more particular first; `frame` is for those that ask for it."""
    kits = (VlmEvalKitLayout(**options) for options in _VLMEVALKIT_OPTIONS.get(benchmark, ()))
    framed = (replace(kit, coordinate_system=coordinate_system) if kit.needs_coordinate_system else kit for kit in kits)
    return (*framed, *LAYOUTS.get(benchmark, ()), _CANONICAL_LAYOUT)

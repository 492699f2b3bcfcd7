"""How benchmarks are published: what each column of a row is, for every layout that is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from mmrl.benchmarks.readers.layouts import Layout, Table
from mmrl.benchmarks.readers.megabench import MegaBench
from mmrl.benchmarks.readers.vlmevalkit import VlmEvalKit
from mmrl.types import Frame
from mmrl_datasets.readers.columns import column


def _table(name: str, kind: str, columns: Mapping[str, str | Sequence[str]], **more: Any) -> Table:  # noqa: ANN401
    """A layout; roles that begin with `?` are those that a row may lack."""
    roles = {role: column(written, role) for role, written in columns.items() if not role.startswith("?")}
    perhaps = {role[1:]: column(written, role) for role, written in columns.items() if role.startswith("?")}
    written = column(kind, "kind") if "{{" in kind else kind
    return Table(name=name, roles=roles, perhaps=perhaps, kind=written, **more)


def _vqa(name: str, kind: str, columns: Mapping[str, str | Sequence[str]], *groups: str, **more: Any) -> Table:  # noqa: ANN401
    return _table(name, kind, columns, groups=groups, **more)


_MMMU_KIND: Final = "{{ 'choice' if question_type == 'multiple-choice' else 'text' }}"
_SEVEN: Final = tuple(f"image_{number}" for number in range(1, 8))
_CANONICAL: Final = _table(
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
_CLICK: Final[Mapping[str, Any]] = MappingProxyType({"kind": "point", "answer": "bbox", "frame": Frame.PX_ORIGINAL})
_PIXELS: Final[Mapping[str, Any]] = MappingProxyType(
    {"kind": "box", "answer": ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2"), "frame": Frame.PX_ORIGINAL}
)
_KIT: Final[Mapping[str, tuple[Mapping[str, Any], ...]]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("mathvista", "mathverse", "ocrbench", "textvqa", "docvqa"),
            ({"kind": "text"},),
        ),
        **dict.fromkeys(("mmmu", "emma"), ({"kind": "text", "named": "some"},)),
        "mathvision": ({"kind": "text", "named": "parts"},),
        "mmmu_pro": ({"kind": "choice", "named": "some"},),
        "canonical": ({"kind": "choice"},),
        "counting": ({"kind": "count"},),
        "refcoco": (
            {**_PIXELS, "name": "VLMEvalKit's RefCOCO with corners in pixels", "marks": ("index", "width", "height")},
            {"kind": "box", "name": "VLMEvalKit's RefCOCO", "asks_frame": True, "marks": ("index", "category")},
        ),
        "screenspot": (
            {**_CLICK, "name": "VLMEvalKit's ScreenSpot-Pro", "marks": ("ui_type", "application")},
            {**_CLICK, "name": "VLMEvalKit's ScreenSpot", "marks": ("data_type", "data_source"), "corners": "xywh"},
        ),
    }
)
_PRO: Final = ("ui_type", "group", "platform", "application")
_SEEN: Final = "{% if task_progress_metadata %}"  # what was done before was filmed
_BOX: Final = MappingProxyType({"frame": str(Frame.PX_ORIGINAL)})


def _mmmu(name: str, kind: str, *groups: str) -> Table:
    columns = {"id": "id", "question": "question", "options": "options", "images": _SEVEN, "answer": "answer"}
    return _vqa(name, kind, columns, *groups, named="some")


def _mathvision(name: str, picture: str) -> Table:
    columns = {"id": "id", "question": "question", "options": "options", "images": picture, "answer": "answer"}
    return _vqa(name, "{{ 'choice' if options else 'text' }}", columns, "level", "subject", named="parts")


# Reasoning over pictures.
_REASONING: Final[Mapping[str, tuple[Layout, ...]]] = MappingProxyType(
    {
        "mathvista": (
            _vqa(
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
            _vqa(
                "MathVerse of Hugging Face",
                "{{ 'choice' if question_type == 'multi-choice' else 'text' }}",
                {"id": "sample_index", "question": "query_wo", "images": "image", "answer": "answer"},
                *("problem_version", "question_type", "metadata.subject", "metadata.subfield"),
                lists=True,
            ),
        ),
        "mathvision": (
            _mathvision("MathVision of Hugging Face", "decoded_image"),
            _mathvision("MathVision of its authors", "image"),
        ),
        "mmmu": (_mmmu("MMMU of Hugging Face", _MMMU_KIND, "topic_difficulty", "subfield"),),
        "mmmu_pro": (
            _mmmu("MMMU-Pro of Hugging Face (standard)", "choice", "topic_difficulty", "subject"),
            _vqa(
                "MMMU-Pro of Hugging Face (vision)",
                "choice",
                {
                    **{"id": "id", "images": "image", "options": "options", "answer": "answer"},
                    "question": "{% if id %}Answer the question in the picture.{% endif %}",
                },
                "subject",
                lists=True,
            ),
        ),
        "emma": (
            _vqa(
                "EMMA of Hugging Face",
                "{{ 'choice' if options else 'text' }}",
                {
                    **{"id": "pid", "options": "options", "images": _SEVEN[:5], "answer": "answer"},
                    "question": "{% if context %}{{ context }}\n{% endif %}{{ question }}",
                },
                *("subject", "task", "category", "source"),
                named="some",
            ),
        ),
        "geometry3k": (
            _vqa("EasyR1's Geometry3K", "text", {"question": "problem", "answer": "answer", "images": "images"}),
        ),
    }
)


def _pro(name: str, picture: str, mark: str) -> Table:
    columns = {"?id": "id", "images": picture, "question": "instruction", "answer": "bbox"}
    return _vqa(name, "point", columns, *_PRO, marks=(mark,), **_BOX)


# Where things are, how many, what is written.
_PHRASE: Final = MappingProxyType({"images": "image", "question": "Where is {{ answer }}?", "answer": "bbox"})
_LOOKING: Final[Mapping[str, tuple[Layout, ...]]] = MappingProxyType(
    {
        "refcoco": (
            _vqa("VLM-R1's", "box", {"images": "image", "question": "problem", "answer": "solution"}, **_BOX),
            _vqa("lmms-lab's", "box", {"id": "question_id", **_PHRASE}, corners="xywh", each="answer", **_BOX),
            _vqa(
                "jxu124's",
                "box",
                {"id": "ref_id", "images": "image_path", "question": "Where is {{ captions }}?", "answer": "bbox"},
                "split",
                each="captions",
                **_BOX,
            ),
        ),
        "screenspot": (
            _pro("ScreenSpot-Pro with its pictures", "image", "ui_type"),
            _pro("ScreenSpot-Pro's", "img_filename", "id"),
            _vqa(
                "ScreenSpot-v2's",
                "point",
                {"images": "img_filename", "question": "instruction", "answer": "bbox"},
                *("data_type", "data_source"),
                corners="xywh",
                **_BOX,
            ),
            _vqa(
                "ScreenSpot of Hugging Face",
                "point",
                {"images": "image", "question": "instruction", "answer": "bbox"},
                *("data_type", "data_source"),
                frame=str(Frame.NORM_1),
            ),
        ),
        "ocrbench": (
            _vqa(
                "OCRBench of Hugging Face",
                "text",
                {"images": "image", "question": "question", "answer": "answer"},
                *("dataset", "question_type"),
            ),
        ),
        "textvqa": (
            _vqa(
                "TextVQA of Hugging Face",
                "text",
                {"id": "question_id", "images": "image", "question": "question", "answer": "answers"},
            ),
        ),
        "docvqa": (
            _vqa(
                "DocVQA of Hugging Face",
                "text",
                {"id": "questionId", "images": "image", "question": "question", "answer": "answers"},
            ),
        ),
        "counting": (
            _vqa("CountBenchQA", "count", {"images": "image", "question": "question", "answer": "number"}),
            _vqa("R1-V's", "count", {"images": "image_path", "question": "question", "answer": "ground_truth"}),
            _vqa(
                "R1-V's CLEVR",
                "count",
                {"images": "image", "question": "problem", "answer": "{{ solution | striptags }}"},
            ),
            _vqa("EasyR1's CLEVR", "count", {"images": "images", "question": "problem", "answer": "answer"}),
        ),
        "megabench": (MegaBench(),),
    }
)
# Videos.
_CANDIDATES: Final = MappingProxyType(
    {"question": "question", "options": "candidates", "answer": "answer", "?start": "start", "?end": "end"}
)
_CHARADES, _CLEVRER, _PERCEPTION = "star/Charades_v1_480", "clevrer/video_validation", "perception/videos"
_MVBENCH: Final = MappingProxyType(  # folders of MVBench/video, by the names of MVBench/json
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
_TVQA: Final = 3.0  # frames a second in the folders of `episodic_reasoning`
_WATCHING: Final[Mapping[str, tuple[Layout, ...]]] = MappingProxyType(
    {
        "mvbench": (
            _vqa(
                "VLMEvalKit's MVBench",
                "choice",
                {"id": "index", **_CANDIDATES, "videos": "{{ prefix }}/{{ video }}"},
                "task_type",
                fps=_TVQA,
            ),
            _vqa("MVBench of Hugging Face", "choice", {**_CANDIDATES, "videos": "video"}, folders=_MVBENCH, fps=_TVQA),
        ),
        "video_mme": (
            _vqa(
                "VLMEvalKit's Video-MME",
                "choice",
                {"id": "index", **_CANDIDATES, "videos": "video_path"},
                *("duration", "domain", "sub_category", "task_type"),
            ),
            _vqa(
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
            _vqa(
                "SEED-Bench-R1's",
                "choice",
                {
                    "id": "sample_id",
                    "?videos": _SEEN + "videos/{{ video_source }}/{{ video_basename }}{% endif %}",
                    "images": "images/{{ video_source }}/{{ current_observation_basename }}",
                    "question": _SEEN + "<video>{% endif %}<image>{{ question }}",
                    "options": ("choice_a", "choice_b", "choice_c", "choice_d"),
                    "answer": "golden_choice_idx",
                },
                "video_source",
            ),
        ),
    }
)
LAYOUTS: Final[Mapping[str, tuple[Layout, ...]]] = MappingProxyType({**_REASONING, **_LOOKING, **_WATCHING})
"""The layouts of every benchmark but those that everything may come in; COCO's has a reader of its own."""


def layouts_of(bench: str, frame: Frame | None = None) -> tuple[Layout, ...]:
    """Every layout that a benchmark may come in, the more particular first; `frame` is for those that ask for it."""
    kits = (VlmEvalKit(**options) for options in _KIT.get(bench, ()))
    framed = (replace(kit, frame=frame) if kit.asks_frame else kit for kit in kits)
    return (*framed, *LAYOUTS.get(bench, ()), _CANONICAL)

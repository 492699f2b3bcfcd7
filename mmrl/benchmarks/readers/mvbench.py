"""Layouts of MVBench: the Hugging Face dataset OpenGVLab/MVBench, and VLMEvalKit's table."""

from __future__ import annotations

from typing import Final

from mmrl.benchmarks.readers.table_layout import TableLayout

_CHARADES: Final = "star/Charades_v1_480"
_CLEVRER: Final = "clevrer/video_validation"
_PERCEPTION: Final = "perception/videos"
_VIDEO_FOLDERS: Final = {
    "action_sequence": _CHARADES,
    "action_prediction": _CHARADES,
    "object_interaction": _CHARADES,
    "object_existence": _CLEVRER,
    "moving_direction": _CLEVRER,
    "moving_count": _CLEVRER,
    "moving_attribute": _CLEVRER,
    "counterfactual_inference": _CLEVRER,
    "object_shuffle": _PERCEPTION,
    "action_count": _PERCEPTION,
    "state_change": _PERCEPTION,
    "character_order": _PERCEPTION,
    "action_antonym": "ssv2_video",
    "fine_grained_action": "Moments_in_Time_Raw/videos",
    "unexpected_action": "FunQA_test/test",
    "action_localization": "sta/sta_video",
    "scene_transition": "scene_qa/video",
    "fine_grained_pose": "nturgbd",
    "egocentric_navigation": "vlnqa",
    "episodic_reasoning": "tvqa/frames_fps3_hq",
}
"""Folder in MVBench/video by the name of the file in MVBench/json."""
_TVQA_FPS: Final = 3.0
"""Frames per second in the folders of frames of `episodic_reasoning`, which say it in their name."""

LAYOUTS: Final = (
    TableLayout(
        name="VLMEvalKit's MVBench",
        answer_type="choice",
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
        name="MVBench of Hugging Face",
        answer_type="choice",
        columns={"question": "question", "options": "candidates", "answer": "answer", "videos": "video"},
        optional_columns={"start": "start", "end": "end"},
        video_folders=_VIDEO_FOLDERS,
        fps=_TVQA_FPS,
    ),
)

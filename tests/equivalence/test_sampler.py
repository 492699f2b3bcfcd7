"""What is sampled does not depend on how it is computed, and the learner sees the distribution that was sampled."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from PIL import Image
from recorded import recorded
from rounding import LOGPROBS
from samplers import hf_sampler
from transformers import GenerationConfig

from mmrl.config.schema import LoraConfig
from mmrl.policy.batch import collate, group_by_prompt
from mmrl.policy.families import FAMILIES
from mmrl.policy.logprobs import compute_logprobs, sample_tokens
from mmrl.policy.lora import LoraAdapter
from mmrl.policy.policy import Policy
from mmrl.types import Author, Experience, FinishReason, SamplingParams


def ids_of(groups):
    return [[rollout.segments[0].token_ids for rollout in group] for group in groups]


@pytest.mark.parametrize("family", FAMILIES)
def test_rollouts_do_not_depend_on_batching(make_tiny, family):
    tiny = make_tiny(family)
    prompts = [tiny.processor.build(sample) for sample in tiny.samples]
    together = tiny.sampler().generate(prompts, 4, tiny.params, step=3)
    alone = [tiny.sampler().generate([prompt], 4, tiny.params, step=3)[0] for prompt in prompts]
    assert ids_of(together) == ids_of(alone)
    fewer = tiny.sampler().generate(prompts, 2, tiny.params, step=3)
    assert ids_of(fewer) == [group[:2] for group in ids_of(together)]
    assert len({ids for group in ids_of(together) for ids in group}) > len(prompts)


def gap(tiny):
    """Mean difference of sampler and learner, nats a token."""
    params = replace(tiny.params, max_new_tokens=24, temperature=0.7)
    groups = tiny.sampler().generate([tiny.processor.build(sample) for sample in tiny.samples], 4, params, step=0)
    made = [Experience(rollout=rollout, advantage=1.0) for group in groups for rollout in group]
    batch = collate(group_by_prompt(made), tiny.processor, pad_id=tiny.eos_id)
    with torch.no_grad():
        logprobs_N = tiny.policy.compute_logprobs(batch).logprobs_N
    return float((logprobs_N - recorded(made)).abs().mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_with_a_float32_output_layer_a_bfloat16_sampler_and_the_learner_agree_closer(make_tiny, family):
    """All logits of a large model share an offset, which the softmax cancels, but not what it was rounded to."""
    tiny = make_tiny(family)
    model = tiny.policy.model.to(torch.bfloat16)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head += torch.randn(1, head.shape[1], generator=torch.Generator().manual_seed(0)).to(head)
    rounded, exact = (
        gap(replace(tiny, policy=Policy(model, float32_output_layer=float32))) for float32 in (False, True)
    )
    # Measured: 0.04 to 0.05 and 0.0004 to 0.0005.
    assert rounded > 0.01 and exact < rounded / 20


@pytest.mark.parametrize("tied", [False, True])
def test_a_float32_output_layer_leaves_weights_and_their_type_alone(make_tiny, tied):
    tiny = make_tiny()
    model = tiny.policy.model.to(torch.bfloat16)
    if not tied:
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    policy = Policy(model, float32_output_layer=True)
    copies = [policy, policy.frozen_copy()]
    LoraAdapter(model, LoraConfig(rank=4), seed=0)
    copies.append(Policy(model, float32_output_layer=True).without_adapter())
    (group,) = tiny.sampler().generate([tiny.processor.build(tiny.samples[0])], 3, tiny.params, step=0)
    made = [[Experience(rollout=rollout, advantage=1.0) for rollout in group]]
    batch = collate(made, tiny.processor, pad_id=tiny.eos_id)
    scores = [copy.compute_logprobs(batch) for copy in copies]
    for found in scores:
        assert torch.equal(found.logprobs_N, scores[0].logprobs_N)
        assert torch.equal(found.entropies_N, scores[0].entropies_N)
    assert not torch.equal(Policy(model).compute_logprobs(batch).logprobs_N, scores[0].logprobs_N)
    names = dict(make_tiny().policy.model.state_dict())
    weights = dict(copies[1].model.state_dict())
    assert weights.keys() == names.keys() and {w.dtype for w in weights.values()} == {torch.bfloat16}
    embeddings = copies[1].model.get_input_embeddings().weight
    assert (copies[1].model.get_output_embeddings().weight is embeddings) == tied


def test_step_salt_and_sample_change_what_is_drawn(make_tiny):
    tiny = make_tiny()
    prompt = tiny.processor.build(tiny.samples[0])
    base = ids_of(tiny.sampler("a").generate([prompt], 8, tiny.params, step=0))
    assert base != ids_of(tiny.sampler("a").generate([prompt], 8, tiny.params, step=1))
    assert base != ids_of(tiny.sampler("b").generate([prompt], 8, tiny.params, step=0))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_cut_and_goes_on_is_what_was_never_cut(make_tiny, family):
    """Greedy, so that the random numbers of the two ways do not matter."""
    tiny = make_tiny(family)
    params = replace(tiny.params, temperature=0.0)
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:4]]
    whole = [rollout for (rollout,) in tiny.sampler().generate(prompts, 1, params, step=0)]
    cut = replace(params, max_new_tokens=2)
    begun = [rollout for (rollout,) in tiny.sampler().generate(prompts, 1, cut, step=0)]
    open_ = [rollout for rollout in begun if rollout.finish_reason is FinishReason.LENGTH]
    assert open_
    rest = replace(params, max_new_tokens=params.max_new_tokens - 2)
    for rollout in tiny.sampler().extend(open_, rest, step=0):
        (expected,) = (w for w in whole if w.prompt is rollout.prompt)
        assert [s.author for s in rollout.segments] == [Author.POLICY] * 2
        assert sum((s.token_ids for s in rollout.segments), ()) == expected.segments[0].token_ids
        assert sum((s.logprobs for s in rollout.segments), ()) == pytest.approx(
            expected.segments[0].logprobs, abs=LOGPROBS
        )
        assert (rollout.text, rollout.finish_reason) == (expected.text, expected.finish_reason)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared_prefix", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_learner_computes_the_sampled_log_probs(make_tiny, family, shared_prefix, temperature):
    tiny = make_tiny(family)
    params = replace(tiny.params, temperature=temperature)
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:5]]
    groups = tiny.sampler().generate(prompts, 3, params, step=0)
    experiences = [Experience(rollout=rollout, advantage=1.0) for group in groups for rollout in group]
    batch = collate(group_by_prompt(experiences), tiny.processor, pad_id=tiny.eos_id, shared_prefix=shared_prefix)
    with torch.no_grad():
        scores = tiny.policy.compute_logprobs(batch)
    assert len(scores.logprobs_N) == sum(e.rollout.num_tokens for e in experiences)
    assert (scores.logprobs_N - recorded(experiences)).abs().max() < LOGPROBS


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_the_learner_computes_them_where_a_rollout_went_on_under_another_law(make_tiny, shared_prefix):
    tiny = make_tiny()
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:5]]
    begun = [rollout for group in tiny.sampler().generate(prompts, 2, tiny.params, step=0) for rollout in group]
    cooler = replace(tiny.params, temperature=0.6)
    rollouts = tiny.sampler().extend(begun, cooler, step=0)
    assert all(
        (r.sampling_params, r.segments[0].sampling_params, r.segments[1].sampling_params) == (tiny.params, None, cooler)
        for r in rollouts
    )
    experiences = [Experience(rollout=rollout, advantage=1.0) for rollout in rollouts]
    batch = collate(group_by_prompt(experiences), tiny.processor, pad_id=tiny.eos_id, shared_prefix=shared_prefix)
    with torch.no_grad():
        scores = tiny.policy.compute_logprobs(batch)
    assert len(set(batch.temperature_N.tolist())) == 2
    assert (scores.logprobs_N - recorded(experiences)).abs().max() < LOGPROBS


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_generate(make_tiny, family):
    tiny = make_tiny(family)
    sample = tiny.samples[0]
    prompt = tiny.processor.build(sample)
    params = replace(tiny.params, temperature=0.0)
    ours = tiny.sampler().generate([prompt], 1, params, step=0)[0][0].segments[0].token_ids
    picture = Image.open(sample.images[0].path).convert("RGB")
    inputs = tiny.processor.hf_processor(
        text=[tiny.processor.encoder.render_chat(sample)], images=[picture], return_tensors="pt"
    )
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=params.max_new_tokens,
        suppress_tokens=list(params.banned_token_ids),
        eos_token_id=tiny.eos_id,
        pad_token_id=tiny.eos_id,
    )
    theirs = tiny.policy.model.generate(**inputs, generation_config=config)[0, len(prompt.token_ids) :].tolist()
    assert tuple(theirs) == ours


def test_banned_tokens_are_never_drawn(make_tiny):
    tiny = make_tiny()
    prompt = tiny.processor.build(tiny.samples[0])
    groups = tiny.sampler().generate([prompt], 200, replace(tiny.params, temperature=5.0), step=0)
    drawn = {token for rollout in groups[0] for token in rollout.segments[0].token_ids}
    assert not drawn & set(tiny.params.banned_token_ids)
    assert tiny.processor.placeholders.image_id in tiny.params.banned_token_ids
    assert len(drawn) > 100


def test_finish_and_authors_are_recorded(make_tiny):
    tiny = make_tiny()
    prompt = tiny.processor.build(tiny.samples[0])
    for rollout in tiny.sampler().generate([prompt], 64, replace(tiny.params, temperature=3.0), step=0)[0]:
        (segment,) = rollout.segments
        assert segment.author is Author.POLICY
        ended = segment.token_ids[-1] == tiny.eos_id
        assert rollout.finish_reason is (FinishReason.EOS if ended else FinishReason.LENGTH)
        assert ended or len(segment.token_ids) == tiny.params.max_new_tokens
        assert tiny.eos_id not in segment.token_ids[:-1]


def test_a_response_ends_with_the_token_that_completes_a_stop_string(make_tiny):
    """The same random numbers with and without: what ends at a stop string is the beginning of what continues."""
    tiny = make_tiny()
    prompt = tiny.processor.build(tiny.samples[0])
    params = replace(tiny.params, temperature=2.0, max_new_tokens=12)
    (free,) = tiny.sampler().generate([prompt], 40, params, step=0)
    stops = tuple(free[i].text[4:7] for i in range(3))  # three characters may lie across tokens
    (stopped,) = tiny.sampler().generate([prompt], 40, replace(params, stop=stops), step=0)
    for whole, part in zip(free, stopped, strict=True):
        ids, found = whole.segments[0].token_ids, part.segments[0].token_ids
        ends = [n for n in range(1, len(ids) + 1) if any(stop in tiny.processor.decode(ids[:n]) for stop in stops)]
        assert found == (ids[: ends[0]] if ends else ids)
        if not ends or found[-1] == tiny.eos_id:
            assert part.finish_reason is whole.finish_reason
        else:
            assert part.finish_reason is FinishReason.STOP
    assert {part.finish_reason for part in stopped} >= {FinishReason.STOP, FinishReason.LENGTH}


def test_rollouts_do_not_depend_on_how_many_are_drawn_at_once(make_tiny):
    tiny = make_tiny()
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:4]]
    whole = tiny.sampler().generate(prompts, 3, tiny.params, step=0)
    for tokens_at_once in (1, 200):
        parts = hf_sampler(tiny.policy, tiny.processor, seed_parts=("test",), max_batch_tokens=tokens_at_once)
        assert ids_of(parts.generate(prompts, 3, tiny.params, step=0)) == ids_of(whole)


def params(**options):
    return SamplingParams(max_new_tokens=1, **options)


def test_draw_follows_the_distribution():
    logps = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(20_000, 4)
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(sample_tokens(logps, params(), uniforms), minlength=4) / 20_000
    assert torch.allclose(counts, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=0.015)


@pytest.mark.parametrize(
    ("options", "possible"),
    [({"top_k": 2}, {2, 3}), ({"top_p": 0.5}, {2, 3}), ({"top_p": 0.39}, {3}), ({"temperature": 0.0}, {3})],
)
def test_truncation_keeps_the_likeliest(options, possible):
    logps = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(1000, 4)
    uniforms = torch.linspace(0, 1 - 1e-9, 1000, dtype=torch.float64)
    assert set(sample_tokens(logps, params(**options), uniforms).tolist()) == possible


def test_extreme_uniforms_stay_inside_the_support():
    logps = torch.tensor([[0.5, 0.5, 0.0]]).log()
    for uniform in (0.0, 1.0 - 2**-53):
        assert int(sample_tokens(logps, params(), torch.tensor([uniform], dtype=torch.float64))) in (0, 1)


def test_law_bans_and_tempers():
    logits = torch.tensor([1.0, 2.0, 3.0])
    logps = compute_logprobs(logits, 2.0, banned=(2,))
    expected = math.exp(0.5) / (math.exp(0.5) + math.exp(1.0))
    assert logps[0].exp() == pytest.approx(expected)
    assert logps[2] == -torch.inf
    assert logits.tolist() == [1.0, 2.0, 3.0]

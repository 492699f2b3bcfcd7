"""What is sampled does not depend on how it is computed, and the learner sees the distribution that was sampled."""

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
from mmrl.policy.policy import PolicyModel
from mmrl.types import Author, Experience, FinishReason, SamplingParams


def ids_of(groups):
    return [[rollout.segments[0].token_ids for rollout in group] for group in groups]


def generate(tiny, count=1, num_prompts=1, *, step=0, **params):
    """Groups of responses to the first prompts, under the tiny model's sampling parameters with these changes."""
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:num_prompts]]
    return tiny.sampler().generate(prompts, count, replace(tiny.params, **params), step=step)


def logprob_diffs(tiny, rollouts, *, shared_prefix=True):
    """|learner - sampler| of each token, in nats."""
    experiences = [Experience(rollout=rollout, advantage=1.0) for rollout in rollouts]
    batch = collate(group_by_prompt(experiences), tiny.processor, pad_id=tiny.eos_id, shared_prefix=shared_prefix)
    with torch.no_grad():
        logprobs_N = tiny.policy.compute_logprobs(batch).logprobs_N
    assert len(logprobs_N) == sum(rollout.num_tokens for rollout in rollouts)
    return (logprobs_N - recorded(experiences)).abs()


def flat(groups):
    return [rollout for group in groups for rollout in group]


@pytest.mark.parametrize("family", FAMILIES)
def test_rollouts_do_not_depend_on_batching(make_tiny, family):
    tiny = make_tiny(family)
    prompts = [tiny.processor.build(sample) for sample in tiny.samples]
    together = ids_of(tiny.sampler().generate(prompts, 4, tiny.params, step=3))
    alone = [tiny.sampler().generate([prompt], 4, tiny.params, step=3)[0] for prompt in prompts]
    assert together == ids_of(alone)
    fewer = tiny.sampler().generate(prompts, 2, tiny.params, step=3)
    assert ids_of(fewer) == [group[:2] for group in together]
    assert len({ids for group in together for ids in group}) > len(prompts)


@pytest.mark.parametrize("max_batch_tokens", [1, 200])
def test_rollouts_do_not_depend_on_the_size_of_batches(tiny, max_batch_tokens):
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:4]]
    sampler = hf_sampler(tiny.policy, tiny.processor, max_batch_tokens=max_batch_tokens)
    assert ids_of(sampler.generate(prompts, 3, tiny.params, step=0)) == ids_of(generate(tiny, 3, 4))


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_output_layer_brings_a_bfloat16_sampler_closer_to_the_learner(make_tiny, family):
    """All logits of a large model share an offset, which the softmax cancels, but not what it was rounded to."""
    tiny = make_tiny(family)
    model = tiny.policy.model.to(torch.bfloat16)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head += torch.randn(1, head.shape[1], generator=torch.Generator().manual_seed(0)).to(head)
    means = []
    for float32 in (False, True):
        changed = replace(tiny, policy=PolicyModel(model, float32_output_layer=float32))
        rollouts = flat(generate(changed, 4, len(tiny.samples), max_new_tokens=24, temperature=0.7))
        means.append(float(logprob_diffs(changed, rollouts).mean()))
    # Measured: 0.04 to 0.05 and 0.0004 to 0.0005.
    assert means[0] > 0.01 and means[1] < means[0] / 20


@pytest.mark.parametrize("tied", [False, True])
def test_float32_output_layer_leaves_weights_and_their_type_alone(make_tiny, tied):
    tiny = make_tiny()
    model = tiny.policy.model.to(torch.bfloat16)
    if not tied:
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    policy = PolicyModel(model, float32_output_layer=True)
    policies = [policy, policy.frozen_copy()]
    LoraAdapter(model, LoraConfig(rank=4), seed=0)
    policies.append(PolicyModel(model, float32_output_layer=True).without_adapter())
    experiences = [Experience(rollout=rollout, advantage=1.0) for rollout in flat(generate(tiny, 3))]
    batch = collate([experiences], tiny.processor, pad_id=tiny.eos_id)
    expected, *others = (each.compute_logprobs(batch) for each in policies)
    for scores in others:
        assert torch.equal(scores.logprobs_N, expected.logprobs_N)
        assert torch.equal(scores.entropies_N, expected.entropies_N)
    assert not torch.equal(PolicyModel(model).compute_logprobs(batch).logprobs_N, expected.logprobs_N)
    copied = policies[1].model
    assert copied.state_dict().keys() == make_tiny().policy.model.state_dict().keys()
    assert {weight.dtype for weight in copied.state_dict().values()} == {torch.bfloat16}
    assert (copied.get_output_embeddings().weight is copied.get_input_embeddings().weight) == tied


@pytest.mark.parametrize("family", FAMILIES)
def test_continuation_equals_an_uninterrupted_response(make_tiny, family):
    """Sampled greedily, so that the random numbers of the two do not matter."""
    tiny = make_tiny(family)
    whole = flat(generate(tiny, 1, 4, temperature=0.0))
    cut = flat(generate(tiny, 1, 4, temperature=0.0, max_new_tokens=2))
    unfinished = [rollout for rollout in cut if rollout.finish_reason is FinishReason.LENGTH]
    assert unfinished
    rest = replace(tiny.params, temperature=0.0, max_new_tokens=tiny.params.max_new_tokens - 2)
    for rollout in tiny.sampler().extend(unfinished, rest, step=0):
        (expected,) = (each for each in whole if each.prompt.digest == rollout.prompt.digest)
        first, second = rollout.segments
        assert (first.author, second.author) == (Author.POLICY, Author.POLICY)
        assert first.token_ids + second.token_ids == expected.segments[0].token_ids
        assert first.logprobs + second.logprobs == pytest.approx(expected.segments[0].logprobs, abs=LOGPROBS)
        assert (rollout.text, rollout.finish_reason) == (expected.text, expected.finish_reason)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared_prefix", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_learner_computes_the_sampled_logprobs(make_tiny, family, shared_prefix, temperature):
    tiny = make_tiny(family)
    rollouts = flat(generate(tiny, 3, 5, temperature=temperature))
    assert logprob_diffs(tiny, rollouts, shared_prefix=shared_prefix).max() < LOGPROBS


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_learner_computes_the_logprobs_of_segments_with_other_sampling_parameters(make_tiny, shared_prefix):
    tiny = make_tiny()
    cooler = replace(tiny.params, temperature=0.6)
    rollouts = tiny.sampler().extend(flat(generate(tiny, 2, 5)), cooler, step=0)
    for rollout in rollouts:
        assert rollout.sampling_params == tiny.params
        assert [segment.sampling_params for segment in rollout.segments] == [None, cooler]
    assert logprob_diffs(tiny, rollouts, shared_prefix=shared_prefix).max() < LOGPROBS


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers_generate(make_tiny, family):
    tiny = make_tiny(family)
    # A sample at which no family has two tokens whose logits differ by rounding alone.
    sample = tiny.samples[5]
    greedy = replace(tiny.params, temperature=0.0)
    (rollout,) = flat(tiny.sampler().generate([tiny.processor.build(sample)], 1, greedy, step=0))
    image = Image.open(sample.images[0].path).convert("RGB")
    inputs = tiny.processor.hf_processor(
        text=[tiny.processor.encoder.render_chat(sample)], images=[image], return_tensors="pt"
    )
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=tiny.params.max_new_tokens,
        suppress_tokens=list(tiny.params.banned_token_ids),
        eos_token_id=tiny.eos_id,
        pad_token_id=tiny.eos_id,
    )
    expected = tiny.policy.model.generate(**inputs, generation_config=config)[0, len(rollout.prompt.token_ids) :]
    assert rollout.segments[0].token_ids == tuple(expected.tolist())


def test_banned_tokens_are_never_sampled(tiny):
    sampled = {token for one in flat(generate(tiny, 200, temperature=5.0)) for token in one.segments[0].token_ids}
    assert not sampled & set(tiny.params.banned_token_ids)
    assert tiny.processor.placeholders.image_id in tiny.params.banned_token_ids
    assert len(sampled) > 100


def test_finish_reason_and_author_are_recorded(tiny):
    for rollout in flat(generate(tiny, 64, temperature=3.0)):
        (segment,) = rollout.segments
        assert segment.author is Author.POLICY
        has_ended = segment.token_ids[-1] == tiny.eos_id
        assert rollout.finish_reason is (FinishReason.EOS if has_ended else FinishReason.LENGTH)
        assert has_ended or len(segment.token_ids) == tiny.params.max_new_tokens
        assert tiny.eos_id not in segment.token_ids[:-1]


def test_response_ends_with_the_token_that_completes_a_stop_string(tiny):
    """With the same random numbers, it is the beginning of the response without stop strings."""
    params = {"temperature": 2.0, "max_new_tokens": 12}
    free = flat(generate(tiny, 40, **params))
    stops = tuple(rollout.text[4:7] for rollout in free[:3])  # three characters may lie across tokens
    stopped = flat(generate(tiny, 40, **params, stop=stops))
    for whole, part in zip(free, stopped, strict=True):
        ids, found = whole.segments[0].token_ids, part.segments[0].token_ids
        ends = [n for n in range(1, len(ids) + 1) if any(stop in tiny.processor.decode(ids[:n]) for stop in stops)]
        assert found == (ids[: ends[0]] if ends else ids)
        stops_here = ends and found[-1] != tiny.eos_id
        assert part.finish_reason is (FinishReason.STOP if stops_here else whole.finish_reason)
    assert {part.finish_reason for part in stopped} >= {FinishReason.STOP, FinishReason.LENGTH}


LOGPS = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()


def test_tokens_follow_the_distribution():
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    tokens = sample_tokens(LOGPS.expand(20_000, 4), SamplingParams(max_new_tokens=1), uniforms)
    assert torch.allclose(torch.bincount(tokens, minlength=4) / 20_000, LOGPS.exp(), atol=0.015)


@pytest.mark.parametrize(
    ("options", "possible"),
    [({"top_k": 2}, {2, 3}), ({"top_p": 0.5}, {2, 3}), ({"top_p": 0.39}, {3}), ({"temperature": 0.0}, {3})],
)
def test_truncation_keeps_the_likeliest_tokens(options, possible):
    uniforms = torch.linspace(0, 1 - 1e-9, 1000, dtype=torch.float64)
    params = SamplingParams(max_new_tokens=1, **options)
    assert set(sample_tokens(LOGPS.expand(1000, 4), params, uniforms).tolist()) == possible


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-53])
def test_extreme_uniforms_stay_inside_the_support(uniform):
    logps = torch.tensor([[0.5, 0.5, 0.0]]).log()
    uniforms = torch.tensor([uniform], dtype=torch.float64)
    assert int(sample_tokens(logps, SamplingParams(max_new_tokens=1), uniforms)) in (0, 1)


def test_logprobs_have_temperature_and_bans_and_leave_logits_alone():
    logits = torch.tensor([1.0, 2.0, 3.0])
    logps = compute_logprobs(logits, 2.0, banned=(2,))
    assert logps[0].exp() == pytest.approx(math.exp(0.5) / (math.exp(0.5) + math.exp(1.0)))
    assert logps[2] == -torch.inf
    assert logits.tolist() == [1.0, 2.0, 3.0]

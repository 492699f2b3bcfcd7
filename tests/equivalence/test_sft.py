"""Imitation: packed as well as plain, and of demonstrations exactly the part that is to be learned."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from learning import relative_difference, step_gradient
from processors import make_prompt_processor
from rounding import GRADIENTS

from mmrl.answer import ResponseFormat, ResponseSection
from mmrl.config.schema import SftStage
from mmrl.distributed.ranks import SingleProcess
from mmrl.policy import shared_prefix_attention
from mmrl.policy.batch import PackedGroup
from mmrl.policy.families import FAMILIES
from mmrl.training import sft
from mmrl.types import Author, Experience, Target, UserError

THOUGHT = "one red, then two more"


def thinking(tiny, **response_format):
    """The tiny model's processor with another response format."""
    known = tiny.processor.encoder
    return make_prompt_processor(known.family, known.hf_processor, ResponseFormat(**response_format))


def lessons(tiny, samples, **options):
    demonstrated = (tiny.processor.build_demonstration(tiny.processor.build(s), s.target, **options) for s in samples)
    return [Experience(rollout=rollout, advantage=0.0) for rollout in demonstrated]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("learn", ["response", "answer"])
def test_a_packed_step_has_the_gradient_of_a_padded_one(make_tiny, family, learn):
    tiny = make_tiny(family)
    tiny = replace(tiny, processor=thinking(tiny, thinking="required"))
    experiences = lessons(
        tiny, [replace(s, thinking=THOUGHT * k) for k, s in enumerate(tiny.samples[:6], 1)], loss_on=learn
    )
    told, packed = step_gradient(tiny, experiences)
    again, plain = step_gradient(tiny, experiences, shared_prefix=False)
    assert relative_difference(packed, plain) < GRADIENTS
    assert told == pytest.approx(again, rel=1e-4, abs=1e-6)
    _, few = step_gradient(tiny, experiences, micro_batch_tokens=60)
    assert relative_difference(packed, few) < GRADIENTS


def test_imitation_refuses_an_attention_that_leaks_too(make_tiny, monkeypatch):
    tiny = make_tiny()
    experiences = lessons(tiny, tiny.samples[:3])
    # With everything one sequence, later demonstrations see earlier ones.
    honest = shared_prefix_attention.attention_blocks
    monkeypatch.setattr(
        shared_prefix_attention,
        "attention_blocks",
        lambda tree: honest([PackedGroup(sum(p + sum(own) for p, own in tree), ())]),
    )
    with pytest.raises(UserError, match=r"on sample .* it differs .* nats .* Set shared_prefix: off"):
        step_gradient(tiny, experiences)


@pytest.mark.parametrize(
    ("response_format", "answer"),
    [
        ({"thinking": "required"}, "<answer>3</answer>"),
        ({"thinking": "optional", "style": "boxed"}, r"\boxed{3}"),
        ({"thinking": "required", "style": "json"}, '"answer": 3}'),
        ({"thinking": "none"}, "<answer>3</answer>"),
    ],
)
def test_the_answer_alone_is_learned_given_what_comes_before_it(make_tiny, response_format, answer):
    tiny = make_tiny()
    processor = thinking(tiny, **response_format)
    sample = replace(tiny.samples[0], thinking=THOUGHT)
    target = Target(answer_type=sample.target.answer_type, value=3)
    whole = processor.build_demonstration(processor.build(sample), target)
    part = processor.build_demonstration(processor.build(sample), target, loss_on="answer")
    assert part.text == whole.text and part.answer.value == 3
    assert [token for segment in part.segments for token in segment.token_ids] == list(whole.segments[0].token_ids)
    *given, learned = part.segments
    assert {segment.author for segment in given} <= {
        Author.DEMONSTRATION_PREFIX
    } and learned.author is Author.DEMONSTRATION
    said = processor.decode(learned.token_ids)
    assert said.endswith(answer) and len(said) - len(answer) <= 8  # a token that the answer begins within is its own
    assert bool(given) == (response_format["thinking"] != "none")


def test_a_response_is_learned_as_it_stands(make_tiny):
    tiny = make_tiny()
    prompt = tiny.processor.build(tiny.samples[0])
    rollout = tiny.processor.build_demonstration(prompt, "well:  <answer> 3 </answer>")
    assert rollout.text == tiny.processor.decode(rollout.segments[0].token_ids) == "well:  <answer> 3 </answer>"
    assert rollout.segments[0].token_ids[-1] == tiny.eos_id
    with pytest.raises(UserError, match="the response 'three' has no answer to train on"):
        tiny.processor.build_demonstration(prompt, "three", loss_on="answer")


@pytest.mark.parametrize("style", ["tags", "boxed"])
def test_without_its_thinking_a_demonstration_keeps_all_else(make_tiny, style):
    tiny = make_tiny()
    processor = thinking(tiny, thinking="optional", style=style, sections=(ResponseSection("look"),))
    sample = replace(tiny.samples[0], thinking=f"<look>dots</look>\n<think>{THOUGHT}</think>\n")
    with_it, without = (
        processor.build_demonstration(processor.build(sample), sample.target, with_thinking=thinks)
        for thinks in (True, False)
    )
    assert THOUGHT in with_it.text and THOUGHT not in without.text
    assert without.text.startswith("<look>dots</look>")
    assert not with_it.answer.problems and not without.answer.problems
    assert without.answer.value == with_it.answer.value


class Watcher:
    """A prompt builder that counts how often thinking is asked for, and every other port of an sft stage."""

    def __init__(self, samples):
        self.samples, self.thought = samples, {}

    def take(self, position, count):
        return [self.samples[(position + i) % len(self.samples)] for i in range(count)]

    def build(self, sample):
        return sample

    def build_demonstration(self, prompt, demonstration, *, with_thinking, loss_on):
        self.thought.setdefault(prompt.id, []).append(with_thinking)
        return SimpleNamespace(prompt=SimpleNamespace(digest=prompt.id))

    def step(self, experiences, *, step):
        return {}


def watched(samples, share, salt):
    watcher = Watcher(samples)
    ports = dict.fromkeys(("source", "processor", "learner"), watcher)
    stage = SftStage(
        kind="sft", name="s", steps=100, prompts_per_step=len(samples), target_field="target", drop_thinking_prob=share
    )
    parts = sft.SftParts(
        **ports,
        engine=SimpleNamespace(sleep=lambda: None),
        callbacks=(),
        seed=salt,
        ranks=SingleProcess(),
    )
    sft.train_sft(stage, parts, sft.TrainingState())
    return watcher.thought


def test_thoughts_are_dropped_in_their_share_and_by_the_seed(make_tiny):
    samples = make_tiny().samples[:8]
    thought = watched(samples, 0.3, salt=0)
    drawn = torch.tensor([thought[sample.id] for sample in samples]).float()
    assert abs(drawn.mean() - 0.7) < 4 * (0.3 * 0.7 / 800) ** 0.5
    assert drawn.std(dim=1).min() > 0  # anew each time
    assert watched(samples, 0.3, salt=0) == thought != watched(samples, 0.3, salt=1)
    assert all(all(of_one) for of_one in watched(samples, 0.0, salt=0).values())

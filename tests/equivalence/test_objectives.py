"""Every objective, through a real model: the gradient of a step does not depend on how the step is cut into batches."""

from dataclasses import replace

import pytest
from learning import make_off_policy_experiences, perturbed_copy, relative_difference, step_gradient
from objectives import LOSSES
from rounding import GRADIENTS

from mmrl.learner.objective import Objective
from mmrl.types import Author, FinishReason, Segment


@pytest.fixture(scope="module")
def reference(tiny):
    return perturbed_copy(tiny.policy)


@pytest.fixture(scope="module")
def experiences(tiny):
    """Five groups of four and a demonstration: some with a forced trigger, some truncated, one group without signal."""
    made = []
    *sampled, demonstration = make_off_policy_experiences(tiny, demonstrations=True)[:21]
    for number, experience in enumerate(sampled):
        g, i = divmod(number, 4)
        segments = experience.rollout.segments
        if (g + i) % 3 == 0:
            forced = Segment(token_ids=segments[0].token_ids[:2], logprobs=(0.0, 0.0), author=Author.FORCED)
            segments = (*segments, forced, *segments)
        finish = FinishReason.LENGTH if (g + i) % 4 == 0 else FinishReason.EOS
        is_correct = len(segments) > 1 and i % 2 == 0
        rollout = replace(experience.rollout, segments=segments, finish_reason=finish, is_correct=is_correct)
        made.append(replace(experience, rollout=rollout, advantage=0.0 if g == 2 else experience.advantage))
    return [*made, demonstration]


def gradient(tiny, experiences, loss, reference, **cut):
    reference = reference if loss.kl.coef else None
    return step_gradient(tiny, experiences, loss=loss, reference=reference, step=1, **{"micro_batch_groups": 8, **cut})


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_gradient_does_not_depend_on_batching_order_padding_or_shared_prefix(tiny, reference, experiences, loss):
    groups = [experiences[start : start + 4] for start in range(0, 20, 4)]
    siblings_reversed = [e for group in groups for e in reversed(group)] + experiences[20:]
    groups_reversed = [e for group in reversed(groups) for e in group] + experiences[20:]
    metrics, whole = gradient(tiny, experiences, loss, reference)
    for given, cut in (
        (experiences, {"micro_batch_groups": 1}),
        (siblings_reversed, {"micro_batch_groups": 2}),
        (groups_reversed, {"micro_batch_groups": 4}),
        (experiences, {"micro_batch_groups": 2, "shared_prefix": False}),
    ):
        again, parts = gradient(tiny, given, loss, reference, **cut)
        assert relative_difference(parts, whole) < GRADIENTS, cut
        assert again == pytest.approx(metrics, rel=1e-4, abs=1e-6), cut


@pytest.mark.parametrize("name", ["algorithm grpo", "algorithm gspo", "algorithm rloo", "nll"])
def test_denominators_of_a_micro_batch_would_change_the_gradient(tiny, experiences, monkeypatch, name):
    """The comparison above finds the mistake that it is for."""
    correct = Objective.compute_loss

    def divide_by_own_counts(self, tokens, denominators, **options):
        return correct(self, tokens, self.count_denominators(tokens.experiences), **options)

    _, whole = gradient(tiny, experiences, LOSSES[name], None)
    monkeypatch.setattr(Objective, "compute_loss", divide_by_own_counts)
    _, parts = gradient(tiny, experiences, LOSSES[name], None, micro_batch_groups=1)
    assert relative_difference(parts, whole) > 0.1

"""The objective against a slow version, token by token in plain arithmetic; denominators; what takes part at all."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from objectives import LOSSES, SETTINGS
from rounding import GRADIENTS

from mmrl.config.schema import KlConfig, LossCoefficientConfig, LossConfig, RolloutCorrectionConfig, SftLossConfig
from mmrl.learner.loss import Objective
from mmrl.learner.metrics import Metrics, merge_updates
from mmrl.learner.tokens import make_token_table, select_for_loss
from mmrl.types import Answer, Author, Experience, FinishReason, Rollout, Sample, SamplingParams, Segment, Target

STEPS, STEP = 10, 4
PARAMS = SamplingParams(max_new_tokens=8)
AUTHORS = {"p": Author.POLICY, "t": Author.FORCED, "d": Author.DEMONSTRATION, "e": Author.ENVIRONMENT}
# One letter a token, runs are segments; the advantage.
RESPONSES = [
    ("ppp", 1.0),
    ("p", -1.0),
    ("ppttppp", 0.5),  # right; the next one too, and the last is wrong: a verdict is not an advantage
    ("pppptp", -0.25),
    ("dd", 0.0),
    ("pepp", 0.0),
    ("pp", -3.0),
    ("tpp", 2.0),
]
RIGHT = {"ppttppp": True, "pppptp": True, "tpp": False}


def experience(authors, advantage, *, name="q", behaviour=None, finish=FinishReason.EOS):
    segments, at = [], 0
    behaviour = [-1.0] * len(authors) if behaviour is None else behaviour
    while at < len(authors):
        run = len(authors[at:]) - len(authors[at:].lstrip(authors[at]))
        logps = tuple(behaviour[at : at + run])
        segments.append(Segment(token_ids=(7,) * run, logprobs=logps, author=AUTHORS[authors[at]]))
        at += run
    sample = Sample(id=name, task="t", parts=(), target=Target(answer_type="number", value=0))
    rollout = Rollout(
        prompt=SimpleNamespace(sample=sample),
        index=3,
        segments=tuple(segments),
        text="",
        answer=Answer(text=None, thinking=None, value=None),
        finish_reason=finish,
        sampling_params=PARAMS,
        is_correct=RIGHT.get(authors),
    )
    return Experience(rollout=rollout, advantage=advantage)


def noise(seed, scale, count):
    return scale * torch.randn(count, generator=torch.Generator().manual_seed(seed))


class Scores(NamedTuple):
    """The columns of a token table that models compute, [N] each."""

    current_logprobs_N: torch.Tensor
    entropies_N: torch.Tensor
    recomputed_logprobs_N: torch.Tensor
    reference_logprobs_N: torch.Tensor | None


def loss_of(options, experiences, scores, denominators=None, *, step=STEP):
    """The objective's loss and metrics of a micro-batch, by default of one that is a whole update."""
    objective = Objective(options, STEPS)
    denominators = denominators or objective.count_denominators(experiences)
    tokens = make_token_table(experiences, options, **scores._asdict())
    loss, metrics = objective(tokens, denominators, step=step)
    return loss, metrics


def metrics_of(options, experiences, scores, *, step=STEP):
    return loss_of(options, experiences, taken(scores, reference=False), step=step)[1].values()


def problem():
    """Experiences with log-probs that differ everywhere, [N] each, and how many learned tokens each has."""
    count = sum(len(authors) for authors, _ in RESPONSES)
    behaviour = -1.0 + noise(1, 0.3, count)
    widths = [len(authors) for authors, _ in RESPONSES]
    experiences = [
        experience(authors, advantage, behaviour=values.tolist())
        for (authors, advantage), values in zip(RESPONSES, behaviour.split(widths), strict=True)
    ]
    start = behaviour + noise(2, 0.15, count)
    scores = Scores(start + noise(3, 0.2, count), 1.0 + noise(4, 0.2, count).abs(), start, start + noise(5, 0.3, count))
    learned = torch.tensor([letter in "pd" for authors, _ in RESPONSES for letter in authors])
    widths = [sum(letter in "pd" for letter in authors) for authors, _ in RESPONSES]
    return experiences, Scores(*(values[learned] for values in scores)), widths


def run_problem():
    """The same, with an advantage everywhere: no response is left out of the forward pass."""
    experiences, scores, widths = problem()
    return [replace(each, advantage=each.advantage or 0.75) for each in experiences], scores, widths


def taken(scores, reference, begin=0, end=None):
    """A part of the scores with leaves for what has a gradient; without the reference where there is none."""
    current_N, entropies_N = (values[begin:end].clone().requires_grad_() for values in scores[:2])
    return Scores(
        current_N,
        entropies_N,
        scores.recomputed_logprobs_N[begin:end],
        scores.reference_logprobs_N[begin:end] if reference else None,
    )


def slow(options, experiences, scores):
    """The objective as it is in the papers; every response, every token, one scalar at a time, in float64."""
    factor = {
        part: part.coef * _fall(part.schedule, part.final_frac)
        for part in (options.kl, options.entropy, options.sft_loss)
    }
    logps, entropies = scores.current_logprobs_N.double(), scores.entropies_N.double()
    at, responses, trained_on, imitated = 0, [], [], []
    for each in experiences:
        tokens, triggered = [], False
        for segment in each.rollout.segments:
            triggered = triggered or segment.author is Author.FORCED
            for behaviour in segment.logprobs:
                if segment.author is Author.POLICY:
                    tokens.append((at, behaviour))
                    whole = options.sft_loss.on == "response"
                    if options.sft_loss.coef and (
                        each.advantage > 0 if whole else triggered and each.rollout.is_correct
                    ):
                        imitated.append(at)
                if segment.author is Author.DEMONSTRATION:
                    trained_on.append(at)
                at += segment.author in (Author.POLICY, Author.DEMONSTRATION)
        if tokens:
            responses.append((each, tokens))
    total_tokens = sum(len(tokens) for _, tokens in responses)
    loss = -sum(logps[t] for t in trained_on) / len(trained_on)
    if imitated:
        loss = loss - factor[options.sft_loss] * sum(logps[t] for t in imitated) / len(imitated)
    for each, tokens in responses:
        own = options.model_copy(update={"old_logprobs": each.old_logprobs_source or options.old_logprobs})
        for place, (t, _) in enumerate(tokens):
            term = _token(own, scores, logps, tokens, place, each.advantage, factor[options.kl])
            if options.kl.coef and options.kl.apply_to == "loss":
                term = term + factor[options.kl] * _kl(options.kl, logps[t], float(scores.reference_logprobs_N[t]))
            term = term - factor[options.entropy] * entropies[t]
            share = {
                "token": 1 / total_tokens,
                "sequence": 1 / (len(responses) * len(tokens)),
                "fixed": 1 / (len(responses) * (options.fixed_length or PARAMS.max_new_tokens)),
            }[options.aggregation]
            loss = loss + share * term
    return loss


def _fall(decay, final):
    done = STEP / (STEPS - 1)
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[decay]
    return final + (1 - final) * left


def _kl(options, logp, ref):
    gap = ref - logp
    if options.log_ratio_clip is not None:
        gap = min(max(gap, gap * 0 - options.log_ratio_clip), gap * 0 + options.log_ratio_clip)
    return {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: torch.exp(d) - d - 1}[options.estimator](gap)


def _token(options, scores, logps, tokens, place, advantage, kl_factor):
    start = scores.recomputed_logprobs_N.double()
    olds = [behaviour if options.old_logprobs == "recorded" else float(start[t]) for t, behaviour in tokens]
    gaps = []
    for (t, _), old in zip(tokens, olds, strict=True):
        gap = logps[t] - old
        if options.log_ratio_clip is not None and abs(gap.item()) > options.log_ratio_clip:
            gap = torch.tensor(math.copysign(options.log_ratio_clip, gap.item()), dtype=torch.float64)
        gaps.append(gap)
    own = torch.exp(gaps[place])
    mean = torch.exp(sum(gaps) / len(gaps))
    ratio = {"token": own, "sequence": mean}[options.importance_ratio_level]
    if options.kl.coef and options.kl.apply_to == "reward":
        later = [t for t, _ in tokens[place:]]
        advantage -= kl_factor * sum(
            float(_kl(options.kl, start[t], float(scores.reference_logprobs_N[t]))) for t in later
        )
    low, high = 1 - options.clip_low, 1 + options.clip_high
    clipped = torch.clamp(ratio, low, high)
    if options.policy_loss == "cispo":
        gain = clipped.detach() * advantage * logps[tokens[place][0]]
    else:
        gain = min(ratio * advantage, clipped * advantage)
        if options.dual_clip is not None and advantage < 0:
            gain = max(gain, torch.tensor(options.dual_clip * advantage, dtype=torch.float64))
    log_weights = [float(start[t]) - behaviour for t, behaviour in tokens]
    weight = math.exp(log_weights[place] if options.rollout_correction.level == "token" else sum(log_weights))
    match options.rollout_correction.method if options.old_logprobs == "recomputed" else "none":
        case "none":
            weight = 1.0
        case "tis":
            weight = min(weight, options.rollout_correction.high)
        case "mask":
            weight = weight if options.rollout_correction.low <= weight <= options.rollout_correction.high else 0.0
    return -weight * gain


@pytest.mark.parametrize("replayed", [(), ("recorded", None, "recomputed")], ids=["fresh", "replayed"])
@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_every_objective_equals_its_slow_version_however_it_is_cut(options, replayed):
    experiences, scores, widths = problem()
    whose = [replayed[i % 3] if replayed else None for i in range(len(experiences))]
    experiences = [
        replace(e, staleness=int(old is not None), old_logprobs_source=old)
        for e, old in zip(experiences, whose, strict=True)
    ]
    objective = Objective(options, STEPS)
    counts = objective.count_denominators(experiences)
    slowly = taken(scores, reference=True)
    expected = slow(options, experiences, slowly)
    expected.backward()

    whole = taken(scores, objective.needs_reference)
    loss, metrics = loss_of(options, experiences, whole, counts)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    assert distance(whole.current_logprobs_N.grad, slowly.current_logprobs_N.grad) < GRADIENTS
    if objective.has_entropy_bonus:
        assert distance(whole.entropies_N.grad, slowly.entropies_N.grad) < GRADIENTS

    at, losses, gradients, merged = 0, [], [], Metrics()
    for each, width in zip(experiences, widths, strict=True):
        part = taken(scores, objective.needs_reference, at, at + width)
        one, own_metrics = loss_of(options, [each], part, counts)
        if one.requires_grad:
            one.backward()
        losses.append(one.item())
        gradients.append(
            part.current_logprobs_N.grad if part.current_logprobs_N.grad is not None else torch.zeros(width)
        )
        merged.merge(own_metrics)
        at += width
    assert sum(losses) == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert distance(torch.cat(gradients), whole.current_logprobs_N.grad) < GRADIENTS
    assert merged.values() == pytest.approx(metrics.values(), rel=1e-4)


def test_the_gap_to_the_sampler_is_told_by_the_age_of_tokens():
    """Of this version and of the one before; partial rollouts have tokens of both, and replayed ones are older."""
    experiences, scores, _ = run_problem()
    aged = [replace(experience, staleness=i % 3) for i, experience in enumerate(experiences)]
    first, last = aged[3].rollout.segments[0], aged[3].rollout.segments[-1]
    partial = replace(aged[3].rollout, segments=(first, *aged[3].rollout.segments[1:-1], replace(last, version=1)))
    aged[3] = replace(aged[3], rollout=partial, staleness=1)
    gaps, at = {0: [], 1: [], 2: []}, 0
    for each in aged:
        for segment in each.rollout.segments:
            if segment.author in (Author.POLICY, Author.DEMONSTRATION):
                own = scores.current_logprobs_N[at : at + len(segment.token_ids)] - torch.tensor(segment.logprobs)
                gaps[each.staleness - segment.version] += own.abs().tolist() if segment.author is Author.POLICY else []
                at += len(segment.token_ids)
    assert min(map(len, gaps.values())) > 1
    metrics = metrics_of(LossConfig(), aged, scores)
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(sum(gaps[0]) / len(gaps[0]), rel=1e-5)
    assert metrics["rollout/stale_logprob_diff_mean"] == pytest.approx(sum(gaps[1]) / len(gaps[1]), rel=1e-5)
    assert metrics["rollout/logprob_diff_max"] == pytest.approx(max(gaps[0] + gaps[1]), rel=1e-5)
    aged = [replace(experience, staleness=2) for experience in experiences]
    metrics = metrics_of(LossConfig(), aged, scores)
    assert not [name for name in metrics if "logprob_diff" in name]


@pytest.mark.parametrize("replayed", [False, True], ids=["fresh", "replayed"])
def test_the_update_is_measured_token_by_token(replayed):
    """Clipped shares by side, and Schulman's k3 of KL(old || policy); `old` is recorded or recomputed by response."""
    experiences, scores, _ = run_problem()
    whose = ["recomputed" if replayed and i % 2 else None for i in range(len(experiences))]
    aged = [
        replace(e, staleness=int(old is not None), old_logprobs_source=old)
        for e, old in zip(experiences, whose, strict=True)
    ]
    options = LossConfig(clip_low=0.03, clip_high=0.05)
    divergence, low, high, count, at = 0.0, 0, 0, 0, 0
    for each, old in zip(aged, whose, strict=True):
        for segment in each.rollout.segments:
            if segment.author not in (Author.POLICY, Author.DEMONSTRATION):
                continue
            for behaviour in segment.logprobs:
                before = float(scores.recomputed_logprobs_N[at]) if old == "recomputed" else behaviour
                if segment.author is Author.POLICY:
                    ratio = math.exp(float(scores.current_logprobs_N[at]) - before)
                    divergence += (ratio - 1) - math.log(ratio)
                    low += ratio < 0.97 and each.advantage < 0
                    high += ratio > 1.05 and each.advantage > 0
                    count += 1
                at += 1
    metrics = metrics_of(options, aged, scores)
    assert low > 0 and high > 0 and low + high < count
    assert metrics["policy/approx_kl"] == pytest.approx(divergence / count, rel=1e-4)
    assert metrics["policy/clip_frac_low"] == pytest.approx(low / count)
    assert metrics["policy/clip_frac_high"] == pytest.approx(high / count)
    assert metrics["policy/clip_frac"] == pytest.approx((low + high) / count)


def test_cispo_clips_whatever_the_sign_and_dual_clip_where_it_is_negative():
    experiences, scores, _ = run_problem()
    ratios, advantages, at = [], [], 0
    for each in experiences:
        for segment in each.rollout.segments:
            if segment.author in (Author.POLICY, Author.DEMONSTRATION):
                for behaviour in segment.logprobs:
                    if segment.author is Author.POLICY:
                        ratios.append(math.exp(float(scores.current_logprobs_N[at]) - behaviour))
                        advantages.append(each.advantage)
                    at += 1
    found = {}
    for name, options in {"cispo": {"policy_loss": "cispo"}, "dual": {"dual_clip": 1.05}}.items():
        found[name] = metrics_of(LossConfig(clip_low=0.1, clip_high=0.15, **options), experiences, scores)
    low, high = (sum(map(test, ratios)) / len(ratios) for test in (lambda r: r < 0.9, lambda r: r > 1.15))
    assert found["cispo"]["policy/clip_frac_low"] == pytest.approx(low)
    assert found["cispo"]["policy/clip_frac_high"] == pytest.approx(high)
    assert low > found["dual"]["policy/clip_frac_low"] > 0.0
    negative = [r > 1.05 and a < 0 for r, a in zip(ratios, advantages, strict=True)]
    assert found["dual"]["policy/clip_frac_dual"] == pytest.approx(sum(negative) / len(ratios))
    assert sum(negative) > 0 and "policy/clip_frac_dual" not in found["cispo"]


def test_a_policy_that_has_not_moved_is_no_distance_away():
    experiences, scores, _ = problem()
    still = scores._replace(current_logprobs_N=scores.recomputed_logprobs_N)
    metrics = metrics_of(LossConfig(old_logprobs="recomputed"), experiences, still)
    names = ("policy/approx_kl", "policy/clip_frac", "policy/clip_frac_low", "policy/clip_frac_high")
    assert [metrics[name] for name in names] == [0.0] * 4


def distance(a, b):
    assert float(b.norm()) > 0
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_setting_matters(name):
    """Or the comparison above would prove little."""
    experiences, scores, _ = problem()
    gradients = []
    for options in (LOSSES[name], LossConfig()):
        part = taken(scores, Objective(options, STEPS).needs_reference)
        loss_of(options, experiences, part)[0].backward()
        gradients.append(torch.cat([part.current_logprobs_N.grad, torch.zeros_like(part.current_logprobs_N)]))
        if part.entropies_N.grad is not None:
            gradients[-1][len(part.current_logprobs_N) :] = part.entropies_N.grad
    assert distance(*gradients) > 5e-3


def test_counts():
    experiences, *_ = problem()
    assert Objective(LossConfig(), STEPS).count_denominators(experiences) == (21, 18, (18, 0), 7, 2, 0)
    stale = [replace(each, staleness=index % 2) for index, each in enumerate(experiences)]
    assert Objective(LossConfig(), STEPS).count_denominators(stale) == (21, 18, (10, 8), 7, 2, 0)
    assert (
        Objective(LossConfig(sft_loss=SftLossConfig(coef=0.1)), STEPS).count_denominators(experiences).sft_loss_tokens
        == 3 + 1
    )
    assert (
        Objective(LossConfig(sft_loss=SftLossConfig(coef=0.1, on="response")), STEPS)
        .count_denominators(experiences)
        .sft_loss_tokens
        == 3 + 5 + 2
    )
    assert Objective(LossConfig(), STEPS).count_denominators([experience("", 1.0), experience("p", 0.0)]) == (
        1,
        0,
        (0, 0),
        1,
        0,
        0,
    )


def test_an_advantage_that_is_no_number_is_refused_by_name():
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"sample count-7, rollout 3: advantage {bad} is not finite"):
            select_for_loss([experience("p", 0.0), experience("p", bad, name="count-7")], LossConfig())


def test_truncated_responses_take_no_part_where_they_are_masked():
    whole, cut = experience("pp", 1.0), experience("pppp", -1.0, finish=FinishReason.LENGTH)
    assert select_for_loss([whole, cut], LossConfig()) == [whole, cut]
    masking = LossConfig(mask_truncated=True)
    assert select_for_loss([whole, cut], masking) == [whole]
    assert select_for_loss([cut], masking) == []


def test_who_teaches():
    plain, kl, entropy = (
        Objective(options, STEPS)
        for options in (
            LossConfig(),
            LossConfig(kl=KlConfig(coef=0.1)),
            LossConfig(entropy=LossCoefficientConfig(coef=0.1)),
        )
    )
    for authors, advantage, expected in (
        ("pp", 1.0, (True, True, True)),
        ("pp", 0.0, (False, True, True)),
        ("tt", 1.0, (False, False, False)),
        ("", 1.0, (False, False, False)),
        ("dd", 0.0, (True, True, True)),
    ):
        each = experience(authors, advantage)
        assert tuple(objective.has_gradient(each) for objective in (plain, kl, entropy)) == expected


@pytest.mark.parametrize(("authors", "teaches"), [("ppttppp", True), ("tpp", False), ("pp", False)])
def test_a_continuation_that_ended_right_is_imitated_though_its_whole_group_was(authors, teaches):
    """Where all are right no advantage is left, and the verdict still counts."""
    each = experience(authors, 0.0)
    assert Objective(LossConfig(sft_loss=SftLossConfig(coef=0.1)), STEPS).has_gradient(each) is teaches
    assert not Objective(LossConfig(), STEPS).has_gradient(each)
    assert not Objective(LossConfig(sft_loss=SftLossConfig(coef=0.1, on="response")), STEPS).has_gradient(each)


def test_an_empty_completion_among_others_changes_nothing_but_the_count_of_responses():
    rollout = experience("pp", 1.0).rollout
    nothing = Segment(token_ids=(), logprobs=(), author=Author.POLICY)
    empty = Experience(rollout=replace(rollout, segments=(nothing,)), advantage=1.0)
    objective = Objective(LossConfig(aggregation="sequence"), STEPS)
    assert objective.count_denominators([empty, experience("pp", 1.0)]) == (2, 2, (2, 0), 2, 0, 0)
    scores = Scores(torch.tensor([-1.0, -1.0], requires_grad=True), torch.ones(2), torch.tensor([-1.0, -1.0]), None)
    loss, _ = loss_of(LossConfig(aggregation="sequence"), [empty, experience("pp", 1.0)], scores, step=0)
    assert loss.item() == pytest.approx(-0.5)


def test_importance_weights_are_watched():
    experiences, scores, _ = run_problem()
    correction = RolloutCorrectionConfig(method="mask", low=0.8, high=1.2)
    options = LossConfig(old_logprobs="recomputed", rollout_correction=correction)
    metrics = metrics_of(options, experiences, scores, step=0)
    assert 0.0 < metrics["policy/rollout_correction_weight_mean"] < 1.0
    assert metrics["rollout/logprob_diff_mean"] > 0.0


def test_a_table_selects_whole_rows():
    experiences, scores, _ = problem()
    tokens = make_token_table(experiences, LossConfig(), **taken(scores, reference=False)._asdict())
    demonstrated = tokens.select(tokens.is_demonstration_N)
    assert demonstrated.experiences is tokens.experiences and demonstrated.reference_logprobs_N is None
    assert demonstrated.response_N.tolist() == [4, 4]
    assert not demonstrated.is_policy_N.any() and demonstrated.is_demonstration_N.all()
    at = tokens.is_demonstration_N.nonzero().flatten()
    assert torch.equal(demonstrated.current_logprobs_N, tokens.current_logprobs_N[at])


def update_metrics(*parts, weight):
    """Metrics of an update whose parts have these sums over tokens, of `weight` tokens in all."""
    update = Metrics()
    for part in parts:
        own = Metrics()
        own.mean("mean", part / weight, weight)
        own.mean("per_update", part)
        own.sum("sum", part)
        own.ratio("ratio", part, 2.0)
        own.max("max", part)
        own.min("min", part)
        update.merge(own)
    return update


def test_metrics_of_micro_batches_and_ranks_add_up_to_those_of_an_update():
    expected = {"mean": 1.5, "per_update": 6.0, "sum": 6.0, "ratio": 1.5, "max": 4.0, "min": 2.0}
    assert update_metrics(2.0, 4.0, weight=4).values() == expected


def test_updates_weigh_by_their_tokens():
    merged = merge_updates([update_metrics(2.0, 4.0, weight=4), update_metrics(1.0, weight=2)])
    expected = {"mean": 7.0 / 6.0, "per_update": 3.5, "sum": 7.0, "ratio": 7.0 / 6.0, "max": 4.0, "min": 1.0}
    assert merged.values() == pytest.approx(expected)


def test_a_ratio_of_nothing_is_0():
    metrics = Metrics()
    metrics.ratio("ratio", 0.0, 0)
    assert metrics.values() == {"ratio": 0.0}

"""The objective against a slow version, token by token in plain arithmetic; its denominators and metrics."""

import math
from dataclasses import replace
from itertools import cycle, groupby, islice
from statistics import fmean
from typing import NamedTuple

import pytest
import torch
from factories import make_rollout
from objectives import LOSSES, SETTINGS
from rounding import GRADIENTS

from mmrl.config.schema import LossConfig, RolloutCorrectionConfig, SftLossConfig
from mmrl.learner.metrics import Metrics, merge_updates
from mmrl.learner.objective import Objective
from mmrl.learner.tokens import make_token_table
from mmrl.types import TRAINED_AUTHORS, Author, Experience, Segment

STEPS, STEP = 10, 4
MAX_NEW_TOKENS = make_rollout().sampling_params.max_new_tokens
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
SFT, SFT_RESPONSE = SftLossConfig(coef=0.1), SftLossConfig(coef=0.1, on="response")
RIGHT = {"ppttppp": True, "pppptp": True, "tpp": False}


def make_experience(authors, advantage, *, recorded=None):
    """An experience whose tokens have these authors, one letter each, and these recorded log-probs."""
    segments = []
    logprobs = iter([-1.0] * len(authors) if recorded is None else recorded)
    for letter, run in groupby(authors):
        own = tuple(islice(logprobs, len(list(run))))
        segments.append(Segment(token_ids=(7,) * len(own), logprobs=own, author=AUTHORS[letter]))
    rollout = replace(make_rollout(), segments=tuple(segments), is_correct=RIGHT.get(authors))
    return Experience(rollout=rollout, advantage=advantage)


def noise(seed, scale, count):
    return scale * torch.randn(count, generator=torch.Generator().manual_seed(seed))


class Scores(NamedTuple):
    """The columns of a token table that models compute, [N] each."""

    current_logprobs_N: torch.Tensor
    entropies_N: torch.Tensor
    recomputed_logprobs_N: torch.Tensor
    reference_logprobs_N: torch.Tensor | None


def loss_of(options, experiences, scores, denominators=None):
    """The objective's loss and metrics of a micro-batch, by default of one that is a whole update."""
    objective = Objective(options, STEPS)
    denominators = denominators or objective.count_denominators(experiences)
    tokens = make_token_table(experiences, options, **scores._asdict())
    loss, metrics, _ = objective.compute_loss(tokens, denominators, step=STEP)
    return loss, metrics


def metrics_of(options, experiences, scores):
    return loss_of(options, experiences, taken(scores, reference=False))[1].values()


def make_problem(*, idle=True):
    """Experiences with log-probs that differ everywhere, [N] each, and how many trained tokens each has.

    Unless `idle`, each has an advantage, so that none is left out of the forward pass.
    """
    widths = [len(authors) for authors, _ in RESPONSES]
    count = sum(widths)
    recorded = -1.0 + noise(1, 0.3, count)
    experiences = []
    for (authors, advantage), values in zip(RESPONSES, recorded.split(widths), strict=True):
        advantage_ = advantage if idle else advantage or 0.75
        experiences.append(make_experience(authors, advantage_, recorded=values.tolist()))
    start = recorded + noise(2, 0.15, count)
    scores = Scores(start + noise(3, 0.2, count), 1.0 + noise(4, 0.2, count).abs(), start, start + noise(5, 0.3, count))
    is_trained = torch.tensor([letter in "pd" for authors, _ in RESPONSES for letter in authors])
    num_trained = [sum(letter in "pd" for letter in authors) for authors, _ in RESPONSES]
    return experiences, Scores(*(values[is_trained] for values in scores)), num_trained


def with_sources(experiences, sources):
    """The experiences with these sources of old log-probs in turn; those that have one are stale."""
    changed = []
    for experience, source in zip(experiences, cycle(sources)):
        changed.append(replace(experience, staleness=int(source is not None), old_logprobs_source=source))
    return changed


def sampled_tokens(experiences):
    """Yield the row, the experience, the segment and the recorded log-prob of each token that the policy sampled."""
    row = 0
    for experience in experiences:
        for segment in experience.rollout.segments:
            if segment.author in TRAINED_AUTHORS:
                for logprob in segment.logprobs:
                    if segment.author is Author.POLICY:
                        yield row, experience, segment, logprob
                    row += 1


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
                "fixed": 1 / (len(responses) * (options.fixed_length or MAX_NEW_TOKENS)),
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


@pytest.mark.parametrize("sources", [(None,), ("recorded", None, "recomputed")], ids=["current step", "replayed"])
@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_every_objective_equals_its_slow_version_however_it_is_cut(options, sources):
    experiences, scores, widths = make_problem()
    experiences = with_sources(experiences, sources)
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

    start, losses, gradients, merged = 0, [], [], Metrics()
    for experience, width in zip(experiences, widths, strict=True):
        part = taken(scores, objective.needs_reference, start, start + width)
        part_loss, part_metrics = loss_of(options, [experience], part, counts)
        if part_loss.requires_grad:
            part_loss.backward()
        losses.append(part_loss.item())
        gradient = part.current_logprobs_N.grad
        gradients.append(torch.zeros(width) if gradient is None else gradient)
        merged.merge(part_metrics)
        start += width
    assert sum(losses) == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert distance(torch.cat(gradients), whole.current_logprobs_N.grad) < GRADIENTS
    assert merged.values() == pytest.approx(metrics.values(), rel=1e-4)


def test_the_difference_to_the_sampler_is_measured_by_the_age_of_tokens():
    """Of this version and of the one before; partial rollouts have tokens of both, and replayed ones are older."""
    experiences, scores, _ = make_problem(idle=False)
    aged = [replace(experience, staleness=i % 3) for i, experience in enumerate(experiences)]
    *old_segments, last = aged[3].rollout.segments
    partial = replace(aged[3].rollout, segments=(*old_segments, replace(last, version=1)))
    aged[3] = replace(aged[3], rollout=partial, staleness=1)
    gaps = {0: [], 1: [], 2: []}
    for row, experience, segment, recorded in sampled_tokens(aged):
        gaps[experience.staleness - segment.version].append(abs(float(scores.current_logprobs_N[row]) - recorded))
    assert min(map(len, gaps.values())) > 1
    metrics = metrics_of(LossConfig(), aged, scores)
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(fmean(gaps[0]), rel=1e-5)
    assert metrics["rollout/stale_logprob_diff_mean"] == pytest.approx(fmean(gaps[1]), rel=1e-5)
    assert metrics["rollout/logprob_diff_max"] == pytest.approx(max(gaps[0] + gaps[1]), rel=1e-5)
    metrics = metrics_of(LossConfig(), [replace(experience, staleness=2) for experience in experiences], scores)
    assert not [name for name in metrics if "logprob_diff" in name]


@pytest.mark.parametrize("sources", [(None,), (None, "recomputed")], ids=["current step", "replayed"])
def test_the_update_is_measured_token_by_token(sources):
    """Shares of clipped tokens, extremes of ratios, and Schulman's k3 of KL(old || policy)."""
    experiences, scores, _ = make_problem(idle=False)
    experiences = with_sources(experiences, sources)
    ratios, signs = [], []
    for row, experience, _, recorded in sampled_tokens(experiences):
        old = float(scores.recomputed_logprobs_N[row]) if experience.old_logprobs_source else recorded
        ratios.append(math.exp(float(scores.current_logprobs_N[row]) - old))
        signs.append(math.copysign(1, experience.advantage))
    tokens = list(zip(ratios, signs, strict=True))
    low = fmean(ratio < 0.97 and sign < 0 for ratio, sign in tokens)
    high = fmean(ratio > 1.05 and sign > 0 for ratio, sign in tokens)
    dual = fmean(ratio > 1.06 and sign < 0 for ratio, sign in tokens)
    options = LossConfig(clip_low=0.03, clip_high=0.05, dual_clip=1.06, sft_loss=SFT_RESPONSE)
    metrics = metrics_of(options, experiences, scores)
    expected = {"approx_kl": fmean((ratio - 1) - math.log(ratio) for ratio in ratios)}
    expected |= {"clip_frac_low": low, "clip_frac_high": high, "clip_frac": low + high, "clip_frac_dual": dual}
    expected |= {"importance_ratio_max": max(ratios), "importance_ratio_min": min(ratios)}
    assert {name: metrics[f"policy/{name}"] for name in expected} == pytest.approx(expected, rel=1e-4)
    rows = [row for row, experience, *_ in sampled_tokens(experiences) if experience.advantage > 0]
    assert metrics["learner/sft_loss_nats"] == pytest.approx(-float(scores.current_logprobs_N[rows].mean()), rel=1e-4)
    assert min(low, high, dual) > 0 and low + high < 1
    # CISPO clips whatever the sign of the advantage.
    metrics = metrics_of(LossConfig(clip_low=0.03, clip_high=0.05, policy_loss="cispo"), experiences, scores)
    assert metrics["policy/clip_frac_low"] == pytest.approx(fmean(ratio < 0.97 for ratio in ratios))
    assert metrics["policy/clip_frac_high"] == pytest.approx(fmean(ratio > 1.05 for ratio in ratios))
    assert "policy/clip_frac_dual" not in metrics


def distance(a, b):
    assert float(b.norm()) > 0
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_setting_changes_the_gradient(name):
    """Otherwise the comparison above would prove little."""
    experiences, scores, _ = make_problem()
    gradients = []
    for options in (LOSSES[name], LossConfig()):
        part = taken(scores, Objective(options, STEPS).needs_reference)
        loss_of(options, experiences, part)[0].backward()
        entropy_gradient = part.entropies_N.grad
        if entropy_gradient is None:
            entropy_gradient = torch.zeros_like(part.entropies_N)
        gradients.append(torch.cat([part.current_logprobs_N.grad, entropy_gradient]))
    assert distance(*gradients) > 5e-3


def test_denominators_count_tokens_by_author_age_and_loss():
    experiences, *_ = make_problem()
    stale = [replace(experience, staleness=index % 2) for index, experience in enumerate(experiences)]
    idle = [make_experience("", 1.0), make_experience("p", 0.0)]
    for sft_loss, given, expected in (
        (SftLossConfig(), experiences, (21, 18, (18, 0), 7, 2, 0)),
        (SftLossConfig(), stale, (21, 18, (10, 8), 7, 2, 0)),
        (SFT, experiences, (21, 18, (18, 0), 7, 2, 3 + 1)),
        (SFT_RESPONSE, experiences, (21, 18, (18, 0), 7, 2, 3 + 5 + 2)),
        (SftLossConfig(), idle, (1, 0, (0, 0), 1, 0, 0)),
    ):
        assert Objective(LossConfig(sft_loss=sft_loss), STEPS).count_denominators(given) == expected


def test_an_empty_response_counts_as_a_response():
    empty = Experience(
        rollout=replace(make_rollout(), segments=(Segment(token_ids=(), logprobs=(), author=Author.POLICY),)),
        advantage=1.0,
    )
    experiences, options = [empty, make_experience("pp", 1.0)], LossConfig(aggregation="sequence")
    assert Objective(options, STEPS).count_denominators(experiences) == (2, 2, (2, 0), 2, 0, 0)
    scores = Scores(torch.tensor([-1.0, -1.0], requires_grad=True), torch.ones(2), torch.tensor([-1.0, -1.0]), None)
    loss, _ = loss_of(options, experiences, scores)
    assert loss.item() == pytest.approx(-0.5)


PLAIN, KL, ENTROPY = {}, {"kl": {"coef": 0.1}}, {"entropy": {"coef": 0.1}}


@pytest.mark.parametrize(
    ("authors", "advantage", "with_gradient"),
    [
        ("pp", 1.0, [PLAIN, KL, ENTROPY]),
        ("pp", -1.0, [PLAIN, KL, ENTROPY]),
        ("pp", 0.0, [KL, ENTROPY]),
        ("tt", 1.0, []),
        ("", 1.0, []),
        ("dd", 0.0, [PLAIN, KL, ENTROPY]),
        # A continuation that ended correct is imitated, though its whole group was correct and has no advantage.
        ("ppttppp", 0.0, [KL, ENTROPY, {"sft_loss": SFT}]),
        ("tpp", 0.0, [KL, ENTROPY]),  # it ended incorrect
    ],
)
def test_an_experience_has_a_gradient_if_a_loss_term_may_give_it_one(authors, advantage, with_gradient):
    sft_terms = [{"sft_loss": SFT}, {"sft_loss": SFT_RESPONSE}] if not advantage and "d" not in authors else []
    for terms in [PLAIN, KL, ENTROPY, *sft_terms]:
        objective = Objective(LossConfig(**terms), STEPS)
        experience = make_experience(authors, advantage)
        assert objective.has_gradient_unless_masked(experience) == (terms in with_gradient), terms


def test_correction_weights_are_averaged():
    experiences, scores, _ = make_problem(idle=False)
    correction = RolloutCorrectionConfig(method="mask", low=0.8, high=1.2)
    metrics = metrics_of(LossConfig(old_logprobs="recomputed", rollout_correction=correction), experiences, scores)
    weights = []
    for row, _, _, recorded in sampled_tokens(experiences):
        weight = math.exp(float(scores.recomputed_logprobs_N[row]) - recorded)
        weights.append(weight if 0.8 <= weight <= 1.2 else 0.0)
    assert metrics["policy/rollout_correction_weight_mean"] == pytest.approx(fmean(weights), rel=1e-4)
    assert 0.0 < fmean(weights) < 1.0


def update_metrics(*parts, weight):
    """Metrics of an update whose parts have these sums over tokens, of `weight` tokens in all."""
    update = Metrics()
    for part in parts:
        own = Metrics()
        own.add("mean", "mean", part / weight, weight)
        own.add("per_update", "mean", part)
        own.add("sum", "sum", part)
        own.add("ratio", "ratio", part, 2.0)
        own.add("max", "max", part)
        own.add("min", "min", part)
        update.merge(own)
    return update


def test_metrics_of_micro_batches_and_ranks_add_up_to_those_of_an_update():
    expected = {"mean": 1.5, "per_update": 6.0, "sum": 6.0, "ratio": 1.5, "max": 4.0, "min": 2.0}
    assert update_metrics(2.0, 4.0, weight=4).values() == expected


@pytest.mark.parametrize("parts", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_in_any_part_is_the_extreme(parts):
    in_update = update_metrics(*parts, weight=2).values()
    over_updates = merge_updates([update_metrics(part, weight=1) for part in parts]).values()
    assert all(math.isnan(values[name]) for values in (in_update, over_updates) for name in ("max", "min"))


def test_updates_weigh_by_their_tokens():
    merged = merge_updates([update_metrics(2.0, 4.0, weight=4), update_metrics(1.0, weight=2)])
    expected = {"mean": 7.0 / 6.0, "per_update": 3.5, "sum": 7.0, "ratio": 7.0 / 6.0, "max": 4.0, "min": 1.0}
    assert merged.values() == pytest.approx(expected)


def test_a_ratio_of_nothing_is_0():
    metrics = Metrics()
    metrics.add("ratio", "ratio", 0.0, 0)
    assert metrics.values() == {"ratio": 0.0}

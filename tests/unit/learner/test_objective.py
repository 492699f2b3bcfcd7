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
POLICY, FORCED, DEMONSTRATION, ENVIRONMENT = Author.POLICY, Author.FORCED, Author.DEMONSTRATION, Author.ENVIRONMENT
RESPONSES = [
    # Author and number of tokens of each segment; advantage; whether it is correct, whatever its advantage.
    ([(POLICY, 3)], 1.0, None),
    ([(POLICY, 1)], -1.0, None),
    ([(POLICY, 2), (FORCED, 2), (POLICY, 3)], 0.5, True),
    ([(POLICY, 4), (FORCED, 1), (POLICY, 1)], -0.25, True),
    ([(DEMONSTRATION, 2)], 0.0, None),
    ([(POLICY, 1), (ENVIRONMENT, 1), (POLICY, 2)], 0.0, None),
    ([(POLICY, 2)], -3.0, None),
    ([(FORCED, 1), (POLICY, 2)], 2.0, False),
]
SFT, SFT_RESPONSE = SftLossConfig(coef=0.1), SftLossConfig(coef=0.1, on="response")


def make_experience(authors, advantage, is_correct=None, *, recorded=None):
    """An experience of segments of these authors and numbers of tokens; `recorded` yields their log-probs, else -1."""
    segments = []
    for author, num_tokens in authors:
        logprobs = tuple(islice(recorded or cycle([-1.0]), num_tokens))
        segments.append(Segment(token_ids=(7,) * num_tokens, logprobs=logprobs, author=author))
    rollout = replace(make_rollout(), segments=tuple(segments), is_correct=is_correct)
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
    return loss_of(options, experiences, leaf_scores(scores, with_reference=False))[1].values()


def make_problem():
    """Experiences and scores of their trained tokens, with log-probs that differ everywhere."""
    authors = [author for segments, *_ in RESPONSES for author, num_tokens in segments for _ in range(num_tokens)]
    count = len(authors)
    recorded = -1.0 + noise(1, 0.3, count)
    logprobs = iter(recorded.tolist())
    experiences = [make_experience(*response, recorded=logprobs) for response in RESPONSES]
    recomputed = recorded + noise(2, 0.15, count)
    current, reference = recomputed + noise(3, 0.2, count), recomputed + noise(5, 0.3, count)
    scores = Scores(current, 1.0 + noise(4, 0.2, count).abs(), recomputed, reference)
    is_trained = torch.tensor([author in TRAINED_AUTHORS for author in authors])
    return experiences, Scores(*(column[is_trained] for column in scores))


def with_signal(experiences):
    """The experiences, with an advantage for those that have none: no response is left out of the forward pass."""
    return [experience if experience.advantage else replace(experience, advantage=0.75) for experience in experiences]


def with_sources(experiences, sources):
    """The experiences with these sources of old log-probs in turn; those that have one are stale."""
    changed = []
    for experience, source in zip(experiences, cycle(sources)):
        changed.append(replace(experience, staleness=int(source is not None), old_logprobs_source=source))
    return changed


def leaf_scores(scores, *, with_reference, rows=slice(None)):
    """These rows of the scores, with leaves for what has a gradient, and the reference only where there is one."""
    current_N, entropies_N = (column[rows].clone().requires_grad_() for column in scores[:2])
    reference_N = scores.reference_logprobs_N[rows] if with_reference else None
    return Scores(current_N, entropies_N, scores.recomputed_logprobs_N[rows], reference_N)


class Token(NamedTuple):
    """A trained token, in float64: the log-prob that the sampler recorded, then the columns of `Scores`."""

    experience: Experience
    segment: Segment
    after_trigger: bool
    recorded: float
    current: torch.Tensor
    entropy: torch.Tensor
    recomputed: torch.Tensor
    reference: torch.Tensor


def trained_tokens(experiences, scores):
    tokens, rows = [], zip(*(column.double() for column in scores), strict=True)
    for experience in experiences:
        after_trigger = False
        for segment in experience.rollout.segments:
            after_trigger = after_trigger or segment.author is FORCED
            if segment.author in TRAINED_AUTHORS:
                for recorded in segment.logprobs:
                    tokens.append(Token(experience, segment, after_trigger, recorded, *next(rows)))
    return tokens


def sampled_tokens(experiences, scores):
    return [token for token in trained_tokens(experiences, scores) if token.segment.author is POLICY]


def slow_loss(options, experiences, scores):
    """The objective as in the papers that `mmrl.algo.losses` cites: every token, one scalar at a time, in float64."""
    demonstrated = [t for t in trained_tokens(experiences, scores) if t.segment.author is DEMONSTRATION]
    loss = -sum(token.current for token in demonstrated) / len(demonstrated)
    sampled = sampled_tokens(experiences, scores)
    if options.sft_loss.on == "response":
        imitated = [token for token in sampled if token.experience.advantage > 0]
    else:  # VL-Rethinker
        imitated = [token for token in sampled if token.after_trigger and token.experience.rollout.is_correct]
    if imitated:
        loss = loss - coefficient(options.sft_loss) * sum(token.current for token in imitated) / len(imitated)
    responses = [list(tokens) for _, tokens in groupby(sampled, lambda token: id(token.experience))]
    for response in responses:
        weight = {
            "token": 1 / len(sampled),  # DAPO, eq. 8
            "sequence": 1 / (len(responses) * len(response)),  # GRPO, eq. 3
            "fixed": 1 / (len(responses) * (options.fixed_length or MAX_NEW_TOKENS)),  # Dr.GRPO, 3.2
        }[options.aggregation]
        for position, token in enumerate(response):
            token_loss = correction(options, response, position) * policy_loss(options, response, position)
            if options.kl.apply_to == "loss":
                kl = estimate_kl(options.kl, token.current, token.reference)
                token_loss = token_loss + coefficient(options.kl) * kl  # GRPO, eq. 3
            token_loss = token_loss - coefficient(options.entropy) * token.entropy  # PPO, eq. 9
            loss = loss + weight * token_loss
    return loss


def coefficient(options):
    progress = STEP / (STEPS - 1)
    cosine = (1 + math.cos(math.pi * progress)) / 2  # SGDR, eq. 5
    left = {"constant": 1.0, "linear": 1 - progress, "cosine": cosine}[options.schedule]
    return options.coef * (options.final_frac + (1 - options.final_frac) * left)


def clamp(value, bound):
    """A log ratio within the bound, without a gradient beyond it: StableReinforce, eq. 5; for the KL, Video-R1."""
    if bound is None or abs(value.item()) <= bound:
        return value
    return torch.tensor(math.copysign(bound, value.item()), dtype=torch.float64)


def estimate_kl(options, logprob, reference):
    """Schulman's estimators of KL(policy || reference)."""
    d = clamp(reference - logprob, options.log_ratio_clip)
    return {"k1": -d, "k2": d**2 / 2, "k3": torch.exp(d) - d - 1}[options.estimator]  # k3: GRPO, eq. 4


def old_logprob(options, token):
    source = token.experience.old_logprobs_source or options.old_logprobs
    return {"recorded": token.recorded, "recomputed": float(token.recomputed)}[source]


def policy_loss(options, response, position):
    token = response[position]
    log_ratios = [clamp(token.current - old_logprob(options, token), options.log_ratio_clip) for token in response]
    if options.importance_ratio_level == "token":
        ratio = torch.exp(log_ratios[position])  # PPO, eq. 6
    else:
        ratio = torch.exp(sum(log_ratios) / len(log_ratios))  # GSPO, eq. 7
    advantage = token.experience.advantage
    if options.kl.apply_to == "reward":
        kl_to_go = sum(estimate_kl(options.kl, later.recomputed, later.reference) for later in response[position:])
        advantage = advantage - coefficient(options.kl) * float(kl_to_go)  # Ziegler et al., eq. 2
    clipped = torch.clamp(ratio, 1 - options.clip_low, 1 + options.clip_high)
    if options.policy_loss == "cispo":
        return -clipped.detach() * advantage * token.current  # MiniMax-M1, eq. 4 and 5
    gain = min(ratio * advantage, clipped * advantage)  # PPO, eq. 7; DAPO, eq. 8
    if options.dual_clip is not None and advantage < 0:
        gain = max(gain, torch.tensor(options.dual_clip * advantage, dtype=torch.float64))  # dual clip, eq. 5
    return -gain


def correction(options, response, position):
    """The importance weight of the learner before the update against the sampler."""
    rollout_correction = options.rollout_correction
    log_weights = [old_logprob(options, token) - token.recorded for token in response]
    weight = math.exp(log_weights[position] if rollout_correction.level == "token" else sum(log_weights))
    match rollout_correction.method:
        case "none":
            return 1.0
        case "tis":  # Ionides
            return min(weight, rollout_correction.high)
        case "mask":  # IcePop
            return weight if rollout_correction.low <= weight <= rollout_correction.high else 0.0


@pytest.mark.parametrize("sources", [(None,), ("recorded", None, "recomputed")], ids=["current step", "replayed"])
@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_every_objective_equals_its_slow_version_however_it_is_cut(options, sources):
    experiences, scores = make_problem()
    experiences = with_sources(experiences, sources)
    objective = Objective(options, STEPS)
    denominators = objective.count_denominators(experiences)
    slow = leaf_scores(scores, with_reference=True)
    expected = slow_loss(options, experiences, slow)
    expected.backward()

    whole = leaf_scores(scores, with_reference=objective.needs_reference)
    loss, metrics = loss_of(options, experiences, whole, denominators)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    assert distance(whole.current_logprobs_N.grad, slow.current_logprobs_N.grad) < GRADIENTS
    if objective.has_entropy_bonus:
        assert distance(whole.entropies_N.grad, slow.entropies_N.grad) < GRADIENTS

    # Micro-batches of one response each.
    begin, losses, gradients, merged = 0, [], [], Metrics()
    for experience in experiences:
        trained = [segment for segment in experience.rollout.segments if segment.author in TRAINED_AUTHORS]
        end = begin + sum(len(segment.token_ids) for segment in trained)
        part = leaf_scores(scores, with_reference=objective.needs_reference, rows=slice(begin, end))
        part_loss, part_metrics = loss_of(options, [experience], part, denominators)
        if part_loss.requires_grad:
            part_loss.backward()
        losses.append(part_loss.item())
        gradients.append(gradient_of(part.current_logprobs_N))
        merged.merge(part_metrics)
        begin = end
    assert sum(losses) == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert distance(torch.cat(gradients), whole.current_logprobs_N.grad) < GRADIENTS
    assert merged.values() == pytest.approx(metrics.values(), rel=1e-4)


def test_the_difference_to_the_sampler_is_measured_by_the_age_of_tokens():
    """Of this version and of the one before; partial rollouts have tokens of both, and replayed ones are older."""
    experiences, scores = make_problem()
    aged = [replace(experience, staleness=i % 3) for i, experience in enumerate(with_signal(experiences))]
    *old_segments, last = aged[3].rollout.segments
    partial = replace(aged[3].rollout, segments=(*old_segments, replace(last, version=1)))
    aged[3] = replace(aged[3], rollout=partial, staleness=1)
    gaps = {0: [], 1: [], 2: []}
    for token in sampled_tokens(aged, scores):
        gaps[token.experience.staleness - token.segment.version].append(abs(float(token.current) - token.recorded))
    assert min(map(len, gaps.values())) > 1
    metrics = metrics_of(LossConfig(), aged, scores)
    assert metrics["rollout/logprob_diff_mean"] == pytest.approx(fmean(gaps[0]), rel=1e-5)
    assert metrics["rollout/stale_logprob_diff_mean"] == pytest.approx(fmean(gaps[1]), rel=1e-5)
    assert metrics["rollout/logprob_diff_max"] == pytest.approx(max(gaps[0] + gaps[1]), rel=1e-5)
    metrics = metrics_of(LossConfig(), [replace(each, staleness=2) for each in with_signal(experiences)], scores)
    assert not [name for name in metrics if "logprob_diff" in name]


@pytest.mark.parametrize("sources", [(None,), (None, "recomputed")], ids=["current step", "replayed"])
def test_the_update_is_measured_token_by_token(sources):
    """Shares of clipped tokens, extremes of ratios, and Schulman's k3 of KL(old || policy)."""
    experiences, scores = make_problem()
    experiences = with_sources(with_signal(experiences), sources)
    options = LossConfig(clip_low=0.03, clip_high=0.05, dual_clip=1.06, sft_loss=SFT_RESPONSE)
    sampled = sampled_tokens(experiences, scores)
    ratios = [math.exp(token.current - old_logprob(options, token)) for token in sampled]
    pairs = list(zip(ratios, [token.experience.advantage for token in sampled], strict=True))
    low = fmean(ratio < 0.97 and advantage < 0 for ratio, advantage in pairs)
    high = fmean(ratio > 1.05 and advantage > 0 for ratio, advantage in pairs)
    dual = fmean(ratio > 1.06 and advantage < 0 for ratio, advantage in pairs)
    metrics = metrics_of(options, experiences, scores)
    expected = {"approx_kl": fmean((ratio - 1) - math.log(ratio) for ratio in ratios)}
    expected |= {"clip_frac_low": low, "clip_frac_high": high, "clip_frac": low + high, "clip_frac_dual": dual}
    expected |= {"importance_ratio_max": max(ratios), "importance_ratio_min": min(ratios)}
    assert {name: metrics[f"policy/{name}"] for name in expected} == pytest.approx(expected, rel=1e-4)
    nll = -fmean(float(token.current) for token in sampled if token.experience.advantage > 0)
    assert metrics["learner/sft_loss_nats"] == pytest.approx(nll, rel=1e-4)
    assert min(low, high, dual) > 0 and low + high < 1
    # CISPO clips whatever the sign of the advantage.
    metrics = metrics_of(LossConfig(clip_low=0.03, clip_high=0.05, policy_loss="cispo"), experiences, scores)
    assert metrics["policy/clip_frac_low"] == pytest.approx(fmean(ratio < 0.97 for ratio in ratios))
    assert metrics["policy/clip_frac_high"] == pytest.approx(fmean(ratio > 1.05 for ratio in ratios))
    assert "policy/clip_frac_dual" not in metrics


def gradient_of(leaf):
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def distance(a, b):
    assert float(b.norm()) > 0
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_setting_changes_the_gradient(name):
    """Otherwise the comparison above would prove little."""
    experiences, scores = make_problem()
    gradients = []
    for options in (LOSSES[name], LossConfig()):
        part = leaf_scores(scores, with_reference=Objective(options, STEPS).needs_reference)
        loss_of(options, experiences, part)[0].backward()
        gradients.append(torch.cat([gradient_of(part.current_logprobs_N), gradient_of(part.entropies_N)]))
    assert distance(*gradients) > 5e-3


def test_denominators_count_tokens_by_author_age_and_loss():
    experiences, _ = make_problem()
    stale = [replace(experience, staleness=index % 2) for index, experience in enumerate(experiences)]
    without_gradient = [make_experience([], 1.0), make_experience([(POLICY, 1)], 0.0)]
    for sft_loss, given, expected in (
        (SftLossConfig(), experiences, (21, 18, (18, 0), 7, 2, 0)),
        (SftLossConfig(), stale, (21, 18, (10, 8), 7, 2, 0)),
        (SFT, experiences, (21, 18, (18, 0), 7, 2, 3 + 1)),
        (SFT_RESPONSE, experiences, (21, 18, (18, 0), 7, 2, 3 + 5 + 2)),
        (SftLossConfig(), without_gradient, (1, 0, (0, 0), 1, 0, 0)),
    ):
        assert Objective(LossConfig(sft_loss=sft_loss), STEPS).count_denominators(given) == expected


def test_an_empty_response_counts_as_a_response():
    experiences = [make_experience([(POLICY, 0)], 1.0), make_experience([(POLICY, 2)], 1.0)]
    options = LossConfig(aggregation="sequence")
    assert Objective(options, STEPS).count_denominators(experiences) == (2, 2, (2, 0), 2, 0, 0)
    scores = Scores(torch.tensor([-1.0, -1.0], requires_grad=True), torch.ones(2), torch.tensor([-1.0, -1.0]), None)
    loss, _ = loss_of(options, experiences, scores)
    assert loss.item() == pytest.approx(-0.5)


PLAIN, KL, ENTROPY = LossConfig(), LossConfig(kl={"coef": 0.1}), LossConfig(entropy={"coef": 0.1})
IMITATE_CORRECT, IMITATE_GOOD = LossConfig(sft_loss=SFT), LossConfig(sft_loss=SFT_RESPONSE)
EVERY = [PLAIN, KL, ENTROPY, IMITATE_CORRECT, IMITATE_GOOD]


@pytest.mark.parametrize(
    ("experience", "with_gradient"),
    [
        (make_experience([(POLICY, 2)], 1.0), EVERY),
        (make_experience([(POLICY, 2)], -1.0), EVERY),
        (make_experience([(POLICY, 2)], 0.0), [KL, ENTROPY]),
        (make_experience([(FORCED, 2)], 1.0), []),
        (make_experience([], 1.0), []),
        (make_experience([(DEMONSTRATION, 2)], 0.0), EVERY),
        # A continuation that ended correct is imitated, though its whole group was correct and has no advantage.
        (make_experience([(POLICY, 2), (FORCED, 2), (POLICY, 3)], 0.0, True), [KL, ENTROPY, IMITATE_CORRECT]),
        (make_experience([(FORCED, 1), (POLICY, 2)], 0.0, False), [KL, ENTROPY]),
    ],
)
def test_an_experience_has_a_gradient_if_a_loss_term_may_give_it_one(experience, with_gradient):
    for options in EVERY:
        assert Objective(options, STEPS).has_gradient_unless_masked(experience) == (options in with_gradient), options


def test_correction_weights_are_averaged():
    experiences, scores = make_problem()
    mask = RolloutCorrectionConfig(method="mask", low=0.8, high=1.2)
    options = LossConfig(old_logprobs="recomputed", rollout_correction=mask)
    metrics = metrics_of(options, with_signal(experiences), scores)
    weights = [math.exp(token.recomputed - token.recorded) for token in sampled_tokens(experiences, scores)]
    expected = fmean(weight if 0.8 <= weight <= 1.2 else 0.0 for weight in weights)
    assert metrics["policy/rollout_correction_weight_mean"] == pytest.approx(expected, rel=1e-4)
    assert 0.0 < expected < 1.0


def update_metrics(*parts, weight):
    """Metrics of an update whose parts have these sums over tokens, of `weight` tokens in all."""
    update = Metrics()
    for part in parts:
        of_part = Metrics()
        of_part.add("mean", "mean", part / weight, weight)
        of_part.add("per_update", "mean", part)
        of_part.add("sum", "sum", part)
        of_part.add("ratio", "ratio", part, 2.0)
        of_part.add("max", "max", part)
        of_part.add("min", "min", part)
        update.merge(of_part)
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

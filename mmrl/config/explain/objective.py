"""What a stage of reinforcement optimises, in formulas: i counts responses, t the tokens of one."""

from __future__ import annotations

from mmrl.config.schema import LossCoefficientConfig, LossConfig, ReferenceConfig, RlStage

_BASELINES = {
    "group_mean": "R_i - mean(R)",
    "leave_one_out": "R_i - mean(R but R_i)",
    "batch_mean": "R_i - mean(R of the step)",
    "none": "R_i",
}
_DEVIATIONS = {"group_std": "std(R)", "batch_std": "std(R of the step)"}
_KL_ESTIMATORS = {"k1": "-d", "k2": "d²/2", "k3": "exp(d) - d - 1"}
_AGGREGATIONS = {"token": "(1/N) Σ_i Σ_t", "sequence": "(1/S) Σ_i (1/n_i) Σ_t"}


def explain_advantage(stage: RlStage) -> str:
    """From rewards to advantages, a line a step."""
    options = stage.advantage
    centred = _BASELINES[options.baseline]
    within = f"over the {stage.group_size} rollouts of one prompt"
    over = within if options.baseline in ("group_mean", "leave_one_out") else "no baseline"
    over = "over all rollouts of the step" if options.baseline == "batch_mean" else over
    if options.fn is not None:
        arguments = ", ".join(f"{name}={value!r}" for name, value in options.args.items())
        lines = [f"A = {options.fn}({arguments}), of the total rewards and reward terms {within}"]
    elif options.scale == "none":
        lines = [f"A_i = {centred}, {over}; nothing scales it"]
    else:
        over = within if options.scale == "group_std" and options.baseline == "none" else over
        lines = [f"A_i = ({centred}) / ({_DEVIATIONS[options.scale]} + {options.eps:g}), {over}"]
    if options.combine == "per_term":
        lines.append("for each reward term by itself, its value as R; then A_i is their sum by weight")
    if options.batch_normalize:
        lines.append(f"then A_i becomes (A_i - mean(A)) / (std(A) + {options.eps:g}) over all rollouts of the step")
    if options.outlier_std is not None:
        lines.append(f"then A_i becomes 0 where it is more than {options.outlier_std:g} std(A) from mean(A)")
    if options.difficulty_weight is not None:
        doubt = options.difficulty_weight
        lines.append(f"then times 4 · {doubt.max_weight:g} · p (1 - p), p the group's mean of {doubt.term}")
    return "\n".join(lines)


def explain_objective(stage: RlStage) -> str:
    """The loss and its parts, a line each."""
    loss = stage.loss
    length = loss.fixed_length or stage.sampling.max_new_tokens
    fixed = f"(1/{f'({length} S)' if length > 1 else 'S'}) Σ_i Σ_t"
    weight = "" if loss.rollout_correction.method == "none" else "w_t "
    lines = [
        f"L = -{_AGGREGATIONS.get(loss.aggregation, fixed)} {weight}{_policy_loss_formula(loss)}{_extra_loss_terms(loss)}",
        _importance_ratio_formula(stage),
        *_clip_notes(loss),
        *_rollout_correction_formula(loss),
        _denominator_text(stage),
    ]
    if loss.sft_loss.coef:
        second = "what it wrote after a trigger in responses that then ended right"
        text = second if loss.sft_loss.on == "after_rethink" else "every token of responses with A > 0"
        lines.append(f"NLL = mean of -log π(y_t) over {text}{_schedule_text(loss.sft_loss)}")
    if loss.entropy.coef:
        lines.append(f"H = entropy of the next token, summed like the rest of L{_schedule_text(loss.entropy)}")
    return "\n".join(lines)


def explain_kl(stage: RlStage) -> str:
    """The KL penalty and what it measures from."""
    kl = stage.loss.kl
    if not kl.coef:
        return "none; no reference model is kept"
    estimate = f"{_KL_ESTIMATORS[kl.estimator]}, d = log π_ref(y_t) - log π(y_t)"
    if kl.log_ratio_clip is not None:
        estimate += f" within ±{kl.log_ratio_clip:g}"
    if kl.apply_to == "reward":
        start = f"A_t = A_i - {kl.coef:g} · the sum over t and later tokens of {estimate}, π as the step began"
    else:
        start = f"{estimate}, summed like the rest of L"
    return f"{start}{_schedule_text(kl)}\nπ_ref is {_reference_text(stage.reference)}"


def _policy_loss_formula(loss: LossConfig) -> str:
    r = "r_i" if loss.importance_ratio_level == "sequence" else "r_t"
    a = "A_t" if loss.kl.coef and loss.kl.apply_to == "reward" else "A_i"
    clipped = f"clip({r}, {1 - loss.clip_low:g}, {1 + loss.clip_high:g}) {a}"
    return f"{clipped} log π(y_t)" if loss.policy_loss == "cispo" else f"min({r} {a}, {clipped})"


def _extra_loss_terms(loss: LossConfig) -> str:
    kl = f" + {loss.kl.coef:g} · KL" if loss.kl.coef and loss.kl.apply_to == "loss" else ""
    entropy = f" - {loss.entropy.coef:g} · H" if loss.entropy.coef else ""
    return kl + entropy + (f" + {loss.sft_loss.coef:g} · NLL" if loss.sft_loss.coef else "")


def _importance_ratio_formula(stage: RlStage) -> str:
    loss = stage.loss
    old = (
        "as recorded while sampling"
        if loss.old_logprobs == "recorded"
        else "computed by the learner as the step begins"
    )
    uncorrected = stage.async_rollouts and loss.rollout_correction.method == "none"
    if uncorrected and loss.old_logprobs == "recomputed":
        old += ", of rollouts that are a version old as recorded while sampling"
    if loss.importance_ratio_level == "token":
        ratio = "r_t = π(y_t) / π_old(y_t)"
    elif loss.importance_ratio_level == "sequence":
        ratio = "r_i = geometric mean over t of π(y_t) / π_old(y_t)"
    else:
        ratio = "r_t = geometric mean over the response of π / π_old, with the gradient of π(y_t) / π_old(y_t)"
    moved = f"clipped per {loss.importance_ratio_level}".replace("_", " ")
    if stage.ppo_epochs == 1 and stage.num_mini_batches == 1 and not uncorrected:
        spared = "as each rollout is used once" if stage.replay is None else "but for replayed rollouts"
        moved = f"1 up to rounding, {spared}"
    return f"{ratio}, π_old {old}; {moved}"


def _clip_notes(loss: LossConfig) -> list[str]:
    lines = []
    if loss.policy_loss == "cispo":
        lines.append("no gradient flows through the clipped ratio, so every token keeps that of its log π")
    if loss.dual_clip is not None:
        lines.append(f"where A < 0 the ratio counts {loss.dual_clip:g} at most")
    if loss.log_ratio_clip is not None:
        lines.append(f"log π(y_t) - log π_old(y_t) is kept within ±{loss.log_ratio_clip:.4g} before that")
    return lines


def _rollout_correction_formula(loss: LossConfig) -> list[str]:
    options = loss.rollout_correction
    if options.method == "none":
        return []
    ratio = "π_old(y_t) / π_sampler(y_t)"
    ratio = ratio if options.level == "token" else f"product over the response of {ratio}"
    bound = f"at most {options.high:g}"
    bound = bound if options.method == "tis" else f"0 where it is outside [{options.low:g}, {options.high:g}]"
    return [f"w_t = {ratio}, {bound}"]


def _denominator_text(stage: RlStage) -> str:
    loss, options = stage.loss, stage.advantage
    whole = "the whole step" if stage.num_mini_batches == 1 else "a mini-batch"
    counts = {
        "token": f"N counts every sampled token of {whole}",
        "sequence": f"S counts the responses of {whole}, n_i the tokens of one",
        "fixed": f"S counts the responses of {whole}",
    }[loss.aggregation]
    if loss.mask_truncated:
        counts += ", truncated ones left out"
    if {options.baseline, options.scale} & {"group_mean", "leave_one_out", "group_std"}:
        counts += "; a group of equal rewards has A = 0 and teaches nothing"
    return counts


def _schedule_text(options: LossCoefficientConfig) -> str:
    if options.schedule == "constant":
        return ""
    return f"; its weight falls to {options.coef * options.final_frac:g} ({options.schedule})"


def _reference_text(options: ReferenceConfig) -> str:
    often = "every step" if options.update_every == 1 else f"every {options.update_every} steps"
    if options.init_from == "base":
        return "the model without its adapter"
    if options.update == "never":
        return "the stage's start, frozen"
    if options.update == "ema":
        return f"a running average of π: {options.ema_decay:g} of it stays {often}"
    return f"π itself, taken anew {often}" + (", the optimizer's moments forgotten" if options.reset_optimizer else "")

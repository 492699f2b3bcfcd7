"""What a stage of reinforcement optimises, in formulas: i counts responses, t the tokens of one."""

from __future__ import annotations

from mmrl.config.schema import Coefficient, Loss, Reference, Rl

_BASELINES = {
    "group_mean": "R_i - mean(R)",
    "leave_one_out": "R_i - mean(R but R_i)",
    "batch_mean": "R_i - mean(R of the step)",
    "none": "R_i",
}
_DEVIATIONS = {"group_std": "std(R)", "batch_std": "std(R of the step)"}
_ESTIMATES = {"k1": "-d", "k2": "d²/2", "k3": "exp(d) - d - 1"}
_SUMS = {"token": "(1/N) Σ_i Σ_t", "sequence": "(1/S) Σ_i (1/n_i) Σ_t"}


def advantage(stage: Rl) -> str:
    """From rewards to advantages, a line a step."""
    options = stage.advantage
    centred = _BASELINES[options.baseline]
    within = f"over the {stage.group_size} rollouts of one prompt"
    over = within if options.baseline in ("group_mean", "leave_one_out") else "no baseline"
    over = "over all rollouts of the step" if options.baseline == "batch_mean" else over
    if options.scale == "none":
        lines = [f"A_i = {centred}, {over}; nothing scales it"]
    else:
        over = within if options.scale == "group_std" and options.baseline == "none" else over
        lines = [f"A_i = ({centred}) / ({_DEVIATIONS[options.scale]} + {options.eps:g}), {over}"]
    if options.combine == "per_term":
        lines.append("for each reward term by itself, its value as R; then A_i is their sum by weight")
    if options.whiten:
        lines.append(f"then A_i becomes (A_i - mean(A)) / (std(A) + {options.eps:g}) over all rollouts of the step")
    if options.z_filter is not None:
        lines.append(f"then A_i becomes 0 where it is more than {options.z_filter:g} std(A) from mean(A)")
    if options.uncertainty is not None:
        doubt = options.uncertainty
        lines.append(f"then times 4 · {doubt.factor:g} · p (1 - p), p the group's mean of {doubt.term}")
    return "\n".join(lines)


def objective(stage: Rl) -> str:
    """The loss and its parts, a line each."""
    loss = stage.loss
    length = loss.fixed_length or stage.sampling.max_new_tokens
    fixed = f"(1/{f'({length} S)' if length > 1 else 'S'}) Σ_i Σ_t"
    weight = "" if loss.correction.kind == "none" else "w_t "
    lines = [
        f"L = -{_SUMS.get(loss.aggregate, fixed)} {weight}{_surrogate(loss)}{_additions(loss)}",
        _ratio(stage),
        *_bounds(loss),
        *_correction(loss),
        _counted(stage),
    ]
    if loss.nll.coef:
        second = "what it wrote after a trigger in responses that then ended right"
        text = second if loss.nll.on == "after_trigger" else "every token of responses with A > 0"
        lines.append(f"NLL = mean of -log π(y_t) over {text}{_course(loss.nll)}")
    if loss.entropy.coef:
        lines.append(f"H = entropy of the next token, summed like the rest of L{_course(loss.entropy)}")
    return "\n".join(lines)


def penalty(stage: Rl) -> str:
    """The KL penalty and what it measures from."""
    kl = stage.loss.kl
    if not kl.coef:
        return "none; no reference model is kept"
    estimate = f"{_ESTIMATES[kl.estimator]}, d = log π_ref(y_t) - log π(y_t)"
    if kl.clamp is not None:
        estimate += f" within ±{kl.clamp:g}"
    if kl.place == "reward":
        start = f"A_t = A_i - {kl.coef:g} · the sum over t and later tokens of {estimate}, π as the step began"
    else:
        start = f"{estimate}, summed like the rest of L"
    return f"{start}{_course(kl)}\nπ_ref is {_reference(stage.reference)}"


def _surrogate(loss: Loss) -> str:
    r = "r_i" if loss.ratio == "sequence" else "r_t"
    a = "A_t" if loss.kl.coef and loss.kl.place == "reward" else "A_i"
    clipped = f"clip({r}, {1 - loss.clip_low:g}, {1 + loss.clip_high:g}) {a}"
    return f"{clipped} log π(y_t)" if loss.surrogate == "cispo" else f"min({r} {a}, {clipped})"


def _additions(loss: Loss) -> str:
    kl = f" + {loss.kl.coef:g} · KL" if loss.kl.coef and loss.kl.place == "loss" else ""
    entropy = f" - {loss.entropy.coef:g} · H" if loss.entropy.coef else ""
    return kl + entropy + (f" + {loss.nll.coef:g} · NLL" if loss.nll.coef else "")


def _ratio(stage: Rl) -> str:
    loss = stage.loss
    old = "as recorded while sampling" if loss.old == "sampler" else "computed by the learner as the step begins"
    uncorrected = stage.overlap and loss.correction.kind == "none"
    if uncorrected and loss.old == "learner":
        old += ", of rollouts that are a version old as recorded while sampling"
    if loss.ratio == "token":
        ratio = "r_t = π(y_t) / π_old(y_t)"
    elif loss.ratio == "sequence":
        ratio = "r_i = geometric mean over t of π(y_t) / π_old(y_t)"
    else:
        ratio = "r_t = geometric mean over the response of π / π_old, with the gradient of π(y_t) / π_old(y_t)"
    moved = f"clipped per {loss.ratio}".replace("_", " ")
    if stage.epochs == 1 and stage.mini_batches == 1 and not uncorrected:
        spared = "as each rollout is used once" if stage.replay is None else "but for replayed rollouts"
        moved = f"1 up to rounding, {spared}"
    return f"{ratio}, π_old {old}; {moved}"


def _bounds(loss: Loss) -> list[str]:
    lines = []
    if loss.surrogate == "cispo":
        lines.append("no gradient flows through the clipped ratio, so every token keeps that of its log π")
    if loss.dual_clip is not None:
        lines.append(f"where A < 0 the ratio counts {loss.dual_clip:g} at most")
    if loss.log_ratio_clamp is not None:
        lines.append(f"log π(y_t) - log π_old(y_t) is kept within ±{loss.log_ratio_clamp:.4g} before that")
    return lines


def _correction(loss: Loss) -> list[str]:
    options = loss.correction
    if options.kind == "none":
        return []
    ratio = "π_old(y_t) / π_sampler(y_t)"
    ratio = ratio if options.level == "token" else f"product over the response of {ratio}"
    bound = f"at most {options.high:g}"
    bound = bound if options.kind == "truncate" else f"0 where it is outside [{options.low:g}, {options.high:g}]"
    return [f"w_t = {ratio}, {bound}"]


def _counted(stage: Rl) -> str:
    loss, options = stage.loss, stage.advantage
    whole = "the whole step" if stage.mini_batches == 1 else "a mini-batch"
    counts = {
        "token": f"N counts every sampled token of {whole}",
        "sequence": f"S counts the responses of {whole}, n_i the tokens of one",
        "fixed": f"S counts the responses of {whole}",
    }[loss.aggregate]
    if loss.mask_truncated:
        counts += ", truncated ones left out"
    if {options.baseline, options.scale} & {"group_mean", "leave_one_out", "group_std"}:
        counts += "; a group of equal rewards has A = 0 and teaches nothing"
    return counts


def _course(options: Coefficient) -> str:
    if options.decay == "constant":
        return ""
    return f"; its weight falls to {options.coef * options.final_frac:g} ({options.decay})"


def _reference(options: Reference) -> str:
    often = "every step" if options.every == 1 else f"every {options.every} steps"
    if options.start == "base":
        return "the model without its adapter"
    if options.update == "never":
        return "the stage's start, frozen"
    if options.update == "ema":
        return f"a running average of π: {options.decay:g} of it stays {often}"
    return f"π itself, taken anew {often}" + (", the optimizer's moments forgotten" if options.reset_optimizer else "")

"""Rollout steps in a config: refusals, presets, `mmrl explain`."""

from __future__ import annotations

import pytest
from config_samples import SMALL, refused, write
from pydantic import ValidationError

from mmrl.config import load_config
from mmrl.config.explain import explain
from mmrl.config.export import dump_yaml
from mmrl.config.schema import RethinkConfig
from mmrl.config.schema.presets import RETHINK_PRESETS

FIRST = "{kind: generate}"


def rollout_steps(*steps, key="stages.rl.rollout_steps"):
    return f"{key}=[{', '.join(steps)}]"


def rethink(**options):
    return "{kind: rethink, correct: [exact]" + "".join(f", {key}: {value}" for key, value in options.items()) + "}"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (rollout_steps(rethink()), "stages.1.rollout_steps: rollout_steps begin with one step of kind generate; got"),
        (rollout_steps(FIRST, FIRST), "rollout_steps begin with one step of kind generate; got generate, generate"),
        (rollout_steps("{kind: generate, oversampling: 2}"), "oversampling and max_tokens_per_step need"),
        (
            rollout_steps("{kind: generate, partial_rollout_tokens: 8}", key="evaluation.rollout_steps"),
            "evaluation completes every response",
        ),
        (rollout_steps(), "stages.1.rollout_steps: needs at least one entry"),
        (rollout_steps(FIRST, rethink(), rethink()), "two rollout_steps are named 'rethink'"),
        (rollout_steps(FIRST, "{kind: rethink}"), "stages.1.rollout_steps.1.correct: missing; reward terms that"),
        (rollout_steps(FIRST, "{kind: continue_with}"), "stages.1.rollout_steps.1.kind: must be 'generate', 'rethink"),
        (rollout_steps(FIRST, rethink(min_new_tokens=600)), "min_new_tokens 600 is more than max_new_tokens 512"),
        (rollout_steps(FIRST, rethink(triggers="[{text: a, only: correct}]")), "no trigger is for incorrect first"),
        (rollout_steps(FIRST, rethink(min_free_tokens=512)), "leave 512 of sampling.max_new_tokens=512 free, which"),
        (rollout_steps(FIRST, "{kind: probe, corruption: gray}"), "stages.1.rollout_steps.1.corruption: must be"),
        (
            rollout_steps(FIRST, "{kind: probe, corruption: grey}", key="evaluation.rollout_steps"),
            "evaluation has none",
        ),
        (
            rollout_steps(FIRST, rethink(keep="correct"), key="evaluation.rollout_steps"),
            "has `keep`, by which evaluation would",
        ),
        (
            "stages.rl={kind: rl, name: rl, steps: 1, async_rollouts: true, "
            "rollout_steps: [{kind: generate, partial_rollout_tokens: 8}]}",
            "one step old at most; take out one of",
        ),
        ("stages.rl.async_rollouts=1", "stages.1.async_rollouts: must be true or false, got 1"),
        ("response_format={style: boxed, stop_at_answer: true}", "response_format: stop_at_answer needs `style: tags`"),
        ("response_format={stop_strings: ['']}", "response_format: stop_strings has an empty string"),
    ],
)
def test_invalid_rollout_steps_are_refused(tmp_path, override, said):
    assert said in refused(write(tmp_path, SMALL), override)


def test_settings_of_a_step_override_its_preset(tmp_path):
    text = f"{rollout_steps(FIRST, rethink(preset='paper', fraction=0.5))}"
    loaded = load_config(write(tmp_path, SMALL), [text, "stages.rl.sampling.max_new_tokens=2048"])
    step = loaded.config.stages[1].rollout_steps[1]
    assert (step.fraction, step.cut_answer_fraction, step.keep, step.max_kept_per_group) == (0.5, 0.5, "correct", 2)
    assert [trigger.only for trigger in step.triggers] == ["any", "any", "correct", "incorrect"]
    assert sum(trigger.weight for trigger in step.triggers[:3]) == pytest.approx(1.0)
    assert loaded.origins["stages.1.rollout_steps.1.cut_answer_fraction"] == "preset paper"
    assert loaded.origins["stages.1.rollout_steps.1.fraction"] == "command line"
    assert load_config(write(tmp_path, dump_yaml(loaded.config), "again.yaml")).config == loaded.config


def test_a_step_made_in_code_must_spell_out_its_preset():
    with pytest.raises(ValidationError, match="preset 'paper' stands for cut_answer_fraction too"):
        RethinkConfig(kind="rethink", correct=("a",), preset="paper")
    assert RETHINK_PRESETS["paper"].keys() < RethinkConfig.model_fields.keys()


def test_explain_describes_rethink_and_warns_of_leaks(tmp_path):
    plain = write(tmp_path, SMALL)
    assert "Forced rethinking" not in explain(load_config(plain))
    blind = "{kind: probe, corruption: shuffled, every: 5}"
    fair = explain(load_config(plain, [rollout_steps(FIRST, rethink(fraction=0.5, temperature=0.9), blind)]))
    assert "fraction 0.5: Share of these responses that is drawn for continuation." in fair
    assert "temperature 0.9: Temperature that continuations are sampled at" in fair
    assert "correct [exact]: Reward terms that decide whether a response is correct" in fair
    assert "shuffled: Extra rollouts of prompts whose media are hidden" in fair
    assert "every 5: The probe is made every so many steps." in fair
    assert "WARNING" not in fair
    paper = explain(
        load_config(plain, [rollout_steps(FIRST, rethink(preset="paper")), "stages.rl.sampling.max_new_tokens=2048"])
    )
    assert "WARNING: some triggers are for correct or incorrect responses alone" in paper
    assert "WARNING: continuations are dropped by their outcome" in paper


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["rollout.engine=vllm"], "stage 'rl' has `async_rollouts`, and rollout.engine vllm takes turns with the"),
        (["deepspeed={zero_stage: 2}"], "a stage has `async_rollouts`, for which the engine hf keeps a whole second"),
    ],
)
def test_async_rollouts_need_an_engine_of_their_own(tmp_path, overrides, said):
    path = write(tmp_path, SMALL)
    assert said in refused(path, "stages.rl.async_rollouts=true", *overrides)
    servers = load_config(
        path, ["stages.rl.async_rollouts=true", "rollout.engine=vllm_server", "deepspeed={zero_stage: 2}"]
    )
    assert servers.config.uses_async_rollouts and not load_config(path, overrides).config.uses_async_rollouts


def test_explain_says_that_async_rollouts_are_off_policy(tmp_path):
    path = write(tmp_path, SMALL)
    corrected = "stages.rl.loss={old_logprobs: recomputed, rollout_correction: {method: tis}}"
    assert "version older" not in explain(load_config(path))
    words = explain(load_config(path, ["stages.rl.async_rollouts=true"]))
    assert "off-policy from the second step on, rollouts are generated while the step before trains" in words
    assert "π_old as recorded while sampling; clipped per token" in words
    words = explain(load_config(path, ["stages.rl.async_rollouts=true", "stages.rl.loss.old_logprobs=recomputed"]))
    assert "but as recorded while sampling for rollouts of an older policy; clipped per token" in words
    words = explain(load_config(path, ["stages.rl.async_rollouts=true", corrected]))
    assert "computed by the learner as the step begins; 1 up to rounding" in words
    assert "w_t = π_old(y_t) / π_sampler(y_t), at most 2" in words


@pytest.mark.parametrize(
    ("override", "expected", "ratio"),
    [
        (
            "rollout_steps=[{kind: generate, partial_rollout_tokens: 8, oversampling: 2}]",
            "the tokens of an unfinished rollout are a version older with every step that it waits",
            "clipped per token",
        ),
        (
            "dynamic_sampling={ranges: [{term: count}], max_rounds: 2, extra: carry}",
            "groups carried over are a version older with every step that they wait",
            "clipped per token",
        ),
        ("replay={max_staleness: 7}", "replayed rollouts are of older versions of the policy, up to 7", "1 up to"),
        ("replay={max_staleness: null}", "replayed rollouts are of older versions of the policy, of any", "1 up to"),
        ("num_mini_batches=4", "from the second of the 4 optimizer steps on, the policy is newer", "clipped per token"),
        ("ppo_epochs=2", "from the second of the 2 optimizer steps on, the policy is newer", "clipped per token"),
    ],
)
def test_explain_gives_every_reason_why_rollouts_are_off_policy(tmp_path, override, expected, ratio):
    path = write(tmp_path, SMALL)
    assert "off-policy" not in explain(load_config(path))
    words = explain(load_config(path, [f"stages.rl.{override}"]))
    assert f"\n  off-policy {expected}" in words
    assert f"π_old as recorded while sampling; {ratio}" in words

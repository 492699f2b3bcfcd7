"""Checks that concern several sections: stages against each other, the data, the rewards and the model."""

import pytest
from config_samples import SMALL, refused, write

from mmrl.config import load_config
from mmrl.training.preflight import effective_config

HARVEST = (
    SMALL.replace("  - kind: rl\n    name: rl\n", "@  - kind: rl\n    name: rl\n")
    .replace("run: {name: demo}", "run: {name: demo}\nresponse_format: {thinking: optional}")
    .replace(
        "@",
        """\
  - {kind: sample, name: draw, group_size: 4}
  - {kind: select, name: right, results_of: draw, correct: [exact], output: responses, max_responses: 2}
  - {kind: select, name: hard, results_of: draw, correct: [exact], metric: first_correct, range: [2, null], top_k: 9}
  - {kind: sft, name: again, samples_of: right, target_field: response, steps: 5, drop_thinking_prob: 0.5,
     loss_on: answer}
""",
    )
)


def rethink(option):
    return "[{kind: generate}, {kind: rethink, correct: [exact], " + option + "}]"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("stages.rl.samples_of=nope", "`samples_of: nope`, and no stage is called that"),
        ("stages.cold.samples_of=hard", "`samples_of: hard`, which is not an earlier stage"),
        ("stages.hard.results_of=hard", "`results_of: hard`, which is not an earlier stage"),
        ("stages.rl.samples_of=draw", "`samples_of: draw`, which is of kind sample"),
        ("stages.rl.samples_of=right", "`samples_of: right`, which keeps responses"),
        ("stages.draw.samples_of=cold", "`samples_of: cold`, which is of kind sft"),
        ("stages.hard.results_of=cold", "`results_of: cold` and `metric: first_correct`, which"),
        ("stages.hard={kind: select, name: hard, results_of: draw, metric: reward_std}", "`metric: reward_std`, which"),
        ("stages.hard={kind: select, name: hard, results_of: draw}", "stages.3: metric 'pass_rate' needs `correct`"),
        ("stages.hard={kind: select, name: hard, results_of: draw, metric: limr, correct: [exact]}", "metric 'limr'"),
        ("stages.hard={kind: select, name: hard, results_of: draw, metric: limr, threshold: 0.5}", "threshold is for"),
        ("stages.hard.max_responses=1", "stages.3: `max_responses` limits correct responses"),
        ("stages.hard.range=[0.9, 0.1]", "stages.3: range [0.9, 0.1] is empty"),
        ("stages.draw.rollout_steps=[{kind: generate, partial_rollout_tokens: 8}]", "completes every response"),
        ("stages.draw.rollout_steps=[{kind: generate}, {kind: probe, corruption: grey}]", "has no use for it"),
        ("stages.draw.rollout_steps=[{kind: generate}, {kind: tools, tools: [{fn: a:b}]}]", "stage has no tools"),
        (f"stages.draw.rollout_steps={rethink('min_free_tokens: 512')}", "leave 512 of sampling.max_new_tokens"),
        ("stages.draw.sampling={temperature: 0}", "stages.1: temperature 0 makes all 4 rollouts"),
        ("stages.again.samples_of=hard", "that stage keeps prompts"),
        ("data.streaming={}", "stage 'draw' uses every sample once"),
        ("response_format.thinking=required", "stage 'again': drop_thinking_prob makes responses without"),
        ("response_format={style: json, thinking: optional}", "drop_thinking_prob makes responses without"),
        ("stages.again.drop_thinking_prob=1.5", "stages.4.drop_thinking_prob: must be less than or equal"),
        ("stages.rl.reference.init_from=base", "stage 'rl': `reference.init_from: base`"),
        ("stages.rl.data_order={kind: priority}", "stages.5: data_order 'priority' follows rewards"),
        ("stages.cold.data_order={kind: priority}", "stages.0: data_order 'priority' follows rewards here"),
        ("stages.rl.data_order={kind: mixture, points: []}", "stages.5.data_order.points: needs at least one entry"),
        ("stages.rl.data_order={kind: mixture, points: [[0, [0]]]}", "data_order: the weights at step 0 are all 0"),
        ("stages.rl.data_order={kind: mixture, points: [[5, [1]], [5, [1]]]}", "steps must rise from point to point"),
        ("stages.rl.data_order={kind: mixture, points: [[0, [1, 2]]]}", "data_order.points has 2 weights at step 0"),
        ("stages.rl.data_order={kind: mixture, points: [[0, [-1]]]}", "must be greater than or equal to 0, got -1"),
        ("stages.rl.data_order={kind: curriculum, phases: [{}]}", "stages.5.data_order.phases: "),
        ("stages.rl.data_order={kind: curriculum, phases: [{}, {}]}", "data_order: phase 0 never ends, and others"),
        ("stages.rl.data_order={kind: curriculum, phases: [{max_samples: 0}, {}]}", "phases.0.max_samples: must be"),
        ("stages.rl.data_order={kind: curriculum, phases: [{max_samples: 9}, {max_samples: 9}]}", "the last phase"),
        ("stages.rl.data_order={kind: curriculum, phases: [{plateau: {}}, {}]}", "data_order 'curriculum'"),
        ("stages.rl.data_order={by: x}", "stages.5.data_order.kind: missing; write one of 'shuffled', 'sorted'"),
        ("stages.rl.data_order.kind=shufled", "got the text 'shufled'; did you mean 'shuffled'?"),
        ("stages.rl.data_order={kind: sorted, bye: x}", "stages.5.data_order.bye: unknown key"),
        ("stages.rl.repeat_samples_to=0", "stages.5.repeat_samples_to: must be greater than or equal"),
    ],
)
def test_stages_that_do_not_fit_together_are_refused(tmp_path, override, said):
    assert said in refused(write(tmp_path, HARVEST), override)


BASE = "stages.rl.reference.init_from=base"
WHEN = "stages.rl.when={task: [count]}"
PILOT = "{kind: rl, name: pilot, steps: 1, track_rewards: [exact]}"
MIXTURE = "stages.rl.data_order={kind: mixture, points: [[0, [1]]]}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["stages=[{kind: sample, name: draw}]"], "stages: no stage trains"),
        (["model.lora={}", BASE], "init_from has no effect without `loss.kl.coef`"),
        (["stages.rl.loss.kl.coef=0.1", BASE, "stages.rl.reference.update=ema"], "take out `update: ema`"),
        (["data.streaming={}", "stages.rl.data_order={kind: sorted}"], "order 'sorted' has to know all samples"),
        (
            [
                "data.streaming={}",
                f"stages=[{PILOT}, {{kind: select, name: best, results_of: pilot, metric: reward_std}}]",
            ],
            "stage 'best' has `results_of: pilot`, whose samples come from a stream",
        ),
        (["data.streaming={}", "stages.rl.repeat_samples_to=9"], "repeat_samples_to has to know all samples"),
        (["data.train.0.weight=1", "stages.rl.repeat_samples_to=9"], "repeat_samples_to cannot be combined with the"),
        (["data.train.0.weight=1", "stages.rl.data_order={kind: sorted}"], "'sorted' draws all samples equally"),
        (
            ["data.train.0.weight=1", "stages.rl.track_rewards=[exact]", "stages.rl.data_order={kind: priority}"],
            "'priority' draws all samples equally",
        ),
        (
            ["data.train.0.weight=1", "stages.rl.data_order={kind: curriculum, phases: [{max_samples: 9}, {}]}"],
            "'curriculum' draws all samples equally",
        ),
        (["data.train.0.weight=1", "stages.cold.data_order={kind: sorted}"], "stage 'cold': data_order 'sorted' draws"),
        ([MIXTURE, "stages.rl.repeat_samples_to=9"], "repeat_samples_to has no effect on a mixture"),
        ([WHEN, MIXTURE], "stage 'rl' has `when`, and sources"),
        ([WHEN, "data.train.0.weight=1"], "stage 'rl' has `when`, and sources"),
        ([WHEN, "data.streaming={}"], "stage 'rl' has `when`, and data.streaming"),
    ],
)
def test_settings_of_several_sections_that_contradict_each_other_are_refused(tmp_path, overrides, said):
    assert said in refused(write(tmp_path, SMALL), *overrides)


@pytest.mark.parametrize(
    ("limit", "expected"), [(2, [2, 2, "none", "none", 2, 2]), (15, [10, 15, "none", "none", 5, 15])]
)
def test_steps_are_capped_in_every_stage_that_has_more(tmp_path, limit, expected):
    capped = effective_config(load_config(write(tmp_path, HARVEST)), steps=limit)
    assert [getattr(stage, "steps", "none") for stage in capped.stages] == expected

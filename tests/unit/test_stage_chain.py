"""Stages that build on each other: what is refused when the config is read, and how a config says it in words."""

import pytest
from config_samples import SMALL, refused, write

from mmrl.config import cap_steps, explain, load_config

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


@pytest.fixture
def path(tmp_path):
    return write(tmp_path, HARVEST)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "stages.rl.samples_of=nope",
            "stage 'rl' has `samples_of: nope`, and no stage is called that; the earlier ones: cold, ",
        ),
        (
            "stages.cold.samples_of=hard",
            "stage 'cold' has `samples_of: hard`, which is not an earlier stage; move that one before",
        ),
        ("stages.hard.results_of=hard", "stage 'hard' has `results_of: hard`, which is not an earlier stage"),
        (
            "stages.rl.samples_of=draw",
            "`samples_of: draw`, which is of kind sample; only a `select` stage has samples for",
        ),
        ("stages.rl.samples_of=right", "`samples_of: right`, which keeps responses; they are for an sft stage with"),
        ("stages.draw.samples_of=cold", "`samples_of: cold`, which is of kind sft; only a `select` stage"),
        (
            "stages.hard.results_of=cold",
            "`results_of: cold` and `metric: first_correct`, which needs a stage of kind `sample`",
        ),
        (
            "stages.hard={kind: select, name: hard, results_of: draw, metric: reward_std}",
            "`metric: reward_std`, which needs an `rl` stage with `track_rewards`",
        ),
        ("stages.hard={kind: select, name: hard, results_of: draw}", "stages.3: metric 'pass_rate' needs `correct`"),
        (
            "stages.hard={kind: select, name: hard, results_of: draw, metric: limr, correct: [exact]}",
            "metric 'limr' reads tracked rewards",
        ),
        ("stages.hard.max_responses=1", "stages.3: `max_responses` limits correct responses; set `output: responses`"),
        ("stages.hard.range=[0.9, 0.1]", "stages.3: range [0.9, 0.1] is empty; write the lower end first"),
        (
            "stages.draw.rollout_steps=[{kind: generate, partial_rollout_tokens: 8}]",
            "stages.1.rollout_steps: a sample stage completes",
        ),
        ("stages.draw.rollout_steps=[{kind: generate}, {kind: probe, corruption: grey}]", "a sample stage has none"),
        (
            "stages.draw.rollout_steps=[{kind: generate}, {kind: tools, tools: [{fn: a:b}]}]",
            "a sample stage has no tools",
        ),
        (
            f"stages.draw.rollout_steps={rethink('min_free_tokens: 512')}",
            "leave 512 of sampling.max_new_tokens=512 free, which none does",
        ),
        ("stages.draw.sampling={temperature: 0}", "stages.1: temperature 0 makes all 4 rollouts of a prompt equal"),
        (
            "stages.again.samples_of=hard",
            "stage 'again' has `samples_of: hard` and `target_field: response`, but that stage keeps prompts",
        ),
        ("data.streaming={}", "stage 'draw' uses every sample once, but `data.streaming` has no end"),
        (
            "response_format.thinking=required",
            "stage 'again': drop_thinking_prob makes responses without thinking, which",
        ),
        (
            "response_format={style: json, thinking: optional}",
            "stage 'again': drop_thinking_prob makes responses without thinking",
        ),
        ("stages.again.drop_thinking_prob=1.5", "stages.4.drop_thinking_prob: must be less than or equal to 1"),
        (
            "stages.rl.reference.init_from=base",
            "stage 'rl': `reference.init_from: base` is the base of an adapter: set `model.lora`",
        ),
        (
            "stages.rl.data_order={kind: priority}",
            "stages.5: data_order 'priority' follows rewards: name the terms to follow",
        ),
        (
            "stages.cold.data_order={kind: priority}",
            "stages.0: data_order 'priority' follows rewards here, and an sft stage has",
        ),
        ("stages.rl.data_order={kind: mixture, points: []}", "stages.5.data_order.points: needs at least one entry"),
        (
            "stages.rl.data_order={kind: mixture, points: [[0, [0]]]}",
            "data_order: the weights at step 0 are all 0: nothing could",
        ),
        (
            "stages.rl.data_order={kind: mixture, points: [[5, [1]], [5, [1]]]}",
            "steps must rise from point to point, got 5, 5",
        ),
        (
            "stages.rl.data_order={kind: mixture, points: [[0, [1, 2]]]}",
            "data_order.points has 2 weights at step 0, and data.train 1",
        ),
        ("stages.rl.data_order={kind: mixture, points: [[0, [-1]]]}", "must be greater than or equal to 0, got -1"),
        ("stages.rl.data_order={kind: curriculum, phases: [{}]}", "stages.5.data_order.phases: "),
        (
            "stages.rl.data_order={kind: curriculum, phases: [{}, {}]}",
            "data_order: phase 0 never ends, and others follow; give it",
        ),
        (
            "stages.rl.data_order={kind: curriculum, phases: [{max_samples: 0}, {}]}",
            "phases.0.max_samples: must be greater than or",
        ),
        (
            "stages.rl.data_order={kind: curriculum, phases: [{max_samples: 9}, {max_samples: 9}]}",
            "data_order: the last phase lasts until the stage ends; it takes neither `max_samples` nor `plateau`",
        ),
        (
            "stages.rl.data_order={kind: curriculum, phases: [{plateau: {}}, {}]}",
            "stages.5: data_order 'curriculum' follows rewards: name the terms",
        ),
        (
            "stages.rl.data_order={by: x}",
            "stages.5.data_order.kind: missing; write one of 'shuffled', 'sorted', 'mixture', ",
        ),
        ("stages.rl.data_order.kind=shufled", "got the text 'shufled'; did you mean 'shuffled'?"),
        ("stages.rl.data_order={kind: sorted, bye: x}", "stages.5.data_order.bye: unknown key"),
        ("stages.rl.repeat_samples_to=0", "stages.5.repeat_samples_to: must be greater than or equal to 1"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(path, override, said):
    assert said in refused(path, override)


def test_streams_know_no_samples_to_order_or_repeat(tmp_path):
    path = write(tmp_path, SMALL)
    assert "order 'sorted' has to know all samples" in refused(
        path, "data.streaming={}", "stages.rl.data_order={kind: sorted}"
    )
    assert "repeat_samples_to has to know all samples" in refused(
        path, "data.streaming={}", "stages.rl.repeat_samples_to=9"
    )


def test_a_base_reference_needs_a_penalty_and_never_moves(tmp_path):
    path, base = write(tmp_path, SMALL), "stages.rl.reference.init_from=base"
    assert "init_from has no effect without `loss.kl.coef`" in refused(path, "model.lora={}", base)
    moving = ["model.lora={}", base, "stages.rl.loss.kl.coef=0.1", "stages.rl.reference.update=ema"]
    assert "`init_from: base` is a model that nothing changes; take out `update: ema`" in refused(path, *moving)
    words = explain(load_config(path, moving[:-1]))
    assert "π_ref is the model without its adapter" in words


def test_a_run_needs_a_stage_that_trains(tmp_path):
    path = write(tmp_path, SMALL)
    assert "stages: no stage trains" in refused(path, "stages=[{kind: sample, name: draw}]")


def test_weights_of_sources_do_not_count_what_is_repeated(tmp_path):
    path = write(tmp_path, SMALL)
    said = refused(path, "data.train.0.weight=1", "stages.rl.repeat_samples_to=9")
    assert "stage 'rl': repeat_samples_to cannot be combined with the weights of data.train" in said


def test_a_stage_may_not_take_a_part_of_sources_that_have_shares(tmp_path):
    path, when = write(tmp_path, SMALL), "stages.rl.when={task: [count]}"
    mixed = "stages.rl.data_order={kind: mixture, points: [[0, [1]]]}"
    assert "stage 'rl' has `when`, and sources have weights" in refused(path, when, mixed)
    assert "stage 'rl' has `when`, and sources have weights" in refused(path, when, "data.train.0.weight=1")
    assert "stage 'rl' has `when`, and data.streaming is set" in refused(path, when, "data.streaming={}")


def test_a_part_of_the_samples_is_explained(path):
    words = explain(
        load_config(path, ["stages.rl.when={task: [count], level: [a, b]}", "stages.draw.when={task: [read]}"])
    )
    assert "samples    those of data.train of which task is count and level is a or b\n" in words
    assert "when {task: [read]}: Samples that are used" in words


def test_the_stages_are_explained(path):
    again = f"stages.draw.rollout_steps={rethink('fraction: 0.5')}"
    words = explain(load_config(path, ["stages.rl.samples_of=hard", "stages.rl.repeat_samples_to=64", again]))
    for line in (
        "Stage 2 of 6, draw: rollouts, written down",
        "steps      rethink: Forced rethinking: finished responses are continued after a trigger",
        "fraction 0.5: Share of these responses that is drawn for continuation.",
        "stage      Rollouts of the current policy, written with their reward terms",
        "Stage 3 of 6, right: a choice of samples",
        "correct [exact]: Reward terms that decide whether a response of a `sample` stage is correct",
        "max_responses 2: Keep at most this many correct responses of a sample, the shortest first.",
        "y the sample's response as it is, without its thinking 50% of the time",
        "N counts every token of the answer, the only part trained on, of the whole step",
        "top_k 9: Keep only this many samples: those with the largest values.",
        "samples    those that stage hard kept, repeated to 64",
        "order      Every sample once per epoch, shuffled anew for each",
    ):
        assert line in words, line


@pytest.mark.parametrize(
    ("order", "line"),
    [
        (
            "{kind: sorted, column: level, descending: true}",
            "column level: Column of `meta`",
        ),
        (
            "{kind: mixture, points: [[0, [1]], [9, [2]]]}",
            "points [[0, [1.0]], [9, [2.0]]]: Pairs of a step",
        ),
        (
            "{kind: priority, weight_by: failure}",
            "weight_by failure: Probability of drawing a sample whose last mean reward was p",
        ),
        (
            "{kind: curriculum, phases: [{when: {task: [a, b]}, max_samples: 9, plateau: {window: 5}}, {}]}",
            "phases [{when: {task: [a, b]}, max_samples: 9, plateau: {window: 5, min_improvement: 0.01}}",
        ),
    ],
)
def test_orders_are_explained(tmp_path, order, line):
    assert line in explain(
        load_config(write(tmp_path, SMALL), [f"stages.rl.data_order={order}", "stages.rl.track_rewards=[exact]"])
    )


def test_a_short_run_is_short_in_every_stage(path):
    capped = cap_steps(load_config(path), 2)
    steps = [getattr(stage, "steps", "none") for stage in capped.config.stages]
    assert steps == [2, 2, "none", "none", 2, 2]
    assert capped.origins["stages.1.steps"] == "command line"

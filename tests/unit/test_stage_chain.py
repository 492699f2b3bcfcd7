"""Stages that build on each other: what is refused when the config is read, and how a config says it in words."""

import pytest
from config_samples import SMALL, refused, write

from mmrl.config import cap_steps, explain, load_config

HARVEST = (
    SMALL.replace("  - kind: rl\n    name: rl\n", "@  - kind: rl\n    name: rl\n")
    .replace("run: {name: demo}", "run: {name: demo}\nanswer: {think: optional}")
    .replace(
        "@",
        """\
  - {kind: sample, name: draw, group_size: 4}
  - {kind: select, name: right, source: draw, right: [exact], keep: responses, most: 2}
  - {kind: select, name: hard, source: draw, right: [exact], by: attempts, within: [2, null], top: 9}
  - {kind: sft, name: again, source: right, imitate: response, steps: 5, thought_dropout: 0.5, learn: answer}
""",
    )
)


def look(option):
    return "[{kind: generate}, {kind: continue_with, correct: [exact], " + option + "}]"


@pytest.fixture
def path(tmp_path):
    return write(tmp_path, HARVEST)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "stages.rl.from_stage=nope",
            "stage 'rl' has `source: nope`, and no stage is called that; the earlier ones: cold, ",
        ),
        (
            "stages.cold.from_stage=hard",
            "stage 'cold' has `source: hard`, which is no earlier stage; move that one before",
        ),
        ("stages.hard.from_stage=hard", "stage 'hard' has `source: hard`, which is no earlier stage"),
        ("stages.rl.from_stage=draw", "`source: draw`, which is of kind sample; only a `select` stage has samples for"),
        ("stages.rl.from_stage=right", "`source: right`, which keeps responses; they are for an sft stage with"),
        ("stages.draw.from_stage=cold", "`source: cold`, which is of kind sft; only a `select` stage"),
        (
            "stages.hard.from_stage=cold",
            "`source: cold` and goes by attempts, which a stage of kind `sample` finds out",
        ),
        (
            "stages.hard={kind: select, name: hard, from_stage: draw, metric: reward_std}",
            "goes by std, which an `rl` stage finds out",
        ),
        ("stages.hard={kind: select, name: hard, from_stage: draw}", "stages.3: by 'pass_rate' needs `right`"),
        (
            "stages.hard={kind: select, name: hard, from_stage: draw, metric: limr, correct: [exact]}",
            "by 'limr' goes by history",
        ),
        ("stages.hard.max_responses=1", "stages.3: `most` counts right responses; set `keep: responses`"),
        ("stages.hard.range=[0.9, 0.1]", "stages.3: within [0.9, 0.1] holds nothing; write the lower end first"),
        (
            "stages.draw.rollout_steps=[{kind: generate, partial_rollout_tokens: 8}]",
            "stages.1.program: a sample stage completes",
        ),
        ("stages.draw.rollout_steps=[{kind: generate}, {kind: probe, corruption: grey}]", "a sample stage has none"),
        (
            "stages.draw.rollout_steps=[{kind: generate}, {kind: tools, tools: [{fn: a:b}]}]",
            "a sample stage has no tools",
        ),
        (f"stages.draw.rollout_steps={look('place: add')}", "a sample stage writes `group_size` rollouts"),
        (f"stages.draw.rollout_steps={look('room: 512')}", "leave 512 of sampling.max_new_tokens=512, which none does"),
        ("stages.draw.sampling={temperature: 0}", "stages.1: temperature 0 makes all 4 rollouts of a prompt equal"),
        (
            "stages.again.from_stage=hard",
            "stage 'again' has `imitate: response` and `source: hard`, which keeps prompts",
        ),
        ("data.streaming={}", "stage 'draw' asks every sample once, and `data.stream` has no end of them"),
        ("response_format.thinking=required", "stage 'again': thought_dropout makes responses without thinking, which"),
        (
            "response_format={style: json, thinking: optional}",
            "stage 'again': thought_dropout makes responses without thinking",
        ),
        ("stages.again.drop_thinking_prob=1.5", "stages.4.thought_dropout: must be less than or equal to 1"),
        (
            "stages.rl.reference.init_from=base",
            "stage 'rl': `reference.start: base` is an adapter's base: set `model.lora`",
        ),
        (
            "stages.rl.data_order={kind: priority}",
            "stages.5: order 'priority' goes by rewards: name the terms it is to go by",
        ),
        (
            "stages.cold.data_order={kind: priority}",
            "stages.0: order 'priority' goes by rewards here, and an sft stage has",
        ),
        ("stages.rl.data_order={kind: mixture, points: []}", "stages.5.order.points: needs at least one entry"),
        (
            "stages.rl.data_order={kind: mixture, points: [[0, [0]]]}",
            "order: the weights at step 0 are all 0: nothing could",
        ),
        (
            "stages.rl.data_order={kind: mixture, points: [[5, [1]], [5, [1]]]}",
            "steps must rise from point to point, got 5, 5",
        ),
        (
            "stages.rl.data_order={kind: mixture, points: [[0, [1, 2]]]}",
            "order.points has 2 weights at step 0, and data.train 1",
        ),
        ("stages.rl.data_order={kind: mixture, points: [[0, [-1]]]}", "must be greater than or equal to 0, got -1"),
        ("stages.rl.data_order={kind: curriculum, phases: [{}]}", "stages.5.order.phases: "),
        (
            "stages.rl.data_order={kind: curriculum, phases: [{}, {}]}",
            "order: phase 0 never ends, and others follow; give it",
        ),
        (
            "stages.rl.data_order={kind: curriculum, phases: [{max_samples: 0}, {}]}",
            "phases.0.samples: must be greater than or",
        ),
        (
            "stages.rl.data_order={kind: curriculum, phases: [{max_samples: 9}, {max_samples: 9}]}",
            "order: the last phase lasts until the stage ends; it takes neither `samples` nor `plateau`",
        ),
        (
            "stages.rl.data_order={kind: curriculum, phases: [{plateau: {}}, {}]}",
            "stages.5: order 'curriculum' goes by rewards: name the terms",
        ),
        (
            "stages.rl.data_order={by: x}",
            "stages.5.order.kind: missing; write one of 'shuffled', 'sorted', 'mixture', ",
        ),
        ("stages.rl.data_order.kind=shufled", "got the text 'shufled'; did you mean 'shuffled'?"),
        ("stages.rl.data_order={kind: sorted, bye: x}", "stages.5.order.bye: unknown key"),
        ("stages.rl.repeat_samples_to=0", "stages.5.repeat_to: must be greater than or equal to 1"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(path, override, said):
    assert said in refused(path, override)


def test_streams_know_no_samples_to_order_or_repeat(tmp_path):
    path = write(tmp_path, SMALL)
    assert "order 'sorted' has to know all samples" in refused(
        path, "data.streaming={}", "stages.rl.data_order={kind: sorted}"
    )
    assert "repeat_to has to know all samples" in refused(path, "data.streaming={}", "stages.rl.repeat_samples_to=9")


def test_a_base_reference_needs_a_penalty_and_never_moves(tmp_path):
    path, base = write(tmp_path, SMALL), "stages.rl.reference.init_from=base"
    assert "start has no effect without `loss.kl.coef`" in refused(path, "model.lora={}", base)
    moving = ["model.lora={}", base, "stages.rl.loss.kl.coef=0.1", "stages.rl.reference.update=ema"]
    assert "`start: base` is a model that nothing changes; take out `update: ema`" in refused(path, *moving)
    words = explain(load_config(path, moving[:-1]))
    assert "π_ref is the model without its adapter" in words


def test_a_run_needs_a_stage_that_trains(tmp_path):
    path = write(tmp_path, SMALL)
    assert "stages: no stage trains" in refused(path, "stages=[{kind: sample, name: draw}]")


def test_weights_of_sources_do_not_count_what_is_repeated(tmp_path):
    path = write(tmp_path, SMALL)
    said = refused(path, "data.train.0.weight=1", "stages.rl.repeat_samples_to=9")
    assert "stage 'rl': repeat_to does not go with the weights of data.train" in said


def test_a_stage_may_not_take_a_part_of_sources_that_have_shares(tmp_path):
    path, when = write(tmp_path, SMALL), "stages.rl.when={task: [count]}"
    mixed = "stages.rl.data_order={kind: mixture, points: [[0, [1]]]}"
    assert "stage 'rl' has `when`, and sources have weights" in refused(path, when, mixed)
    assert "stage 'rl' has `when`, and sources have weights" in refused(path, when, "data.train.0.weight=1")
    assert "stage 'rl' has `when`, and data.stream is set" in refused(path, when, "data.streaming={}")


def test_a_part_of_the_samples_is_explained(path):
    words = explain(
        load_config(path, ["stages.rl.when={task: [count], level: [a, b]}", "stages.draw.when={task: [read]}"])
    )
    assert "samples    those of data.train of which task is count and level is a or b\n" in words
    assert "samples    those of data.train of which task is read\n" in words


def test_the_stages_are_explained(path):
    again = f"stages.draw.rollout_steps={look('fraction: 0.5')}"
    words = explain(load_config(path, ["stages.rl.from_stage=hard", "stages.rl.repeat_samples_to=64", again]))
    for line in (
        "Stage 2 of 6, draw: rollouts, written down",
        "program    rethink: 50% of the responses that end themselves go on behind words they did not choose",
        "each step  16 prompts x 4 rollouts, with their reward terms",
        "Stage 3 of 6, right: a choice of samples",
        "right is a response of which exact (where they apply) reach 1",
        "as         their right responses, 2 of a sample at most, the shortest",
        "y the sample's response as it stands, without its thinking 50% of the time",
        "N counts every token of the answer, which alone is learned, of the whole step",
        "keeps      samples with attempts from 2; of these the 9 greatest",
        "samples    those that stage hard kept, repeated to 64",
        "order      shuffled anew for each epoch",
    ):
        assert line in words, line


@pytest.mark.parametrize(
    ("order", "line"),
    [
        ("{kind: sorted, column: level, descending: true}", "by level, descending, the same every epoch"),
        ("{kind: mixture, points: [[0, [1]], [9, [2]]]}", "sources mixed 1 at step 0, 2 at step 9, linear between"),
        (
            "{kind: priority, weight_by: failure}",
            "drawn in proportion to 1 - p, at least 0.05, p a sample's last mean reward",
        ),
        (
            "{kind: curriculum, phases: [{when: {task: [a, b]}, max_samples: 9, plateau: {window: 5}}, {}]}",
            "phase 0: samples of which task is a or b, until 9 samples were drawn or 5 steps are not 0.01 better than",
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

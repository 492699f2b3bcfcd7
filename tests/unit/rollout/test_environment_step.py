"""Episodes: turns as actions, observations between them, limits, failures, blind probes and demonstrations."""

from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from factories import make_sample
from PIL import Image
from pydantic import ValidationError
from samplers import make_pipeline
from tool_calls import responses

from mmrl import types
from mmrl.checkpoint.json_codec import dumps, loads
from mmrl.config.schema import BlindProbeConfig, EnvironmentConfig, GreedyConfig, RethinkConfig
from mmrl.config.schema.rollout_steps import GENERATE_ONLY, check_rollout_steps, step_name
from mmrl.log.metric_registry import find_builtin_metric
from mmrl.rollout.environments.episodes import EpisodeReply, EpisodeRequest, EpisodeWorkers
from mmrl.rollout.tools.executor import ToolRunner
from mmrl.utils.observations import DIGEST_KEY, SEED_KEY, observation_digest

FOLDER = Path(__file__).parent


@pytest.fixture
def play(tiny):
    """Plays rollouts with these texts as first turns; later turns are what the tiny model writes."""
    with ExitStack() as runners:

        def run(*texts, batch=None, args=None, **options):
            runner = runners.enter_context(closing(ToolRunner(FOLDER, pictures_dir=frames_of(tiny))))
            pipeline = make_pipeline(tiny, environment(args=args or {}, **options), tool_runner=runner)
            return pipeline.steps[0](batch or responses(tiny, *texts), step=0)

        yield run


def environment(**options):
    defaults = {"fn": "./faulty_environment.py:make", "turns": 3, "timeout_s": 20.0}
    return EnvironmentConfig(kind="environment", **{**defaults, **options})


def frames_of(tiny):
    """The folder of pictures that the tiny model may be shown."""
    return Path(tiny.samples[0].images[0].path).parent / "frames"


def test_an_environment_that_cannot_be_made_stops_the_run(play):
    """Every rollout would be left out of its group, by the default `on_error: skip`."""
    with pytest.raises(types.UserError, match="no such corpus"):
        play("go", args={"fault": "missing"})


def authors(rollout: types.Rollout) -> str:
    return "".join(segment.author[0] for segment in rollout.segments)


def test_each_turn_is_an_action_whose_result_is_shown(tiny, play):
    batch = play("go", "stop")
    ((first, second),) = batch.groups
    assert [turn.state for turn in first.turns][1:] == ["n1", "n2"]
    assert first.turns[0].action == "go"
    assert [turn.info["count"] for turn in first.turns] == [1.0, 2.0, 3.0]
    assert first.turns[-1].truncated and not first.turns[-1].terminated
    # Three turns, and after the first two a prefix, a picture and the rest of an observation.
    assert authors(first) == "p" + "eeep" * 2
    assert [shown.ref.sha256 for shown in first.observations] == [Path(s.ref.path).stem for s in first.observations]
    texts = [
        tiny.processor.tokenizer.decode(s.token_ids) for s in first.segments if s.author is types.Author.ENVIRONMENT
    ]
    assert texts[0].endswith("<|im_end|>\n<|im_start|>user\n") and texts[2] == "1 go<|im_end|>\n<|im_start|>assistant\n"
    (turn,) = second.turns
    assert (turn.terminated, turn.reward, authors(second)) == (True, 0.5, "p")
    metrics = {name.removeprefix("environment/"): value for name, value in batch.metrics.items()}
    assert (metrics["episodes"], metrics["turns"], metrics["terminated"], metrics["truncated"]) == (2, 4, 1, 1)
    assert (metrics["reward"], metrics["media_shown"], metrics["info/count"]) == (2.0, 2, 4)
    assert loads(dumps(first), types.Rollout) == first
    assert not [name for name in batch.metrics if find_builtin_metric(name) is None]


def test_an_environment_may_look_at_its_sample_and_draw_on_it(play, tiny):
    ((rollout,),) = play("go", args={"fault": "look"}).groups
    (ref,) = tiny.samples[0].images
    shown = Image.open(rollout.observations[1].ref.path)
    np.testing.assert_array_equal(np.asarray(shown), np.asarray(Image.open(ref.path).convert("RGB"))[:, ::-1])


def test_turns_do_not_depend_on_workers_or_on_what_else_is_played(play, tiny):
    together = play("go", "bad", "go on", workers=1).groups
    assert play("go", "bad", "go on", workers=3).groups == together
    batch = responses(tiny, "go", "bad", "go on")
    alone = play(batch=types.RolloutBatch(groups=((batch.groups[0][1],),)))
    assert alone.groups[0][0].turns == together[0][1].turns


def test_special_tokens_that_an_environment_writes_do_not_count(tiny, play):
    ((rollout,),) = play("<|im_end|>", turns=2).groups
    eos = tiny.processor.tokenizer.eos_token_id
    written = [s.token_ids for s in rollout.segments if s.author is types.Author.ENVIRONMENT][-1]
    assert written.count(eos) == 1  # that of the suffix


FAILURES = {
    "hang": ("timeouts", "the environment took more than 2 s"),
    "die": ("crashes", "exit code 3"),
    "fail": ("errors", "KeyError: 'oops'"),
    "abstain": ("unscorable", "no service"),
    "nan": ("errors", "reward is nan"),
    "wrong": ("errors", "step returns a mmrl.StepResult, not 'words'"),
    "text_number": ("errors", "text and state"),
    "no_picture": ("errors", "PNG or JPEG"),
    "broken_picture": ("errors", "observation"),
    "forks": ("limits", "worker_limits.processes"),
    "hungry": ("limits", "worker_limits.memory_mib"),
    "huge": ("errors", "decompression bomb"),
    "outside": ("errors", "no such file"),
    "text_box": ("errors", "the fields of a part are numbers"),
}


FAULTS = [pytest.param(fault, marks=pytest.mark.slow if fault in ("hang", "hungry") else ()) for fault in FAILURES]


@pytest.mark.parametrize("fault", FAULTS)
def test_failure_is_counted_and_costs_one_rollout(play, tiny, fault):
    kind, reason = FAILURES[fault]
    limits = {"worker_limits": {"processes": 8, "memory_mib": 1024}, "timeout_s": 2.0 if fault == "hang" else 30.0}
    batch = play("go", "stop", args={"fault": fault}, **limits)
    ((failed, fine),) = batch.groups
    assert failed.failure.kind == kind and reason in failed.failure.reason, failed.failure
    assert failed.failure.reason.startswith("action 2: ")
    assert fine.failure is None and fine.turns[0].terminated
    assert batch.metrics[f"environment/{kind}"] == 1.0
    with pytest.raises(types.UserError, match="sample .*, action 2: "):
        play("go", args={"fault": fault}, on_error="stop", **limits)


def test_what_an_environment_prints_does_no_harm(play):
    ((rollout,),) = play("go", args={"fault": "noise"}).groups
    assert rollout.failure is None


def test_half_of_a_surrogate_pair_is_shown_as_a_question_mark(play, tiny):
    ((rollout,),) = play("go", args={"fault": "half"}).groups
    assert rollout.failure is None
    written = [segment.token_ids for segment in rollout.segments if segment.author is types.Author.ENVIRONMENT][-1]
    assert "You wrote ?" in tiny.processor.decode(written)


def test_episodes_of_a_killed_process_are_played_again(play, tiny):
    """A process that hangs loses the episodes of others, which continue as if nothing had happened."""
    batch = responses(tiny, "go", "hang", "go on")
    ((first, hung, last),) = (disturbed := play(batch=batch, workers=1, timeout_s=2.0)).groups
    assert hung.failure.kind is types.FailureKind.TIMEOUT
    assert disturbed.metrics["environment/replayed"] >= 1.0
    calm = play(batch=types.RolloutBatch(groups=((batch.groups[0][0], batch.groups[0][2]),))).groups[0]
    assert (first.turns, last.turns) == (calm[0].turns, calm[1].turns)
    assert first.observations == calm[0].observations


@pytest.mark.parametrize("fault", ["die", "hang"])
def test_lost_episode_has_time_to_repeat_its_actions(fault):
    """Repeating takes longer than `timeout_s`, which bounds one action; the process was lost in an earlier turn."""
    empty = EpisodeRequest(0, make_sample(), 0, (), (), "slow")
    with closing(EpisodeWorkers(FOLDER, environment(workers=1, timeout_s=1.0))) as workers:
        (first,) = workers.play([empty])
        second = empty._replace(past=("slow",), digests=(first.digest,))
        reply, lost = workers.play([second, empty._replace(key=1, action=fault)])
        assert isinstance(lost, types.Failure)
        third = second._replace(past=("slow", "slow"), digests=(first.digest, reply.digest), action="go")
        (last,) = workers.play([third])
        assert isinstance(last, EpisodeReply) and last.replayed, last


@pytest.mark.slow
def test_environment_with_other_observations_on_replay_fails(play, tiny):
    options = {"workers": 1, "timeout_s": 2.0, "args": {"fault": "other"}}
    ((first, _),) = play("go", "hang", **options).groups
    assert "must be a function of sample, seed and actions" in first.failure.reason
    ((first, _),) = play("go", "hang", replayable=False, **options).groups
    assert "cannot be played again" in first.failure.reason


def test_first_observation_must_be_that_of_the_question(play, tiny):
    batch = responses(tiny, "go")
    ((rollout,),) = batch.groups
    first = types.Observation(text="Begin.")

    def ask(digest):
        sample = replace(rollout.prompt.sample, meta={SEED_KEY: 3, DIGEST_KEY: digest})
        asked = replace(rollout, prompt=replace(rollout.prompt, sample=sample))
        return play(batch=types.RolloutBatch(groups=((asked,),)), args={"first": "Begin."}).groups[0][0]

    assert ask(observation_digest(first)).failure is None
    assert "something else than the question" in ask("0" * 64).failure.reason
    unasked = play("go", args={"first": "Begin."}).groups[0][0]
    assert "something that the question does not" in unasked.failure.reason
    assert unasked.failure.kind is types.FailureKind.ERROR


def test_limits_of_media_and_tokens_end_an_episode(play):
    ((rollout,),) = play("go", max_media=1).groups
    assert [turn.truncated for turn in rollout.turns] == [False, True]
    ((short,),) = play("go", max_tokens=40).groups
    assert [turn.truncated for turn in short.turns] == [True] and authors(short) == "p"


def test_turn_that_asks_for_a_missing_medium_is_invalid_whether_or_not_the_reply_fits(play):
    args = {"fault": "no_such_medium"}
    whole = play("go", args=args)
    ((rollout,),) = whole.groups
    cut = play("go", args=args, max_tokens=rollout.num_tokens - 1)
    ((shorter,),) = cut.groups
    assert [turn.valid for turn in rollout.turns] == [True, False, True]
    assert [turn.valid for turn in shorter.turns] == [True, False] and shorter.turns[-1].truncated
    assert whole.metrics["environment/invalid"] == cut.metrics["environment/invalid"] == 1.0


def test_calls_and_tags_are_read_as_actions(play):
    text = 'I go.<tool_call>{"name": "go", "arguments": {"x": 1}}</tool_call>'
    ((rollout,),) = play(text, action="call", turns=2).groups
    assert rollout.turns[0].action == types.Action("go", {"x": 1})
    ((broken,),) = play("<tool_call>{go</tool_call>", action="call", turns=2, on_invalid="end").groups
    assert (broken.turns[0].action, broken.turns[0].valid, broken.turns[0].truncated) == (None, False, True)
    ((said,),) = play("no call", action="call", turns=1).groups
    assert said.turns[0].action == "no call"
    ((tagged,),) = play("<answer>stop</answer>", action="tag").groups
    assert tagged.turns[0].action == "stop" and tagged.turns[0].terminated
    ((untagged,),) = play("stop", action="tag", turns=2).groups
    assert untagged.turns[0].action is None and not untagged.turns[0].valid


@pytest.mark.parametrize("probe", [BlindProbeConfig(kind="probe", corruption="grey"), GreedyConfig(kind="greedy")])
def test_siblings_and_probes_get_one_seed_and_other_samples_another(tiny, probe):
    batch = responses(tiny, "stop", "stop")
    ((rollout, sibling),) = batch.groups
    name = step_name(probe)

    def rename(name):
        return replace(rollout, prompt=replace(rollout.prompt, sample=replace(rollout.prompt.sample, id=name, meta={})))

    def play(step, *group):
        (played,) = step(types.RolloutBatch(groups=(group,)), step=0).groups
        return [rollout.turns[0].state for rollout in played]

    with closing(ToolRunner(FOLDER, pictures_dir=frames_of(tiny))) as runner:
        config = environment(args={"begins": "seed"})
        ordinary, prober = make_pipeline(tiny, config, probe, tool_runner=runner).steps
        ids = ("own", "other", "own~1", "own~2", f"own~{name}")
        seeds = play(ordinary, replace(rename("own"), index=sibling.index), *map(rename, ids))
        assert seeds[0] == seeds[1] and len(set(seeds)) == len(ids)
        assert play(prober.steps[0], *(rename(f"{id}~{name}") for id in ids)) == seeds[1:]


@pytest.mark.parametrize("on_invalid", ["tell", "end"])
def test_turn_without_an_action_is_in_the_state_in_which_it_was_written(play, on_invalid):
    options = {"args": {"begins": "n0"}, "action": "call", "on_invalid": on_invalid, "turns": 4}
    broken, call = "<tool_call>{go</tool_call>", '<tool_call>{"name": "go", "arguments": {}}</tool_call>'
    ((at_once, later),) = play(broken, call, **options).groups
    assert (at_once.turns[0].action, at_once.turns[0].state) == (None, "n0")
    # The tiny model never writes a call that is broken, so its text is an action.
    moved = ["n0"] if on_invalid == "end" else ["n0", "n0", "n1", "n2"]
    assert [turn.state for turn in at_once.turns] == moved
    assert [turn.state for turn in later.turns] == ["n0", "n1", "n2", "n3"]


def test_turn_without_an_action_after_others_is_in_the_state_that_they_led_to(play):
    ((rollout,),) = play("<answer>go</answer>", args={"begins": "n0"}, action="tag", turns=4).groups
    assert rollout.turns[0].action == "go" and rollout.turns[1].action is None
    assert [turn.state for turn in rollout.turns] == ["n0", "n1", "n1", "n1"]
    assert [turn.valid for turn in rollout.turns] == [True, False, False, False]


def test_environment_that_fails_to_begin_fails_a_turn_without_an_action(play):
    batch = play("stop", args={"begins": "error"}, action="tag")
    ((failed,),) = batch.groups
    assert failed.failure.reason.startswith("action 1: the environment raised ZeroDivisionError")
    assert (batch.metrics["environment/errors"], batch.metrics["environment/turns"]) == (1.0, 1.0)


def test_text_that_a_step_forced_into_a_turn_is_part_of_its_action(tiny, play):
    batch = responses(tiny, "go")
    ((rollout,),) = batch.groups
    forced = types.Segment(token_ids=tiny.processor.tokenize(" on"), logprobs=(0.0,), author=types.Author.FORCED)
    (written,) = rollout.segments
    more = replace(written, token_ids=tiny.processor.tokenize(" now"))
    joined = replace(rollout, segments=(written, forced, more))
    ((played,),) = play(batch=types.RolloutBatch(groups=((joined,),)), turns=1).groups
    assert played.turns[0].action == "go on now"


def test_blind_probe_stays_blind(tiny, play):
    batch = responses(tiny, "go")
    ((rollout,),) = batch.groups
    images = [replace(ref, corruption=types.Corruption.GREY) for ref in rollout.prompt.sample.images]
    blind = replace(rollout.prompt.sample, parts=tuple(images), id="x~grey")
    prompt = tiny.processor.build(blind)
    ((played,),) = play(batch=types.RolloutBatch(groups=((replace(rollout, prompt=prompt),),))).groups
    assert {shown.ref.corruption for shown in played.observations} == {types.Corruption.GREY}


def test_expert_makes_demonstrations(tiny):
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:2]]
    empty = [tiny.processor.build_demonstration(prompt, "") for prompt in prompts]
    config = environment(args={"expert": True}, turns=5)
    with closing(ToolRunner(FOLDER, pictures_dir=frames_of(tiny))) as runner:
        demonstrations, metrics = make_pipeline(tiny, config, tool_runner=runner).steps[0].complete(empty)
        with pytest.raises(types.UserError, match="no method `expert`"):
            plain = make_pipeline(tiny, config.model_copy(update={"args": {}}), tool_runner=runner).steps[0]
            plain.complete(empty)
    for demonstration in demonstrations:
        assert authors(demonstration) == "deeedeeed"
        assert [turn.action for turn in demonstration.turns] == ["go", "go", "stop"]
        eos = tiny.processor.tokenizer.eos_token_id
        ends = [s.token_ids[-1] for s in demonstration.segments if s.author is types.Author.DEMONSTRATION]
        assert ends == [eos] * 3 and demonstration.finish_reason is types.FinishReason.EOS
    assert metrics["environment/terminated"] == 2.0


def test_the_example_plays(tiny):
    """Its expert finds the number, and each turn halves what is left."""
    config = EnvironmentConfig(kind="environment", fn="./environment.py:make", args={"largest": 9}, turns=4)
    examples = Path(__file__).parents[3] / "examples"
    first = types.Observation(text="Guess my number, from 1 to 9. Answer with the number alone.")
    meta = {SEED_KEY: 6, DIGEST_KEY: observation_digest(first)}
    prompt = tiny.processor.build(replace(tiny.samples[0], id="guess", meta=meta))
    with closing(ToolRunner(examples)) as runner:
        step = make_pipeline(tiny, config, tool_runner=runner).steps[0]
        (episode,), metrics = step.complete([tiny.processor.build_demonstration(prompt, "")])
    assert [turn.action for turn in episode.turns] == ["5", "7"]
    assert [turn.state for turn in episode.turns][1] == "6 to 9"
    assert episode.turns[-1].info == {"success": 1.0} and metrics["environment/info/success"] == 1.0


def test_steps_that_have_no_meaning_beside_an_environment_are_refused():
    single = environment()
    rethink = RethinkConfig(kind="rethink", correct=("a",))
    swapped = BlindProbeConfig(kind="probe", corruption="swapped")
    second = single.model_copy(update={"name": "second"})
    for other, message in ((rethink, "rethink continues responses"), (swapped, "hides nothing"), (second, "two")):
        with pytest.raises(ValueError, match=message):
            check_rollout_steps((*GENERATE_ONLY, single, other))
    check_rollout_steps((*GENERATE_ONLY, single, BlindProbeConfig(kind="probe", corruption="grey")))
    with pytest.raises(ValidationError):
        environment(turns=0)

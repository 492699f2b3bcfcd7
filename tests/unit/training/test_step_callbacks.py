"""The callbacks after a step (validation, checkpoints), and the evaluation of held-out samples."""

import io
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from factories import make_config, make_score
from scoring import constant, make_scorer, term
from thread_ranks import run_on_ranks

from mmrl.config.schema import ValidationConfig
from mmrl.distributed.ranks import SingleProcess
from mmrl.log.console import Console
from mmrl.log.logger import NullLogger
from mmrl.training.callbacks import PeriodicCheckpointer, Validation, check_metric_name
from mmrl.training.held_out import HeldOutEvaluation
from mmrl.types import EvalRewards, RunInterrupted, TrainingState, Unscorable, UserError
from mmrl_rewards.contract import reward


def evaluate(tiny, scorer, *, batch_size, ranks=None):
    """Return the rewards of seven samples, and what the console of this rank showed."""
    ranks = ranks or SingleProcess()
    out = io.StringIO()
    engine = SimpleNamespace(
        make_sampler=lambda *seed_parts: tiny.sampler(),
        sync_weights=lambda version: None,
        gather_for_sampling=nullcontext,
    )
    run = SimpleNamespace(
        config=make_config(evaluation={"batch_size": batch_size, "max_new_tokens": tiny.params.max_new_tokens}),
        engine=engine,
        scorer=scorer,
        processor=tiny.processor,
        banned_token_ids=tiny.params.banned_token_ids,
        tool_runner=None,
        functions=SimpleNamespace(evaluation_steps={}),
        console=Console(out, quiet=ranks.rank > 0),
        ranks=ranks,
    )
    evaluation = HeldOutEvaluation(run, NullLogger())
    return evaluation.measure(tiny.samples[:7], TrainingState(step=3)).rewards, out.getvalue()


def test_each_held_out_sample_is_measured_once_in_batches_of_any_size(tiny):
    scorer = SimpleNamespace(score_eval=lambda rollouts: [make_score(n=rollout.num_tokens) for rollout in rollouts])
    rewards, shown = evaluate(tiny, scorer, batch_size=3)
    assert {name for by_sample in rewards.values() for name in by_sample} == {s.id for s in tiny.samples[:7]}
    assert all(rewards[sample.task][sample.id] > 0 for sample in tiny.samples[:7])
    assert rewards == evaluate(tiny, scorer, batch_size=1)[0] == evaluate(tiny, scorer, batch_size=100)[0]
    assert "warning" not in shown  # a slow machine shows progress


def test_evaluation_counts_the_fallback_of_a_failed_reward_and_says_so(make_tiny):
    fails = term(constant(Unscorable("no verdict")), fallback=0.5)
    scorer = make_scorer(fails, term(constant(1.0, name="fine")))
    rewards, shown = evaluate(make_tiny(), scorer, batch_size=4)
    assert {reward for by_sample in rewards.values() for reward in by_sample.values()} == {1.5}
    warning = "warning: evaluation: reward 'odd' failed on 7 of 7 (unscorable); its fallback counts"
    assert [line for line in shown.splitlines() if line.startswith("warning")] == [warning]


def test_failed_rewards_of_all_ranks_are_counted_in_one_warning(make_tiny):
    tinies = [make_tiny(), make_tiny()]
    # Rank 0 measures samples 0 and 6, rank 1 sample 3.
    failing = [sample.id for sample in tinies[0].samples[:7:3]]

    @reward(name="odd")
    def odd(response, sample) -> float:
        if sample.id in failing:
            raise Unscorable("no verdict")
        return 1.0

    def measure(ranks):
        return evaluate(tinies[ranks.rank], make_scorer(term(odd, fallback=0.5)), batch_size=2, ranks=ranks)

    (rewards, shown), (other_rewards, other_shown) = run_on_ranks(2, measure)
    assert rewards == other_rewards and other_shown == ""
    warning = "warning: evaluation: reward 'odd' failed on 3 of 7 (unscorable); its fallback counts"
    assert [line for line in shown.splitlines() if line.startswith("warning")] == [warning]


class FakeEvaluation:
    """Returns the next rewards at each measurement, and records what validation logs and prints."""

    def __init__(self, *rewards):
        self.rewards, self.logged, self.recorded, self.printed = list(rewards), [], [], []

    def measure(self, state):
        by_task = {task: {"x": mean, "y": mean + 0.2} for task, mean in zip("ab", self.rewards.pop(0), strict=True)}
        return EvalRewards(by_task, {"rethink/attempted": 4.0}, ("a group",))

    def log(self, state, metrics):
        self.logged.append((state.step, metrics))

    def record(self, state, groups):
        self.recorded.append((state.step, groups))

    def ends_stage(self, steps, **options):
        """Return `stage_done` after each step."""
        validation = Validation(self.measure, ValidationConfig(**options), self.log, self.record, self.printed.append)
        states = [TrainingState(step=step) for step in steps]
        for state in states:
            validation.on_step_end(state, None)
        return [state.stage_done for state in states]


def test_validation_measures_when_due_and_ends_the_stage_at_the_goal():
    evaluation = FakeEvaluation((0.1, 0.3), (0.5, 0.9))
    done = evaluation.ends_stage((1, 9, 10, 11, 20), every=10, stop_at_mean_reward=0.8)
    assert done == [False, False, False, False, True]
    assert [step for step, _ in evaluation.logged] == [10, 20]
    assert evaluation.recorded == [(10, ("a group",)), (20, ("a group",))]
    assert evaluation.logged[0][1] == pytest.approx(
        {"validation/a": 0.2, "validation/b": 0.4, "validation/mean": 0.3, "validation/rethink/attempted": 4.0}
    )
    assert evaluation.printed[0] == "validation after 10 steps: a 0.200  b 0.400  mean 0.300"


def test_validation_without_a_goal_only_measures():
    evaluation = FakeEvaluation((9.0, 9.0))
    assert evaluation.ends_stage((2,), every=2) == [False]
    assert len(evaluation.logged) == 1


@pytest.fixture
def manager():
    """A checkpoint manager that records its calls."""
    calls = []
    return SimpleNamespace(
        calls=calls, commit_if_written=lambda: calls.append("commit_if_written"), wait=lambda: calls.append("wait")
    )


def test_checkpoints_are_saved_when_due_and_when_the_user_stops(manager):
    saved, stop = [], False
    callback = PeriodicCheckpointer(lambda state: saved.append(state.step), manager, lambda: stop, every=4)
    for step in range(1, 10):
        callback.on_step_end(TrainingState(step=step), None)
    assert saved == [4, 8]
    assert manager.calls == ["commit_if_written"] * 9
    stop = True
    with pytest.raises(RunInterrupted):
        callback.on_step_end(TrainingState(step=10), None)
    assert saved == [4, 8, 10]
    assert manager.calls[-2:] == ["commit_if_written", "wait"]  # nothing is being written any more


def test_signal_that_arrives_during_a_save_ends_the_run_after_it(manager):
    stops = iter([False, True])
    callback = PeriodicCheckpointer(lambda state: None, manager, lambda: next(stops), every=1)
    with pytest.raises(RunInterrupted):
        callback.on_step_end(TrainingState(step=1), None)


def test_a_metric_may_be_called_like_one_of_a_rollout_step_that_is_not_there():
    check_metric_name("mine.py", "my/calls", taken={"zoom/calls": 1.0})
    with pytest.raises(UserError, match="'zoom/calls' is taken"):
        check_metric_name("mine.py", "zoom/calls", taken={"zoom/calls": 1.0})
    with pytest.raises(UserError, match="'time/learn_s' is taken"):
        check_metric_name("mine.py", "time/learn_s", taken={})

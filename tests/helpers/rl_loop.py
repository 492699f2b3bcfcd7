"""Fakes of the parts of a training loop. They share one list, `calls`, in which each records when it is called."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

from factories import make_group, make_prompt, make_rollout, make_sample, make_score
from selection import centered, select_all

from mmrl.distributed.ranks import SingleProcess
from mmrl.training import rl
from mmrl.training.callbacks import StepLogger
from mmrl.training.health import FailedStepCounter, FailedStepLimit
from mmrl.types import RolloutBatch, Target, UserError

LABEL = make_sample(1).target


def numbered_sample(number: int, label: Target | None = LABEL):
    return make_sample(1, id=str(number), task="t", label=label)


class FakeSource:
    """Yields samples whose ids are their positions."""

    def __init__(self, calls):
        self.calls = calls

    def take(self, start_position, count):
        self.calls.append(("take", start_position))
        return [numbered_sample(start_position + index) for index in range(count)]


class FakeProcessor:
    def build(self, sample):
        return make_prompt(sample)

    def build_demonstration(self, prompt, demonstration, *, with_thinking, loss_on):
        return make_rollout(prompt)


class FakePipeline:
    """Returns two rollouts for each prompt."""

    def __init__(self, calls):
        self.calls = calls

    def run(self, prompts, *, step, unfinished=()):
        self.calls.append(("rollout", step))
        return RolloutBatch(groups=tuple((make_rollout(prompt, 0), make_rollout(prompt, 1)) for prompt in prompts))


class FakeScorer:
    """Gives the rollouts of each group the same rewards, or those that a function of step and group's index returns."""

    def __init__(self, calls, rewards):
        self.calls = calls
        self.rewards = rewards if isinstance(rewards, Callable) else lambda step, index: rewards

    def score_groups(self, rollouts, *, step, probes=()):
        self.calls.append(("score", step))
        groups = []
        for index, group in enumerate(rollouts):
            scores = [make_score(count=reward) for reward in self.rewards(step, index)]
            groups.append(make_group(group[0].prompt, group, scores))
        return groups


class FakeLearner:
    """Keeps the experiences of each step; `nonfinite_updates` are counts by step, of steps that attempt an update."""

    def __init__(self, calls):
        self.calls, self.learned, self.nonfinite_updates = calls, [], {}

    def step(self, experiences, *, step):
        self.calls.append(("learn", step))
        self.learned.append(experiences)
        metrics = {"learner/loss": 0.25}
        if step in self.nonfinite_updates:
            metrics["learner/nonfinite_updates"] = self.nonfinite_updates[step]
        return metrics


class FakeLoggerAndRecorder:
    """Both in one: keeps metrics and times of each step, and the steps whose rollouts had to be recorded."""

    def __init__(self, calls):
        self.calls, self.metrics, self.times, self.forced = calls, [], [], []

    def record_step(self, state, selected, *, force):
        self.calls.append(("record rollouts", state.step))
        self.forced += [state.step] * force
        return f"kept-{state.step}"

    def log(self, state, metrics, times):
        self.calls.append(("log", state.step))
        self.metrics.append(metrics)
        self.times.append(times)


class FakeRun:
    """The fakes of one run; its callback ends the stage after step `done_at`."""

    def __init__(self, rewards=(0.0, 1.0), done_at=None):
        self.calls, self.done_at = [], done_at
        self.source, self.processor, self.pipeline = FakeSource(self.calls), FakeProcessor(), FakePipeline(self.calls)
        self.scorer, self.learner = FakeScorer(self.calls, rewards), FakeLearner(self.calls)
        self.logger = FakeLoggerAndRecorder(self.calls)

    def on_step_end(self, state, result):
        self.calls.append(("callback", state.step))
        state.stage_done = state.step == self.done_at

    def callbacks(self, *, max_steps_without_signal=None):
        """Return the callbacks of a stage in the order of a run; this one is the last."""
        is_rl = max_steps_without_signal is not None
        return [
            FailedStepCounter(count_steps_without_signal=is_rl),
            StepLogger(logger=self.logger, recorder=self.logger, only_failed_rollouts=not is_rl),
            FailedStepLimit(max_nonfinite_steps=2, max_steps_without_signal=max_steps_without_signal),
            self,
        ]

    def rl_parts(self, *, max_steps_without_signal=2, **replaced):
        def record(name):
            return lambda value=None: self.calls.append((name, value))

        def update_reference(state):
            self.calls.append(("update reference", state.step))
            return {"learner/reference_resets": 0.0}

        parts = {
            "source": self.source,
            "processor": self.processor,
            "rollout_pipeline": self.pipeline,
            "scorer": self.scorer,
            "learner": self.learner,
            "engine": SimpleNamespace(gather_for_sampling=nullcontext, sleep=record("sleep")),
            "async_rollouts": None,
            "selector": select_all(centered),
            "group_rewards": (),
            "update_reference": update_reference,
            "sync_weights": record("sync"),
            "callbacks": self.callbacks(max_steps_without_signal=max_steps_without_signal),
            "ranks": SingleProcess(),
        }
        return rl.RlParts(**parts | replaced)


class ImmediateExecutor:
    """An executor that works when it is asked."""

    def submit(self, work, *args, **options):
        done = Future()
        try:
            done.set_result(work(*args, **options))
        except UserError as error:
            done.set_exception(error)
        return done


def train_with_fakes(run, state, *, steps=3, prompts_per_round=2, **parts):
    """Train an RL stage with the fakes of `run`, except for `parts`."""
    rl_parts = run.rl_parts(num_steps=steps, prompts_per_round=prompts_per_round, **parts)
    rl.train_rl(rl_parts, state)

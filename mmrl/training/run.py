"""A run from its first stage to its export: resume, stages, held-out comparison, summary."""

from __future__ import annotations

import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from mmrl import checkpoint
from mmrl.algo.group_rewards import shaped
from mmrl.checkpoint.hf_export import facts_of, write_adapter, write_model
from mmrl.config import Config, Loaded, changes, dump, read_settings, schema
from mmrl.config.load import cap_steps
from mmrl.config.schema import Rl, Sft
from mmrl.distributed.ranks import Homes, RankLost, Ranks, SharedJudge, SharedLessons, shared_measure
from mmrl.distributed.torch_ranks import joined
from mmrl.learner.reference import Followed, Reference
from mmrl.log.comparison import compare, summarize
from mmrl.log.console import Console, silent
from mmrl.log.logger import Muted, Teller
from mmrl.log.run_dir import RunDir, refuse_another
from mmrl.log.summary import report
from mmrl.policy.qwen_vl import Policy
from mmrl.ports import Gate, Learner, Sampler, Source
from mmrl.rollout.logprob_check import Parity, Probed
from mmrl.training import data_stages, rl, sft
from mmrl.training.async_rollouts import Overlap
from mmrl.training.benchmarks import Benchmarks, Moment, read_benchmarks
from mmrl.training.build import World
from mmrl.training.callbacks import AlsoLooking, HeldOutGate, OpenGate, Saver, Stop
from mmrl.training.health import Watch, Watched, summary
from mmrl.types import HeldOut, Interrupted, Sample, State


def train(loaded: Loaded, *, steps: int | None = None, run_dir: Path | None = None) -> int:
    """Run every stage of a config, or go on where it stopped; returns the exit code.

    Raises:
        UserError: something the user can put right. A run that had not begun leaves nothing behind.
    """
    loaded = cap_steps(loaded, steps) if steps else loaded
    config = loaded.config
    if run_dir is not None:
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(run_dir)})})
    with joined(config.processes, needed=config.deepspeed is not None) as ranks:
        return _train(config, loaded.files[0].parent, ranks)


def _train(config: Config, base: Path, ranks: Ranks) -> int:
    """As `train`. The first rank alone has the run's directory, and speaks."""
    console = silent() if ranks.rank else Console()
    place = RunDir(Path(config.run.dir.replace("{name}", config.run.name)))
    stop = Stop(console.warn)
    try:
        with stop.caught(), ExitStack() as stack:
            ranks.once(lambda: stack.enter_context(place.locked()))
            has_begun = ranks.once(lambda: place.claim(config, console.say))
            if ranks.once(lambda: has_begun and place.model.exists()):
                console.say("This run is finished; delete its directory or choose another to run it again.")
                ranks.once(lambda: report(place, console))
                return 0
            fresh = nullcontext() if ranks.rank else _nothing_left_behind(place, unless=has_begun)
            with fresh, ExitStack() as opened:
                questions = ranks.once(lambda: read_benchmarks(config, base, place.data))
                world = World(config, base, place, console, ranks)
                for part in (world.judge, world.workshop, world.samplers):
                    opened.enter_context(closing(part))
                benchmarks = Benchmarks(world, base, questions)
                ranks.once(lambda: _introduce(place, world))
                running = opened.pop_all()
            with running:
                _Run(world, benchmarks, stop).go()
            ranks.once(lambda: report(place, console))
    except (Interrupted, KeyboardInterrupt, RankLost) as stopped:
        if isinstance(stopped, RankLost) and not stop.wanted():
            raise  # else the other was only quicker to stop
        saved = "Saved." if isinstance(stopped, Interrupted) else "Stopped; the last checkpoint is what is saved."
        console.say(f"{saved} Go on with: {shlex.join(['mmrl', *sys.argv[1:]])}")
        return 128 + (stop.signal or signal.SIGINT)
    return 0


def _introduce(place: RunDir, world: World) -> None:
    """Write down what the run is made with."""
    place.write_manifest(world.config, world.samples.digests())
    if world.config.model.scratch and not place.reader.exists():
        checkpoint.export_hf(place.reader, world.processor.hf, world.policy.model.config)


@contextmanager
def _nothing_left_behind(place: RunDir, *, unless: bool) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if not unless:
            shutil.rmtree(place.path)
        raise


class _Run:
    """One run, wherever it stands."""

    def __init__(self, world: World, benchmarks: Benchmarks, stop: Stop) -> None:
        self._world, self._benchmarks, self._stop = world, benchmarks, stop
        self._config, self._dir, self._console = world.config, world.run_dir, world.console
        self._ranks, self._homes = world.ranks, Homes()
        self._evaluator = world.evaluator()
        every = self._config.run.keep_rollouts_every
        self._teller = Muted() if self._ranks.rank else Teller(self._dir, self._console, keep_rollouts_every=every)
        kinds = [stage.kind for stage in self._config.stages]
        self._subject = kinds.index("rl") if "rl" in kinds else len(kinds) - 1 - kinds[::-1].index("sft")
        self._given = checkpoint.fingerprint(world.policy.given.items())
        self._settings = dump(self._config)
        options = self._config.checkpoints
        self._shelf = checkpoint.Shelf(self._dir.checkpoints, options, self._console.warn, self._ranks)
        self._state, self._optimizer = self._resume()
        world.shard()
        self._ranks.once(lambda: self._teller.go_on_from(self._state.metrics_bytes))

    def go(self) -> None:
        """The remaining stages, then the comparison, the summary and the export."""
        with self._shelf:
            with self._stop.heeded():
                self._stages()
            if "after" not in self._state.evals:
                self._measure("after")
                self._save({}, self._state)
        self._finish()

    def _stages(self) -> None:
        stages = self._config.stages
        if self._state.stage == 0 and isinstance(stages[0], schema.Sample):
            self._save({}, self._state)  # its table is kept, as from here on there is something to go on from
        for index in range(self._state.stage, len(stages)):
            self._do(stages[index])
            self._state = State(stage=index + 1, version=self._state.version, evals=self._state.evals)
            self._save({}, self._state)
            self._shelf.settle()
            if self._stop_wanted():
                raise Interrupted

    def _do(self, stage: Sft | Rl | schema.Sample | schema.Select) -> None:
        """One stage, from wherever it stands to its end."""
        world, state = self._world, self._state
        match stage:
            case schema.Sample():
                data_stages.draw(stage, world, self._teller, state, self._stop_wanted)
            case schema.Select():
                data_stages.choose(stage, world, self._teller, state)
            case Sft() | Rl():
                with self._teller.stage(stage.name, stage.steps, state.step), world.source(stage, state) as source:
                    if state.stage == self._subject:
                        self._measure("before")
                    self._take("before", state)
                    self._train(stage, source)
                    self._take("after", state)
                why = ", its goal reached" if state.stage_done else ""
                self._console.say(f"Stage {stage.name} ended after {state.step} steps{why}.")
        if isinstance(stage, Rl) and stage.history:
            data_stages.keep_history(stage, world, state)

    def _stop_wanted(self) -> bool:
        """Whether a signal has come, to any rank."""
        return any(self._ranks.gather(self._stop.wanted()))

    def _resume(self) -> tuple[State, dict[str, Any]]:
        folder = checkpoint.latest(self._dir.checkpoints, self._console.warn, self._ranks)
        if folder is None:
            return State(), {}
        refuse_another(folder, changes(read_settings(folder / checkpoint.CONFIG), self._config))
        weights, divides = self._weights(self._world.policy), self._world.divides
        state, optimizer = checkpoint.load(folder, weights=weights, mapped=divides)  # it is copied as it is divided
        if state.stage < len(self._config.stages):
            name = self._config.stages[state.stage].name
            self._console.say(f"Resuming from {folder}: stage {name}, step {state.step}.")
        return state, optimizer

    def _save(self, optimizer: dict[str, Any], state: State) -> None:
        """Every rank writes its part."""
        state.metrics_bytes = self._teller.metrics.position()
        best = self._config.checkpoints.best
        snapshot = checkpoint.Snapshot(
            weights=checkpoint.Weights(learned=self._world.policy.collected(self._ranks), given=self._given),
            optimizer=optimizer,
            rng=checkpoint.rng_states(),
            state=state,
            config=self._settings,
            score=self._teller.last(best.metric) if best else None,
        )
        self._shelf.put(snapshot, first=self._teller.metrics.sync)

    def _train(self, stage: Sft | Rl, source: Source) -> None:
        world, state = self._world, self._state
        engine, reference = world.engine(stage), self._reference(stage)
        if self._optimizer:
            engine.load_state(self._optimizer)
            self._optimizer = {}
        learner: Learner = world.samplers.resting(world.learner(stage, engine, reference, self._homes))
        if isinstance(stage, Rl) and reference is not None:
            learner = Followed(learner, reference, engine, stage.reference)
        keeper = Saver(
            lambda state: self._save({**engine.state(), **(reference.state() if reference else {})}, state),
            self._shelf,
            self._stop_wanted,
            every=self._config.checkpoints.every,
        )
        if isinstance(stage, Sft):
            parts = sft.Parts(
                source=source,
                asker=world.processor,
                learner=SharedLessons(learner=learner, ranks=self._ranks, homes=self._homes, asked=stage.batch_size),
                teller=self._teller,
                gate=self._gate(stage),
                keeper=keeper,
                tools=world.tools(stage),
            )
            sft.train(sft.plan_of(stage, self._config.run.seed), parts, state)
            return
        sampler = self._sampler(stage)
        program = world.program(stage, sampler)
        watch = Watch(stage.health, self._console.warn)
        rl.train(
            self._plan(stage),
            rl.Parts(
                source=source,
                asker=world.processor,
                program=program,
                sampler=sampler,
                judge=SharedJudge(inner=world.judge, ranks=self._ranks, homes=self._homes),
                chooser=world.chooser(stage, self._homes),
                learner=learner,
                teller=Watched(self._teller, watch),
                gate=self._gate(stage),
                keeper=keeper,
                foresight=Overlap(shared=program, thread=world.samplers.thread) if stage.overlap else None,
            ),
            state,
        )
        self._console.say(summary(watch))

    def _sampler(self, stage: Rl) -> Sampler:
        """Who draws the stage's rollouts, with the weights of this moment, and probed."""
        world, state, options = self._world, self._state, self._config.rollout
        sampler = world.samplers.sampler(self._config.run.seed, stage.name, version=state.version, apart=stage.overlap)
        world.samplers.follow(state.version)
        if options.engine == "hf" and not options.parity.every:
            return sampler
        parity = Parity(
            sampler,
            world.policy,
            world.processor,
            samples=world.samples.train,
            law=self._world.law(stage.sampling),
            options=options.parity,
            warn=self._console.warn,
        )
        gaps = parity.probe(state.version)
        if state.step == 0:
            self._teller.record(state, gaps)
        return Probed(sampler, parity, partial(self._teller.record, state), every=options.parity.every)

    def _plan(self, stage: Rl) -> rl.Plan:
        return rl.Plan(
            steps=stage.steps,
            prompts=stage.places,
            shape=partial(shaped, terms=self._world.group_terms),
            max_barren_steps=stage.max_barren_steps,
            max_bad_steps=stage.max_bad_steps,
        )

    def _gate(self, stage: Sft | Rl) -> Gate:
        gate: Gate = OpenGate()
        if stage.validation is not None:
            look = partial(self._held_out, self._world.samples.validation)
            gate = HeldOutGate(look, self._note_validation, stage.validation)
        return AlsoLooking(partial(self._take, "step"), gate)

    def _take(self, moment: Moment, state: State) -> None:
        """The benchmarks that are due."""
        if metrics := self._benchmarks.take(state, moment):
            self._teller.record(state, metrics)

    def _note_validation(self, state: State, means: Mapping[str, float], counts: Mapping[str, float]) -> None:
        self._teller.record(state, {f"validation/{name}": value for name, value in {**means, **counts}.items()})
        rewards = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
        self._console.say(f"validation after {state.step} steps: {rewards}")

    def _reference(self, stage: Sft | Rl) -> Reference | None:
        """What the KL penalty measures from. One that never moves is kept on disk, one that does in each checkpoint."""
        if isinstance(stage, Sft) or not stage.loss.kl.coef:
            return None
        policy, options = self._world.policy, stage.reference
        unchanged = self._config.model.lora is not None and not any(
            isinstance(earlier, Sft | Rl) for earlier in self._config.stages[: self._state.stage]
        )
        if options.start == "base" or (options.update == "never" and unchanged):
            return Reference(policy, options, start=policy.without_adapter())  # a new adapter has changed nothing
        reference = Reference(policy, options, ranks=self._ranks)
        folder = self._dir.references / stage.name
        if not reference.frozen:
            if self._optimizer:
                reference.load_state(self._optimizer)
        elif self._state.step == 0:
            self._ranks.once(lambda: checkpoint.save_weights(folder, self._weights(reference.policy)))
        else:
            checkpoint.load_weights(folder, self._weights(reference.policy))
        return reference

    def _weights(self, policy: Policy) -> checkpoint.Weights:
        return checkpoint.Weights(learned=policy.learned, given=self._given)

    def _held_out(self, samples: tuple[Sample, ...]) -> HeldOut:
        self._world.samplers.follow(self._state.version)
        with self._world.samplers.whole():
            return shared_measure(partial(self._evaluator.measure, step=self._state.step), samples, self._ranks)

    def _measure(self, when: str) -> None:
        """Held-out rewards on the test samples, kept for the comparison."""
        if when in self._state.evals or not self._world.samples.test:
            return
        rewards, counts = self._held_out(self._world.samples.test)
        self._state.evals[when] = {task: dict(of) for task, of in rewards.items()}
        means = {task: fmean(of.values()) for task, of in rewards.items()}
        self._teller.record(self._state, {f"test/{name}": value for name, value in {**means, **counts}.items()})

    def _finish(self) -> None:
        self._world.dissolve()
        self._ranks.once(self._conclude)
        self._teller.close()

    def _conclude(self) -> None:
        best = self._config.checkpoints.best
        if best and self._teller.last(best.metric) is None:
            self._console.warn(
                f"checkpoints.best: this run recorded no {best.metric!r}; its metrics.jsonl has the names"
            )
        evals = self._state.evals
        rows = compare(evals["before"], evals["after"]) if evals.keys() >= {"before", "after"} else []
        since = self._config.stages[self._subject].name
        self._dir.write_summary(
            {"name": self._config.run.name, "seed": self._config.run.seed, "since": since, **summarize(rows)}
        )
        self._export()

    def _export(self) -> None:
        """The model as a Hugging Face folder; before it an adapter alone, which is merged into the model."""
        world = self._world
        facts = facts_of(self._dir, self._config, self._state, str(checkpoint.Place(self._state.stage, 0)))
        if world.adapter is not None:
            write_adapter(self._dir.adapter, world.adapter, facts)
            world.adapter.merge()
        write_model(self._dir.model, world.loaded, facts)

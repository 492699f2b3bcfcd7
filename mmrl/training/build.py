"""The composition root: a config becomes objects. Concrete classes meet only here."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mmrl.algo.advantages import advantages
from mmrl.algo.seeds import derive
from mmrl.algo.select_experiences import Everything, MediaCheck, Replaying, Sifting, look
from mmrl.algo.staleness import Lagging
from mmrl.config import Config
from mmrl.config.check_term_names import check_named_terms
from mmrl.config.schema import (
    Curriculum,
    Evaluation,
    Loss,
    Rl,
    Sampling,
    Sft,
)
from mmrl.config.schema import Sample as SampleStage
from mmrl.data.curriculum import Attentive
from mmrl.data.load import Intake, Samples, check_lessons, place_of
from mmrl.data.source import Supply
from mmrl.distributed.ranks import Homes, Ranks, SharedLook, SharedProgram, SharedTools
from mmrl.learner.engine_torch import TorchEngine
from mmrl.learner.learner import Engine, GrpoLearner, LearnPlan, Scorer
from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir
from mmrl.media.cache import MediaStore
from mmrl.media.opened_index import Ledger
from mmrl.policy.build import _with_program, device_of, encoder_of, grammar_of, model_of, reader_of
from mmrl.policy.components import census, recompute_activations
from mmrl.policy.encoder import Encoder
from mmrl.policy.lora import adapter_of
from mmrl.policy.processor import QwenProcessor
from mmrl.policy.qwen_vl import Policy, banned_ids
from mmrl.ports import Chooser, Sampler, Source, Tools
from mmrl.rollout.build import Kit, check, compose
from mmrl.rollout.factory import Samplers, law_of, prompt_limit
from mmrl.rollout.tools.demonstrations import Traces
from mmrl.rollout.tools.replies import Workshop
from mmrl.scoring import registry
from mmrl.scoring.build import check_group_terms, group_terms_of, judge_of, weights_of
from mmrl.training.validation import Evaluator
from mmrl.types import SamplingLaw, State
from mmrl.utils.torch_threads import use_threads

if TYPE_CHECKING:
    from mmrl.learner.engine_deepspeed import Sharded

PICTURE_BYTES = 256 * 2**20
WORKER_BYTES = 64 * 2**20  # a worker meets a picture twice, measuring and encoding it


class StageEngine(Engine, Protocol):
    """An engine with a memory: the optimizer of a stage."""

    def forget(self) -> None:
        """Drop the moments."""

    def state(self) -> dict[str, dict[int, Any]]:
        """What a checkpoint keeps of this rank's part of the weights, by their places; every rank must ask."""

    def load_state(self, state: Mapping[str, Mapping[int, Any]]) -> None:
        """Continue from the `state()` of all ranks, given to each."""


class World:
    """Everything of a run that outlives a stage."""

    def __init__(self, config: Config, base: Path, run_dir: RunDir, console: Console, ranks: Ranks) -> None:
        self.config, self.run_dir, self.console, self.ranks = config, run_dir, console, ranks
        self.workshop = Workshop(partial(registry.find_tool, base))
        use_threads(config.run.threads, ranks.size)
        torch.manual_seed(config.run.seed)
        self.grammar = grammar_of(config)
        self.judge = judge_of(config, base)
        self.group_terms = group_terms_of(config, base)
        registry.check([term.fn for term in config.rewards.terms], base)
        place = place_of(config, base, run_dir.data)
        store = MediaStore(place.access, config.data.limits, max_bytes=PICTURE_BYTES)
        intake = Intake(config, place, store, console, Ledger(run_dir.pictures))
        console.say(f"{config.run.name}: reading samples, opening every picture, trying every reward ...")
        self.samples = ranks.once(intake.load)
        ranks.once(self._check_rewards)
        every = [sample for part in self.samples.parts().values() for sample in part]
        idle = [term.name for term in self.group_terms if not any(map(term.options.concerns, self.samples.train))]
        for name in (*self.judge.unused(every), *idle):
            console.warn(f"reward term {name!r} applies to none of the samples: see its `when`")
        check_lessons(config, self.samples.train, self.grammar)
        loaded = model_of(config, partial(reader_of, config, self.samples.train))
        self.adapter = adapter_of(loaded.model, config.model.lora, config.run.seed)
        self.loaded = loaded
        self.divides = config.deepspeed is not None and config.deepspeed.zero == 3  # perhaps because no device holds it
        self.policy = Policy(
            loaded.model if self.divides else loaded.model.to(device_of(config)),
            freeze=config.model.freeze,
            logits_chunk=config.model.logits_chunk,
            remembers_media=not self.divides,
        )
        self._sharded: Sharded | None = None
        limit = prompt_limit(config, self.policy)
        encoder = encoder_of(config, loaded, store, limit)
        self.processor = QwenProcessor(encoder, held_steps=2 if config.overlaps else 1)
        recompute_activations(loaded.model, config.model.gradient_checkpointing)
        self.eos_id: int = self.processor.tokenizer.eos_token_id
        self.samples = ranks.once(lambda: _askable(intake, self.samples, encoder))
        self.supply = Supply(config, place, self.samples, self.processor, run_dir.outputs)
        opener = MediaStore(place.access, config.data.limits, max_bytes=WORKER_BYTES)
        self._afresh = encoder_of(config, loaded, opener, limit)
        embeddings = self.policy.model.get_input_embeddings().num_embeddings
        self.banned = banned_ids(self.processor.tokenizer, embeddings)
        self._check_rollouts()
        self._introduce()
        self.samplers = Samplers(
            config,
            self.policy,
            self.processor,
            adapter=self.adapter,
            run_dir=run_dir,
            ranks=ranks,
            warn=console.warn,
        )

    def _check_rewards(self) -> None:
        check_named_terms(self.config, self.judge.weights, [term.name for term in self.group_terms])
        self.judge.check(self.samples.train, self.grammar)
        self.judge.check([*self.samples.validation, *self.samples.test], self.grammar, evaluation=True)
        check_group_terms(self.group_terms, self.judge, self.samples.train)

    def _check_rollouts(self) -> None:
        """Refuse rollout programs that cannot run."""
        config = self.config
        terms = [
            name for name, term in zip(self.judge.weights, config.rewards.terms, strict=True) if not term.train_only
        ]
        for owner in _with_program(config):
            check(owner.program, self.processor, self.banned, terms, self.workshop.find_tool)

    def _introduce(self) -> None:
        """Say what there is to learn from, and what of the model learns."""
        samples, model, stages = self.samples, self.policy.model, self.config.trainings
        self.console.say(
            f"{len(samples.train):,} training, {len(samples.validation):,} validation and {len(samples.test):,} test "
            "samples"
        )
        rows = [
            (
                *(each.role, f"{each.tensors:,}", f"{each.parameters:,}", f"{each.trained:,}", "+".join(each.dtypes)),
                *(f"{stage.optimizer.rate(each.role):g}" if each.trained else "" for stage in stages),
            )
            for each in census(model)
        ]
        columns = ("part", "tensors", "parameters", "trained", "type", *(f"lr in {stage.name}" for stage in stages))
        self.console.table(f"{type(model).__name__} on {model.device}", columns, rows)

    def evaluator(self) -> Evaluator:
        """Measures the current weights."""
        options = self.config.evaluation
        kit = Kit(
            sampler=self.samplers.sampler(self.config.run.seed, "evaluation"),
            judge=self.judge,
            processor=self.processor,
            law=self.law(options),
            group_size=1,
            groups=options.batch_size,
            seed=derive(self.config.run.seed, "evaluation"),
            workshop=self.workshop,
        )
        return Evaluator(
            asker=self.processor,
            program=compose(options.program, kit),
            judge=self.judge,
            batch_size=options.batch_size,
            warn=self.console.warn,
        )

    def program(self, stage: Rl | SampleStage, sampler: Sampler) -> SharedProgram:
        """What a stage does with its prompts, of which every rank has a part."""
        kit = Kit(
            sampler=sampler,
            judge=self.judge,
            processor=self.processor,
            law=self.law(stage.sampling),
            group_size=stage.group_size,
            groups=stage.prompts_per_step,
            seed=derive(self.config.run.seed, stage.name),
            workshop=self.workshop,
            others=self.samples.train,
            ranks=self.ranks,
        )
        places = stage.places if isinstance(stage, Rl) else stage.prompts_per_step
        program = compose(stage.program, kit)
        return SharedProgram(program=program, ranks=self.ranks, places=places, whole=self.samplers.whole)

    def law(self, options: Sampling | Evaluation) -> SamplingLaw:
        """What rollouts are drawn from."""
        return law_of(options, self.banned, self.grammar.stop)

    def source(self, stage: Sft | Rl, state: State) -> AbstractContextManager[Source]:
        """The samples of a stage, endlessly, in its order, which may follow what `state` remembers."""
        return self.supply.opened(stage, state, self._afresh, self.console, self.ranks)

    def tools(self, stage: Sft) -> Tools | None:
        """What answers the calls of a stage's demonstrations, if anything does."""
        if not stage.program:
            return None
        replies = self.workshop.replies(stage.program[0], self.processor)
        return SharedTools(tools=Traces(replies=replies), ranks=self.ranks)

    def shard(self) -> None:
        """Leave the model to DeepSpeed, if the config says so; by now it has the weights it goes on from."""
        if self.config.deepspeed is not None:
            from mmrl.learner.engine_deepspeed import Sharded

            self._sharded = Sharded(self.policy, self.config.deepspeed, self.ranks)

    def dissolve(self) -> None:
        """Take the model back, whole on the first rank."""
        if self._sharded is not None:
            self._sharded.dissolve(self.policy)

    def chooser(self, stage: Rl, homes: Homes) -> Chooser:
        """What decides what a step of the stage learns."""
        shared = SharedLook(look=partial(look, self.processor.ask), ranks=self.ranks, homes=homes)
        media = MediaCheck(shared, self.console.warn)
        weights = weights_of(self.judge, self.group_terms)
        weigh = partial(advantages, options=stage.advantage, weights=weights)
        chooser: Chooser = Everything(weigh)
        if stage.overlap or stage.waits:
            chooser = Lagging(chooser, corrected=stage.loss.correction.kind != "none")
        if stage.filter is not None:
            chooser = Sifting(chooser, stage.filter, stage.prompts_per_step, media)
        if stage.replay is not None:
            size, seed = stage.prompts_per_step * stage.group_size, (self.config.run.seed, stage.name)
            chooser = Replaying(chooser, stage.replay, size=size, seed=seed, media=media)
        if stage.history:
            phases = stage.order.phases if isinstance(stage.order, Curriculum) else ()
            chooser = Attentive(chooser, stage.history, phases)
        return chooser

    def engine(self, stage: Sft | Rl) -> StageEngine:
        """A fresh optimizer for a stage."""
        if self._sharded is not None:
            return self._sharded.engine_of(stage.optimizer)
        return TorchEngine(self.policy.trainable, stage.optimizer, self.ranks)

    def learner(self, stage: Sft | Rl, engine: Engine, reference: Scorer | None, homes: Homes) -> GrpoLearner:
        """The learner of a stage."""
        loss, epochs, mini_batches = Loss(), 1, 1
        if isinstance(stage, Rl):
            loss, epochs, mini_batches = stage.loss, stage.epochs, stage.mini_batches
        plan = LearnPlan(
            loss=loss,
            optimizer=stage.optimizer,
            total_steps=stage.steps,
            micro_batch=stage.micro_batch,
            token_budget=stage.token_budget,
            epochs=epochs,
            mini_batches=mini_batches,
            shared_prefix=stage.shared_prefix != "off" and self.policy.shares_prefixes,
            pad_id=self.eos_id,
        )
        return GrpoLearner(self.policy, self.processor, engine, plan, reference, ranks=self.ranks, homes=homes)


def _askable(intake: Intake, samples: Samples, encoder: Encoder) -> Samples:
    intake.plan_videos(samples, encoder.clip_rule)
    return intake.askable(samples, encoder.measure)

"""The composition root: a config becomes objects. Concrete classes meet only here."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mmrl.algo.advantages import compute_advantages, load_custom_advantage
from mmrl.algo.changed_media import ChangedMediaDetector, find_media_problems
from mmrl.algo.replay import ReplaySettings
from mmrl.algo.seeds import derive_seed
from mmrl.algo.select_experiences import SelectionPipeline
from mmrl.config import Config
from mmrl.config.check_term_names import check_reward_names
from mmrl.config.schema import (
    CurriculumOrderConfig,
    EvalGenerationConfig,
    LossConfig,
    RlStage,
    SamplingConfig,
    SftStage,
)
from mmrl.config.schema import SampleStage as SampleStage
from mmrl.data.check_stages import check_demonstrations
from mmrl.data.context import make_dataset_context
from mmrl.data.load import DatasetLoader, DataSplits
from mmrl.data.stage_data import StageData
from mmrl.distributed.ranks import (
    MediaPlacement,
    Ranks,
    SharedDemonstrationTools,
    SharedMediaCheck,
    SharedRolloutPipeline,
)
from mmrl.learner.engine_torch import TorchEngine
from mmrl.learner.learner import GrpoLearner, LearnerConfig, LogprobModel, OptimizerEngine
from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir
from mmrl.media.cache import MediaCache
from mmrl.media.opened_index import OpenedMediaIndex
from mmrl.policy.build import (
    _configs_with_rollout_steps,
    build_encoder,
    build_model,
    build_processor,
    build_response_format,
    select_device,
)
from mmrl.policy.components import enable_gradient_checkpointing, summarize_components
from mmrl.policy.encoder import PromptEncoder
from mmrl.policy.lora import create_adapter
from mmrl.policy.processor import QwenProcessor
from mmrl.policy.qwen_vl import Policy, banned_ids
from mmrl.ports import DemonstrationCompleter, ExperienceSelector, Sampler, SampleSource
from mmrl.rollout.build import RolloutContext, build_pipeline, check_steps
from mmrl.rollout.factory import SamplerFactory, build_sampling_params, prompt_limit
from mmrl.rollout.tools.demonstrations import DemonstrationTools
from mmrl.rollout.tools.replies import ToolRunner
from mmrl.scoring import registry
from mmrl.scoring.build import build_group_rewards, build_scorer, check_group_rewards, reward_weights
from mmrl.training.validation import Evaluator
from mmrl.types import SamplingParams, TrainingState
from mmrl.utils.torch_threads import set_thread_count

if TYPE_CHECKING:
    from mmrl.learner.engine_deepspeed import DeepspeedModel

IMAGE_CACHE_BYTES = 256 * 2**20
WORKER_IMAGE_CACHE_BYTES = 64 * 2**20  # a worker meets a picture twice, measuring and encoding it


class StageEngine(OptimizerEngine, Protocol):
    """An engine with a memory: the optimizer of a stage."""

    def reset(self) -> None:
        """Drop the moments."""

    def state(self) -> dict[str, dict[int, Any]]:
        """What a checkpoint keeps of this rank's part of the weights, by their places; every rank must ask."""

    def load_state(self, state: Mapping[str, Mapping[int, Any]]) -> None:
        """Continue from the `state()` of all ranks, given to each."""


class RunContext:
    """Everything of a run that outlives a stage."""

    def __init__(self, config: Config, base_dir: Path, run_dir: RunDir, console: Console, ranks: Ranks) -> None:
        self.config, self.run_dir, self.console, self.ranks = config, run_dir, console, ranks
        self._base_dir = base_dir
        self.tool_runner = ToolRunner(partial(registry.load_tool, base_dir))
        set_thread_count(config.run.cpu_threads, ranks.size)
        torch.manual_seed(config.run.seed)
        self.response_format = build_response_format(config)
        self.scorer = build_scorer(config, base_dir)
        self.group_rewards = build_group_rewards(config, base_dir)
        registry.check_case_tables([term.fn for term in config.rewards.terms], base_dir)
        place = make_dataset_context(config, base_dir, run_dir.data)
        store = MediaCache(place.media_policy, config.data.media_limits, max_bytes=IMAGE_CACHE_BYTES)
        intake = DatasetLoader(config, place, store, console, OpenedMediaIndex(run_dir.opened_media))
        console.info(f"{config.run.name}: reading samples, opening every picture, trying every reward ...")
        self.samples = ranks.on_rank0(intake.load)
        ranks.on_rank0(self._check_rewards)
        every = [sample for part in self.samples.by_split().values() for sample in part]
        idle = [term.name for term in self.group_rewards if not any(map(term.options.applies_to, self.samples.train))]
        for name in (*self.scorer.unused_terms(every), *idle):
            console.warn(f"reward term {name!r} applies to none of the samples: see its `when`")
        check_demonstrations(config, self.samples.train, self.response_format)
        loaded = build_model(config, partial(build_processor, config, self.samples.train))
        self.adapter = create_adapter(loaded.model, config.model.lora, config.run.seed)
        self.model_bundle = loaded
        self.is_zero3 = (
            config.deepspeed is not None and config.deepspeed.zero_stage == 3
        )  # perhaps because no device holds it
        self.policy = Policy(
            loaded.model if self.is_zero3 else loaded.model.to(select_device(config)),
            freeze=config.model.freeze,
            logits_chunk=config.model.logits_chunk_tokens,
            cache_vision=not self.is_zero3,
        )
        self._sharded: DeepspeedModel | None = None
        limit = prompt_limit(config, self.policy)
        encoder = build_encoder(config, loaded, store, limit)
        self.processor = QwenProcessor(encoder, retained_steps=2 if config.uses_async_rollouts else 1)
        enable_gradient_checkpointing(loaded.model, config.model.gradient_checkpointing)
        self.eos_token_id: int = self.processor.tokenizer.eos_token_id
        self.samples = ranks.on_rank0(lambda: _drop_unusable_samples(intake, self.samples, encoder))
        self.stage_data = StageData(config, place, self.samples, self.processor, run_dir.outputs)
        opener = MediaCache(place.media_policy, config.data.media_limits, max_bytes=WORKER_IMAGE_CACHE_BYTES)
        self._worker_encoder = build_encoder(config, loaded, opener, limit)
        embeddings = self.policy.model.get_input_embeddings().num_embeddings
        self.banned_token_ids = banned_ids(self.processor.tokenizer, embeddings)
        self._check_rollouts()
        self._print_overview()
        self.samplers = SamplerFactory(
            config,
            self.policy,
            self.processor,
            adapter=self.adapter,
            run_dir=run_dir,
            ranks=ranks,
            warn=console.warn,
        )

    def _check_rewards(self) -> None:
        for stage in self.config.stages:
            if isinstance(stage, RlStage):
                load_custom_advantage(stage.advantage, self._base_dir)
        check_reward_names(self.config, self.scorer.term_weights, [term.name for term in self.group_rewards])
        self.scorer.check_samples(self.samples.train, self.response_format)
        self.scorer.check_samples([*self.samples.validation, *self.samples.test], self.response_format, evaluation=True)
        check_group_rewards(self.group_rewards, self.scorer, self.samples.train)

    def _check_rollouts(self) -> None:
        """Refuse rollout programs that cannot run."""
        config = self.config
        terms = [
            name
            for name, term in zip(self.scorer.term_weights, config.rewards.terms, strict=True)
            if not term.training_only
        ]
        for owner in _configs_with_rollout_steps(config):
            check_steps(owner.rollout_steps, self.processor, self.banned_token_ids, terms, self.tool_runner.load_tool)

    def _print_overview(self) -> None:
        """Say what there is to learn from, and what of the model learns."""
        samples, model, stages = self.samples, self.policy.model, self.config.training_stages
        self.console.info(
            f"{len(samples.train):,} training, {len(samples.validation):,} validation and {len(samples.test):,} test "
            "samples"
        )
        rows = [
            (
                *(
                    each.component,
                    f"{each.num_tensors:,}",
                    f"{each.num_parameters:,}",
                    f"{each.num_trained:,}",
                    "+".join(each.dtypes),
                ),
                *(f"{stage.optimizer.component_lr(each.component):g}" if each.num_trained else "" for stage in stages),
            )
            for each in summarize_components(model)
        ]
        columns = ("part", "tensors", "parameters", "trained", "type", *(f"lr in {stage.name}" for stage in stages))
        self.console.print_table(f"{type(model).__name__} on {model.device}", columns, rows)

    def build_evaluator(self) -> Evaluator:
        """Measures the current weights."""
        options = self.config.evaluation
        kit = RolloutContext(
            sampler=self.samplers.make_sampler(self.config.run.seed, "evaluation"),
            scorer=self.scorer,
            processor=self.processor,
            sampling_params=self.build_sampling_params(options),
            group_size=1,
            groups_per_step=options.batch_size,
            seed=derive_seed(self.config.run.seed, "evaluation"),
            tool_runner=self.tool_runner,
        )
        return Evaluator(
            prompt_builder=self.processor,
            rollout_pipeline=build_pipeline(options.rollout_steps, kit),
            scorer=self.scorer,
            batch_size=options.batch_size,
            warn=self.console.warn,
        )

    def build_rollout_pipeline(self, stage: RlStage | SampleStage, sampler: Sampler) -> SharedRolloutPipeline:
        """What a stage does with its prompts, of which every rank has a part."""
        kit = RolloutContext(
            sampler=sampler,
            scorer=self.scorer,
            processor=self.processor,
            sampling_params=self.build_sampling_params(stage.sampling),
            group_size=stage.group_size,
            groups_per_step=stage.prompts_per_step,
            seed=derive_seed(self.config.run.seed, stage.name),
            tool_runner=self.tool_runner,
            swap_samples=self.samples.train,
            ranks=self.ranks,
        )
        places = stage.max_prompts_in_flight if isinstance(stage, RlStage) else stage.prompts_per_step
        program = build_pipeline(stage.rollout_steps, kit)
        return SharedRolloutPipeline(
            pipeline=program,
            ranks=self.ranks,
            prompts_per_round=places,
            gather_for_sampling=self.samplers.gather_for_sampling,
        )

    def build_sampling_params(self, options: SamplingConfig | EvalGenerationConfig) -> SamplingParams:
        """What rollouts are drawn from."""
        return build_sampling_params(options, self.banned_token_ids, self.response_format.all_stop_strings)

    def open_source(self, stage: SftStage | RlStage, state: TrainingState) -> AbstractContextManager[SampleSource]:
        """The samples of a stage, endlessly, in its order, which may follow what `state` remembers."""
        return self.stage_data.open_source(stage, state, self._worker_encoder, self.console, self.ranks)

    def build_demonstration_tools(self, stage: SftStage) -> DemonstrationCompleter | None:
        """What answers the calls of a stage's demonstrations, if anything does."""
        if not stage.rollout_steps:
            return None
        replies = self.tool_runner.make_executor(stage.rollout_steps[0], self.processor)
        return SharedDemonstrationTools(tools=DemonstrationTools(executor=replies), ranks=self.ranks)

    def shard_model(self) -> None:
        """Leave the model to DeepSpeed, if the config says so; by now it has the weights it goes on from."""
        if self.config.deepspeed is not None:
            from mmrl.learner.engine_deepspeed import DeepspeedModel

            self._sharded = DeepspeedModel(self.policy, self.config.deepspeed, self.ranks)

    def unwrap_model(self) -> None:
        """Take the model back, whole on the first rank."""
        if self._sharded is not None:
            self._sharded.unwrap(self.policy)

    def build_selector(self, stage: RlStage, placement: MediaPlacement) -> ExperienceSelector:
        """What decides what a step of the stage learns."""
        shared = SharedMediaCheck(
            check=partial(find_media_problems, self.processor.build), ranks=self.ranks, placement=placement
        )
        weights = reward_weights(self.scorer, self.group_rewards)
        replay = None
        if stage.replay is not None:
            replay = ReplaySettings(
                options=stage.replay,
                rollouts_per_step=stage.prompts_per_step * stage.group_size,
                seed=(self.config.run.seed, stage.name),
            )
        phases = stage.data_order.phases if isinstance(stage.data_order, CurriculumOrderConfig) else ()
        corrected = stage.loss.rollout_correction.method != "none"
        return SelectionPipeline(
            compute_advantages=partial(
                compute_advantages,
                options=stage.advantage,
                weights=weights,
                custom_advantage=load_custom_advantage(stage.advantage, self._base_dir),
            ),
            prompts_per_step=stage.prompts_per_step,
            dynamic_sampling=stage.dynamic_sampling,
            replay=replay,
            changed_media=ChangedMediaDetector(shared, self.console.warn),
            stale_old_logprobs=None if corrected else "recorded",
            rollouts_may_be_stale=stage.async_rollouts or stage.has_partial_rollouts,
            tracked_terms=stage.track_rewards,
            curriculum_phases=phases if stage.track_rewards else (),
        )

    def build_engine(self, stage: SftStage | RlStage) -> StageEngine:
        """A fresh optimizer for a stage."""
        if self._sharded is not None:
            return self._sharded.create_stage_engine(stage.optimizer)
        return TorchEngine(self.policy.trained_by_component, stage.optimizer, self.ranks)

    def build_learner(
        self,
        stage: SftStage | RlStage,
        engine: OptimizerEngine,
        reference: LogprobModel | None,
        placement: MediaPlacement,
    ) -> GrpoLearner:
        """The learner of a stage."""
        loss, epochs, mini_batches = LossConfig(), 1, 1
        if isinstance(stage, RlStage):
            loss, epochs, mini_batches = stage.loss, stage.ppo_epochs, stage.num_mini_batches
        plan = LearnerConfig(
            loss=loss,
            optimizer=stage.optimizer,
            total_steps=stage.steps,
            micro_batch_groups=stage.micro_batch_groups if isinstance(stage, RlStage) else stage.micro_batch_sequences,
            micro_batch_tokens=stage.micro_batch_tokens,
            epochs=epochs,
            mini_batches=mini_batches,
            shared_prefix=stage.shared_prefix != "off" and self.policy.supports_shared_prefix,
            pad_id=self.eos_token_id,
        )
        return GrpoLearner(self.policy, self.processor, engine, plan, reference, ranks=self.ranks, placement=placement)


def _drop_unusable_samples(intake: DatasetLoader, samples: DataSplits, encoder: PromptEncoder) -> DataSplits:
    intake.plan_videos(samples, encoder.frame_sampling)
    return intake.filter_by_prompt(samples, encoder.measure)

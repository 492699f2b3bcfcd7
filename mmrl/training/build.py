"""Builds the objects of a run from its config. Only here and in `run.py` do concrete classes of all packages meet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mmrl.algo.advantages import compute_advantages, load_custom_advantage
from mmrl.algo.replay import ReplaySettings, find_changed_media, find_media_problems
from mmrl.algo.select_experiences import SelectionPipeline
from mmrl.config import Config
from mmrl.config.schema import (
    CurriculumOrderConfig,
    EvalGenerationConfig,
    LossConfig,
    RlStage,
    SampleStage,
    SamplingConfig,
    SftStage,
)
from mmrl.data.context import make_dataset_context
from mmrl.data.data_record import DataRecord
from mmrl.data.demonstrations import check_demonstrations
from mmrl.data.load import DatasetLoader, DataSplits
from mmrl.data.stage_data import StageData
from mmrl.distributed.ranks import MediaPlacement, Ranks
from mmrl.distributed.sharing import (
    MediaCheck,
    SharedDemonstrationTools,
    SharedRewardScorer,
    SharedRolloutPipeline,
    check_media_across_ranks,
)
from mmrl.learner.learner import LearnerConfig, PolicyLearner, check_routing_replay
from mmrl.learner.loss import load_policy_loss
from mmrl.learner.optimizer import Optimizer
from mmrl.learner.optimizer_torch import TorchOptimizer
from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir
from mmrl.media.cache import MediaCache
from mmrl.media.opened_index import OpenedMediaIndex
from mmrl.policy.build import (
    build_encoder,
    build_model,
    build_processor,
    build_response_format,
    configs_with_rollout_steps,
    enable_gradient_checkpointing,
    find_untrained_components,
    select_device,
    summarize_components,
)
from mmrl.policy.encoder import PromptEncoder
from mmrl.policy.families import FAMILIES
from mmrl.policy.lora import create_adapter
from mmrl.policy.policy import Policy, banned_ids
from mmrl.policy.pretrained import load_processor
from mmrl.policy.processor import PromptProcessor
from mmrl.ports import DemonstrationCompleter, ExperienceSelector, RewardScorer, RolloutPipeline, Sampler
from mmrl.rollout.factory import SamplerFactory, build_sampling_params, prompt_limit
from mmrl.rollout.pipeline import build_pipeline, check_triggers
from mmrl.rollout.steps.base import RolloutContext
from mmrl.rollout.tools.executor import DemonstrationTools, ToolRunner
from mmrl.scoring import registry
from mmrl.scoring.build import build_group_rewards, build_scorer, check_group_rewards, reward_weights
from mmrl.scoring.coverage import find_coverage_gaps
from mmrl.training.callbacks import measure_rewards
from mmrl.types import EvalRewards, SamplingParams
from mmrl.utils.seeds import derive_seed
from mmrl.utils.torch_threads import set_thread_count

if TYPE_CHECKING:
    from mmrl.learner.optimizer_deepspeed import DeepspeedModel

IMAGE_CACHE_BYTES = 256 * 2**20
WORKER_IMAGE_CACHE_BYTES = 64 * 2**20  # a worker opens an image twice: to measure it and to encode it


def import_model_classes() -> None:
    """Import transformers' classes of every built-in family, which takes a second or two."""
    for family in FAMILIES:
        FAMILIES[family]


class RunContext:
    """Everything of a run that outlives its stages: model, data, rewards, tools, rollout engine."""

    def __init__(self, config: Config, base_dir: Path, run_dir: RunDir, console: Console, ranks: Ranks) -> None:
        """Build and check all of it; file names in the config start from `base_dir`.

        Raises:
            UserError: something in the config, the data or the rewards would fail during training.
        """
        self.config, self.base_dir, self.run_dir, self.console, self.ranks = config, base_dir, run_dir, console, ranks
        self.tool_runner = ToolRunner(partial(registry.load_tool, base_dir))
        set_thread_count(config.run.cpu_threads, ranks.size)
        torch.manual_seed(config.run.seed)
        _check_device_and_processor(config, base_dir)
        self.response_format = build_response_format(config)
        self.scorer = build_scorer(config, base_dir)
        self.group_rewards = build_group_rewards(config, base_dir, ranks.on_rank0)
        registry.check_case_tables(map(attrgetter("fn"), config.rewards.terms), base_dir, config.rewards)

        dataset_context = make_dataset_context(config, base_dir, run_dir.data)
        make_cache = partial(MediaCache, dataset_context.media_policy, config.data.media_limits)
        media_cache = make_cache(max_bytes=IMAGE_CACHE_BYTES)
        index = OpenedMediaIndex(run_dir.opened_media)
        record = self.data_record = DataRecord(path=run_dir.data_record, data=config.data, console=console)
        loader = DatasetLoader(config, dataset_context, media_cache, console, opened_index=index, record=record)
        console.info(f"{config.run.name}: reading samples, opening every image, trying every reward ...")
        # Rank 0 reads and checks the data for all: the others receive its samples.
        self.samples = ranks.on_rank0(loader.load)
        ranks.on_rank0(self._check_rewards)
        check_demonstrations(config, self.samples.train, self.response_format)
        make_processor = partial(build_processor, config, self.samples.train, base_dir)
        self.model_bundle = console.wait_for(
            "loading the model", partial(build_model, config, make_processor, base_dir)
        )
        model, family = self.model_bundle.model, self.model_bundle.family
        self.adapter = create_adapter(model, config.model.lora, config.run.seed, family)
        self.is_zero3 = config.deepspeed is not None and config.deepspeed.zero_stage == 3
        self.policy = self._build_policy()
        self._sharded: DeepspeedModel | None = None
        limit = prompt_limit(config, self.policy)
        encoder = build_encoder(config, self.model_bundle, media_cache, limit)
        # With asynchronous rollouts two steps are in progress at a time, and each needs its encoded prompts.
        self.processor = PromptProcessor(encoder, retained_steps=2 if config.uses_async_rollouts else 1)
        if encoder.response_opening:
            check_demonstrations(config, self.samples.train, self.response_format, encoder.response_opening)
        enable_gradient_checkpointing(model, config.model.gradient_checkpointing, family)
        self.eos_token_id: int = self.processor.tokenizer.eos_token_id
        self.samples = _drop_unusable_samples(loader, self.samples, encoder, ranks)
        self.stage_data = StageData(config, dataset_context, self.samples, self.processor, run_dir.outputs)
        worker_cache = make_cache(max_bytes=WORKER_IMAGE_CACHE_BYTES)
        self.worker_encoder = build_encoder(config, self.model_bundle, worker_cache, limit)
        num_embeddings = model.get_input_embeddings().num_embeddings
        self.banned_token_ids = banned_ids(self.processor.tokenizer, num_embeddings, family)
        self._check_rollout_steps()
        self._print_overview()
        self.samplers = console.wait_for("starting the rollout engine", self._start_engine)

    def build_evaluator(self) -> Callable[..., EvalRewards]:
        """Return `measure_rewards` with all but the samples and the step: it takes `(samples, step=...)`."""
        options, seed = self.config.evaluation, self.config.run.seed
        rollout_context = RolloutContext(
            sampler=self.samplers.make_sampler(seed, "evaluation"),
            scorer=self.scorer,
            processor=self.processor,
            sampling_params=self.build_sampling_params(options),
            group_size=1,
            groups_per_step=options.batch_size,
            seed=derive_seed(seed, "evaluation"),
            tool_runner=self.tool_runner,
            base_dir=self.base_dir,
        )
        return partial(
            measure_rewards,
            prompt_builder=self.processor,
            rollout_pipeline=build_pipeline(options.rollout_steps, rollout_context),
            scorer=self.scorer,
            batch_size=options.batch_size,
            console=self.console,
        )

    def build_rollout_pipeline(self, stage: RlStage | SampleStage, sampler: Sampler) -> RolloutPipeline:
        """Return the pipeline that runs this rank's share of a stage's prompts."""
        rollout_context = RolloutContext(
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
            base_dir=self.base_dir,
        )
        return build_pipeline(stage.rollout_steps, rollout_context)

    def share_rollout_pipeline(self, pipeline: RolloutPipeline, prompts_per_round: int) -> RolloutPipeline:
        """Return the pipeline itself in a run of one process, else one that exchanges metrics and unfinished groups."""
        # DeepSpeed may shard the model even in a single process: it must be gathered before it can generate.
        if self.ranks.size == 1 and self.config.deepspeed is None:
            return pipeline
        return SharedRolloutPipeline(
            pipeline=pipeline,
            ranks=self.ranks,
            prompts_per_round=prompts_per_round,
            gather_for_sampling=self.samplers.gather_for_sampling,
        )

    def share_scorer(self, placement: MediaPlacement) -> RewardScorer:
        """Return the scorer itself in a run of one process, else one that returns the groups of all ranks."""
        if self.ranks.size == 1:
            return self.scorer
        return SharedRewardScorer(scorer=self.scorer, ranks=self.ranks, placement=placement)

    def build_sampling_params(self, options: SamplingConfig | EvalGenerationConfig) -> SamplingParams:
        """Return the distribution that rollouts are drawn from, with this model's banned tokens and stop strings."""
        return build_sampling_params(options, self.banned_token_ids, self.response_format.all_stop_strings)

    def build_demonstration_tools(self, stage: SftStage) -> DemonstrationCompleter | None:
        """Return what answers the tool calls in a stage's demonstrations, or None if the stage has no tools."""
        if not stage.rollout_steps:
            return None
        executor = self.tool_runner.make_executor(stage.rollout_steps[0], self.processor)
        tools = DemonstrationTools(executor=executor)
        return tools if self.ranks.size == 1 else SharedDemonstrationTools(tools=tools, ranks=self.ranks)

    def shard_model(self) -> None:
        """Hand the model to DeepSpeed, if the config has it. Weights of a checkpoint must be loaded before."""
        if self.config.deepspeed is not None:
            from mmrl.learner.optimizer_deepspeed import DeepspeedModel

            self._sharded = DeepspeedModel(self.policy, self.config.deepspeed, self.ranks)

    def unwrap_model(self) -> None:
        """Take the model back from DeepSpeed; rank 0 then holds all of it."""
        if self._sharded is not None:
            self._sharded.unwrap(self.policy)

    def build_selector(self, stage: RlStage, placement: MediaPlacement) -> ExperienceSelector:
        """Return what decides which experiences a step of the stage trains on."""
        media_check: MediaCheck = partial(find_media_problems, self.processor.build)
        if self.ranks.size > 1:
            # One rank may still hold in memory what another would find changed: they must agree.
            media_check = partial(check_media_across_ranks, check=media_check, ranks=self.ranks, placement=placement)
        replay = None
        if stage.replay is not None:
            replay = ReplaySettings(
                options=stage.replay,
                rollouts_per_step=stage.prompts_per_step * stage.group_size,
                seed=(self.config.run.seed, stage.name),
            )
        phases = stage.data_order.phases if isinstance(stage.data_order, CurriculumOrderConfig) else ()
        return SelectionPipeline(
            compute_advantages=partial(
                compute_advantages,
                options=stage.advantage,
                weights=reward_weights(self.scorer, self.group_rewards),
                custom_advantage=load_custom_advantage(stage.advantage, self.base_dir),
            ),
            prompts_per_step=stage.prompts_per_step,
            dynamic_sampling=stage.dynamic_sampling,
            carry_over=stage.carries_groups,
            replay=replay,
            find_changed_media=partial(find_changed_media, find_problems=media_check, warn=self.console.warn),
            stale_old_logprobs="recorded" if stage.loss.rollout_correction.method == "none" else None,
            rollouts_may_be_stale=stage.async_rollouts or stage.has_partial_rollouts,
            tracked_terms=stage.track_rewards,
            curriculum_phases=phases if stage.track_rewards else (),
        )

    def build_optimizer(self, stage: SftStage | RlStage) -> Optimizer:
        """Return a new optimizer for a stage."""
        if self._sharded is not None:
            from mmrl.learner.optimizer_deepspeed import DeepspeedOptimizer

            return DeepspeedOptimizer(self._sharded, stage.optimizer)
        return TorchOptimizer(self.policy.trained_by_component, stage.optimizer, self.ranks)

    def build_learner(
        self, stage: SftStage | RlStage, optimizer: Optimizer, reference: Policy | None, placement: MediaPlacement
    ) -> PolicyLearner:
        """Return the learner of a stage. Supervised stages have one epoch and one mini-batch, and no policy loss."""
        if isinstance(stage, RlStage):
            loss, epochs, mini_batches = stage.loss, stage.ppo_epochs, stage.num_mini_batches
            micro_batch_groups = stage.micro_batch_groups
        else:
            loss, epochs, mini_batches = LossConfig(), 1, 1
            # Each demonstration is a group of its own.
            micro_batch_groups = stage.micro_batch_sequences
        learner_config = LearnerConfig(
            loss=loss,
            optimizer=stage.optimizer,
            total_steps=stage.steps,
            micro_batch_groups=micro_batch_groups,
            micro_batch_tokens=stage.micro_batch_tokens,
            epochs=epochs,
            mini_batches=mini_batches,
            shared_prefix=stage.shared_prefix != "off" and self.policy.supports_shared_prefix,
            pad_id=self.eos_token_id,
            policy_loss_fn=load_policy_loss(loss, self.base_dir),
        )
        return PolicyLearner(
            self.policy, self.processor, optimizer, learner_config, reference, ranks=self.ranks, placement=placement
        )

    def _build_policy(self) -> Policy:
        model, options = self.model_bundle.model, self.config.model
        if not self.is_zero3:  # under ZeRO-3 the whole model may not fit on any device
            model = model.to(select_device(self.config))
        return Policy(
            model,
            family=self.model_bundle.family,
            freeze=find_untrained_components(self.config),
            freeze_router=options.freeze_router,
            logits_chunk=options.logits_chunk_tokens,
            cache_vision=not self.is_zero3,
            float32_output_layer=options.float32_output_layer,
        )

    def _start_engine(self) -> SamplerFactory:
        return SamplerFactory(
            self.config,
            self.policy,
            self.processor,
            adapter=self.adapter,
            run_dir=self.run_dir,
            ranks=self.ranks,
            warn=self.console.warn,
            base_dir=self.base_dir,
        )

    def _check_rewards(self) -> None:
        """Call every reward on every sample it applies to, before training; warn of rewards that apply to none."""
        for split, samples in self.samples.by_split().items():
            tracked = self.console.track(f"trying every reward on {split} samples", samples, len(samples))
            self.scorer.check_samples(tracked, self.response_format, evaluation=split != "train")
        check_group_rewards(self.group_rewards, self.scorer, self.samples.train)
        train = self.console.track("trying rewards on wrong answers", self.samples.train, len(self.samples.train))
        for warning in self.scorer.check_wrong_answers(train, self.response_format):
            self.console.warn(warning)

        all_samples = list(chain.from_iterable(self.samples.by_split().values()))
        for warning in find_coverage_gaps(self.config, self.scorer, all_samples):
            self.console.warn(warning)

    def _check_rollout_steps(self) -> None:
        """Refuse rollout steps that cannot run, before anything is trained."""
        for owner in configs_with_rollout_steps(self.config):
            if isinstance(owner, RlStage):
                check_routing_replay(owner.loss, self.policy)
            check_triggers(owner.rollout_steps, self.processor, self.banned_token_ids)

    def _print_overview(self) -> None:
        """Print the sizes of the splits, and for each model component its parameters and learning rates."""
        samples, model, stages = self.samples, self.policy.model, self.config.training_stages
        notices = [*self.model_bundle.iter_notices()]
        slow_path = self.model_bundle.family.describe_slow_path(select_device(self.config), model.dtype)
        for notice in [*notices, slow_path] if slow_path else notices:
            self.console.warn(notice)
        self.console.info(
            f"{len(samples.train):,} training, {len(samples.validation):,} validation and {len(samples.test):,} test "
            "samples"
        )
        rows = []
        for component in summarize_components(model, self.model_bundle.family):
            sizes = (component.num_tensors, component.num_parameters, component.num_trained)
            rates = []
            for stage in stages:
                frozen = self.config.model.with_freeze(stage.freeze).freeze
                is_trained = component.num_trained and component.component not in frozen
                rates.append(f"{stage.optimizer.component_lr(component.component):g}" if is_trained else "")
            rows.append((component.component, *(f"{size:,}" for size in sizes), "+".join(component.dtypes), *rates))
        columns = ("part", "tensors", "parameters", "trained", "type", *(f"lr in {stage.name}" for stage in stages))
        self.console.print_table(f"{type(model).__name__} on {model.device}", columns, rows)


def _check_device_and_processor(config: Config, base_dir: Path) -> None:
    """Check what `mmrl.training.early_checks` cannot without torch, before images are opened for an hour."""
    select_device(config)
    if config.model.from_scratch is None:
        # The model is loaded later, with the processor again, but a damaged tokenizer is refused here.
        load_processor(config.model, base_dir)


def _drop_unusable_samples(
    loader: DatasetLoader, samples: DataSplits, encoder: PromptEncoder, ranks: Ranks
) -> DataSplits:
    """Return the splits without samples whose media or prompt length the model cannot take. Collective."""
    videos = loader.open_videos(samples, encoder.frame_sampling)
    # In parts of a minute: the other ranks would take rank 0 for lost while it decodes for hours.
    while ranks.on_rank0(partial(next, videos, None)) is not None:
        pass
    return ranks.on_rank0(partial(loader.filter_by_prompt, samples, encoder.measure))

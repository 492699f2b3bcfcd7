"""Builds the parts of a run that outlive its stages: rewards, data, model, rollout engine.

`mmrl.training.run` calls `build_run`. The parts of a single stage are built when it begins (`mmrl.training.stage`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from time import monotonic
from typing import TypeVar

import torch

from mmrl.config import Config
from mmrl.config.schema import RethinkConfig, RlStage, SampleStage
from mmrl.data.context import make_dataset_context
from mmrl.data.data_record import DataRecord
from mmrl.data.demonstrations import check_demonstrations
from mmrl.data.load import EXCHANGE_EVERY_S, DatasetLoader, DataSplits
from mmrl.data.stage_data import StageData
from mmrl.distributed.ranks import Ranks
from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir
from mmrl.media.cache import MediaCache
from mmrl.media.opened_index import OpenedMediaIndex
from mmrl.media.pixel_reader import PixelReader
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
from mmrl.policy.chat import ChatTemplate
from mmrl.policy.encoder import PromptEncoder
from mmrl.policy.families import FAMILIES
from mmrl.policy.lora import LoraAdapter, create_adapter
from mmrl.policy.policy import PolicyModel
from mmrl.policy.pretrained import ModelBundle, ProcessorBundle, load_processor, read_context_tokens
from mmrl.policy.processor import PromptProcessor
from mmrl.policy.tiny_models import CONTEXT_TOKENS
from mmrl.protocols import RolloutPipeline, Sampler
from mmrl.rollout.environments.pictures import PICTURES_FOLDER
from mmrl.rollout.pipeline import build_pipeline
from mmrl.rollout.shared_engine import SharedEngine, compute_max_response_tokens, prompt_limit
from mmrl.rollout.steps.base import RolloutContext
from mmrl.rollout.steps.rethink import tokenize_trigger
from mmrl.rollout.steps.rewording import check_rewordings
from mmrl.rollout.tools.executor import ToolRunner
from mmrl.scoring import RewardFunctionScorer, registry
from mmrl.scoring.coverage import find_coverage_gaps
from mmrl.scoring.group_reward_calls import BoundGroupReward, check_group_rewards, isolate_group_rewards
from mmrl.scoring.trial import RewardTrial
from mmrl.training.functions import Functions
from mmrl.types import DatasetContext, Sample, UserError
from mmrl.utils.file_index import shared_file_index
from mmrl.utils.processes import keep_freed_memory
from mmrl.utils.seeds import derive_seed
from mmrl.utils.torch_cpu_compat import import_torchvision
from mmrl.utils.torch_threads import set_thread_count

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """Config, functions, folder and ranks that a run is built from."""

    config: Config
    base_dir: Path  # folder that relative files of the config start from
    functions: Functions
    run_dir: RunDir
    console: Console
    ranks: Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedData:
    """The samples of a run whose images open, with the loader and the cache used for them."""

    samples: DataSplits
    loader: DatasetLoader
    record: DataRecord  # the data that the run began with
    dataset_context: DatasetContext
    media_cache: MediaCache  # has the size of every image


@dataclass(frozen=True, kw_only=True)
class RunComponents(RunSetup):
    """Everything of a run that outlives its stages. The functions of the config's `callbacks` receive it."""

    scorer: RewardFunctionScorer
    group_rewards: tuple[BoundGroupReward, ...]
    tool_runner: ToolRunner
    samples: DataSplits
    data_record: DataRecord
    stage_data: StageData
    model_bundle: ModelBundle
    adapter: LoraAdapter | None
    policy: PolicyModel
    processor: PromptProcessor
    engine: SharedEngine

    def build_rollout_pipeline(self, stage: RlStage | SampleStage, sampler: Sampler) -> RolloutPipeline:
        """Return the pipeline that runs this rank's share of a stage's prompts."""
        rollout_context = RolloutContext(
            sampler=sampler,
            scorer=self.scorer,
            processor=self.processor,
            sampling_params=self.engine.build_sampling_params(stage.sampling),
            group_size=stage.group_size,
            prompts_per_step=stage.prompts_per_step,
            seed=derive_seed(self.config.run.seed, stage.name),
            tool_runner=self.tool_runner,
            swap_samples=self.samples.train,
            ranks=self.ranks,
            custom_steps=self.functions.rollout_steps[stage.name],
        )
        return build_pipeline(stage.rollout_steps, rollout_context)


def import_model_classes(config: Config) -> None:
    """Import torchvision and, for a model from scratch, the classes of its family, which the config names."""
    import_torchvision()
    if config.model.from_scratch is not None:
        FAMILIES[config.model.from_scratch.family]


def is_zero3(config: Config) -> bool:
    """Return True if DeepSpeed shards the weights over the ranks."""
    return config.deepspeed is not None and config.deepspeed.zero_stage == 3


def build_run(setup: RunSetup, resources: ExitStack) -> RunComponents:
    """Build and check everything of a run that outlives its stages; `resources` closes it. Collective.

    Raises:
        UserError: something in the config, the data or the rewards would fail during training.
    """
    config, console, ranks = setup.config, setup.console, setup.ranks
    set_thread_count(config.run.cpu_threads, ranks.size)
    torch.manual_seed(config.run.seed)
    processor_bundle = load_processor_early(setup)
    scorer, group_rewards = build_rewards(setup, resources)
    console.info(f"{config.run.name}: reading samples, opening every image, trying every reward ...")
    data = load_data(setup)
    ranks.set_activity("trying rewards")
    scorable = finish_on_rank0(try_rewards(config, scorer, group_rewards, data, console), ranks)
    data = replace(data, samples=scorable)
    ranks.set_activity("starting")
    if processor_bundle is None:
        processor_bundle = build_scratch_processor(setup, data.samples.train)
    response_format = build_response_format(config)
    opening = ChatTemplate(processor_bundle.processor, config.model.chat).find_response_opening(response_format)
    check_demonstrations(config, data.samples.train, response_format, opening)
    check_rewordings(config, data.samples.train, data.samples.source_indices)

    load_model = partial(build_trained_model, config, processor_bundle)
    model_bundle, adapter, policy = console.wait_for("loading the model", load_model)
    encoder = build_encoder(config, model_bundle, data.media_cache, prompt_limit(config, policy))
    samples = leave_out_unusable_samples(data, encoder, ranks)
    # With asynchronous rollouts two steps are in progress at a time, and each needs its encoded prompts.
    processor = PromptProcessor(encoder, retained_steps=2 if config.uses_async_rollouts else 1)
    check_model_supports_rollout_steps(config, policy, processor)
    print_overview(config, samples, model_bundle, console)
    engine = resources.enter_context(closing(start_engine(setup, policy, processor, adapter)))
    tool_runner = ToolRunner(setup.base_dir, pictures_dir=setup.run_dir.data / PICTURES_FOLDER)
    resources.enter_context(closing(tool_runner))
    return RunComponents(
        **vars(setup),
        scorer=scorer,
        group_rewards=group_rewards,
        tool_runner=tool_runner,
        samples=samples,
        data_record=data.record,
        stage_data=StageData(
            config,
            data.dataset_context,
            samples,
            train_functions=setup.functions.datasets["train"],
            processor=processor,
            outputs=setup.run_dir.outputs,
        ),
        model_bundle=model_bundle,
        adapter=adapter,
        policy=policy,
        processor=processor,
        engine=engine,
    )


def finish_on_rank0(work: Iterator[Result | None], ranks: Ranks) -> Result:
    """Let rank 0 run `work`, which yields None every minute and at the end its result; return this on every rank.

    Every yield is an exchange. Without one for hours, the other ranks would report rank 0 as lost. Collective.
    """
    result: Result | None = None
    while result is None:
        result = ranks.on_rank0(partial(next, work))
    return result


def load_processor_early(setup: RunSetup) -> ProcessorBundle | None:
    """Return the model's processor; None for a model from scratch, whose tokenizer is made from the samples.

    Opening every image may take an hour, so errors that can be found without it are raised first.

    Raises:
        UserError: the device is missing, the tokenizer is damaged, or a response may be longer than the context.
    """
    config, family = setup.config, setup.functions.family
    if select_device(config).type == "cpu":
        keep_freed_memory()
    if config.model.from_scratch is not None:
        compute_max_response_tokens(config, CONTEXT_TOKENS)
        return None
    processor_bundle = load_processor(config.model, setup.base_dir, family=family)
    if family is None:  # transformers may not know the config of the user's family
        compute_max_response_tokens(config, read_context_tokens(config.model))
    return processor_bundle


def build_scratch_processor(setup: RunSetup, samples: Sequence[Sample]) -> ProcessorBundle:
    """Return the processor of a model from scratch, made from the samples; the saved one if a run resumes with others.

    Samples that have changed since the run began would make another tokenizer, which the trained weights do not fit.
    """
    made = build_processor(setup.config, samples)
    folder = setup.run_dir.processor
    if folder.exists():
        own = load_processor(setup.config.model.model_copy(update={"path": str(folder)}))
        # A loaded tokenizer is exported with other settings, so an equal one is not replaced.
        if own.processor.tokenizer.get_vocab() != made.processor.tokenizer.get_vocab():
            return own
    return made


def build_rewards(setup: RunSetup, resources: ExitStack) -> tuple[RewardFunctionScorer, tuple[BoundGroupReward, ...]]:
    """Build the rewards and check them against their case tables. `resources` ends the processes that they start.

    Raises:
        UserError: a reward contradicts its case table.
    """
    config, base_dir, functions = setup.config, setup.base_dir, setup.functions
    media_policy = make_dataset_context(config, base_dir, setup.run_dir.data).media_policy
    pixel_reader = PixelReader(media_policy, config.data.media_limits)
    scorer = resources.enter_context(closing(RewardFunctionScorer(functions.rewards, config.rewards, pixel_reader)))
    group_rewards = isolate_group_rewards(functions.group_rewards, config.rewards, base_dir, pixel_reader)
    for group_reward in group_rewards:
        resources.callback(group_reward.close)
    registry.check_case_tables(map(attrgetter("fn"), config.rewards.terms), base_dir, config.rewards)
    return scorer, group_rewards


def load_data(setup: RunSetup) -> LoadedData:
    """Read all samples and open their images on rank 0, and send the samples to all. Raises as `DatasetLoader.load`."""
    config, run_dir, console = setup.config, setup.run_dir, setup.console
    context = make_dataset_context(config, setup.base_dir, run_dir.data)
    media_cache = MediaCache(context.media_policy, config.data.media_limits)
    record = DataRecord(path=run_dir.data_record, data=config.data, console=console)
    index = OpenedMediaIndex(shared_file_index(), context.media_policy, config.data.media_limits)
    loader = DatasetLoader(
        config, context, setup.functions.datasets, media_cache, console, opened_index=index, record=record
    )
    return LoadedData(
        samples=finish_on_rank0(loader.load(), setup.ranks),
        loader=loader,
        record=record,
        dataset_context=context,
        media_cache=media_cache,
    )


def try_rewards(
    config: Config,
    scorer: RewardFunctionScorer,
    group_rewards: Sequence[BoundGroupReward],
    data: LoadedData,
    console: Console,
) -> Iterator[DataSplits | None]:
    """Call every reward on every sample it applies to, before training; warn of rewards that apply to none.

    Yields None every minute, and at the end the samples that the rewards can score.

    Raises:
        UserError: a reward fails, or cannot score the right answer of a sample and `data.on_bad_sample` is `stop`.
    """
    kept: dict[str, tuple[Sample, ...]] = {}
    trial = RewardTrial(scorer, build_response_format(config))
    last_exchange = monotonic()
    for split, split_samples in data.samples.by_split().items():
        tracked = console.track(f"trying every reward on {split} samples", split_samples, len(split_samples))
        unscorable: dict[str, str] = {}
        for abstained in trial.check_in_batches(tracked, evaluation=split != "train"):
            unscorable |= abstained
            if monotonic() - last_exchange > EXCHANGE_EVERY_S:
                yield None
                last_exchange = monotonic()
        kept[split] = data.loader.leave_out(split, split_samples, unscorable)
    samples = DataSplits(**kept, source_indices=data.samples.source_indices)
    check_group_rewards(group_rewards, scorer, samples.train)
    train = console.track("trying rewards on wrong answers", samples.train, len(samples.train))
    for warning in trial.check_wrong_answers(train):
        console.warn(warning)
    all_samples = list(chain.from_iterable(samples.by_split().values()))
    for warning in find_coverage_gaps(config, scorer, all_samples):
        console.warn(warning)
    yield samples


def build_trained_model(
    config: Config, processor_bundle: ProcessorBundle
) -> tuple[ModelBundle, LoraAdapter | None, PolicyModel]:
    """Return the model on its device, with its adapter, and the policy that trains it.

    Raises:
        UserError: it cannot be loaded, or cannot have the adapter of `model.lora`.
    """
    options = config.model
    bundle = build_model(config, processor_bundle)
    adapter = create_adapter(bundle.model, options.lora, config.run.seed, bundle.family)
    model = bundle.model
    if not is_zero3(config):  # under ZeRO-3 the whole model may not fit on any device
        model = model.to(select_device(config))
    policy = PolicyModel(
        model,
        family=bundle.family,
        freeze=find_untrained_components(config),
        freeze_router=options.freeze_router,
        logits_chunk=options.logits_chunk_tokens,
        cache_vision=not is_zero3(config),
        float32_output_layer=options.float32_output_layer,
    )
    enable_gradient_checkpointing(model, options.gradient_checkpointing, bundle.family)
    return bundle, adapter, policy


def leave_out_unusable_samples(data: LoadedData, encoder: PromptEncoder, ranks: Ranks) -> DataSplits:
    """Return the samples with usable videos and prompts. Collective; raises as `DatasetLoader.filter_by_prompt`."""
    finish_on_rank0(data.loader.open_videos(data.samples, encoder.frame_sampling), ranks)
    return ranks.on_rank0(partial(data.loader.filter_by_prompt, data.samples, encoder.measure))


def start_engine(
    setup: RunSetup, policy: PolicyModel, processor: PromptProcessor, adapter: LoraAdapter | None
) -> SharedEngine:
    """Start the rollout engine; raises as `SharedEngine`."""
    start = partial(
        SharedEngine,
        setup.config,
        policy,
        processor,
        adapter=adapter,
        work_dir=setup.run_dir.engine,
        ranks=setup.ranks,
        console=setup.console,
        make_custom_engine=setup.functions.engine,
    )
    return setup.console.wait_for("starting the rollout engine", start)


def check_model_supports_rollout_steps(config: Config, policy: PolicyModel, processor: PromptProcessor) -> None:
    """Refuse rollout steps and a replay of routes that this model cannot run, before anything is trained."""
    banned_token_ids = policy.banned_ids(processor.tokenizer)
    for owner in configs_with_rollout_steps(config):
        if isinstance(owner, RlStage) and owner.loss.routing_replay != "none" and not policy.routers:
            raise UserError(f"loss.routing_replay: this {policy.family.model_type} has no experts; leave it out")
        for step in owner.rollout_steps:
            for trigger in step.triggers if isinstance(step, RethinkConfig) else ():
                tokenize_trigger(trigger.text, processor, banned_token_ids)


def print_overview(config: Config, samples: DataSplits, bundle: ModelBundle, console: Console) -> None:
    """Print the sizes of the splits, and for each model component its parameters and learning rates."""
    model, stages = bundle.model, config.training_stages
    notices = [*bundle.iter_notices()]
    slow_path = bundle.family.describe_slow_path(select_device(config), model.dtype)
    for notice in [*notices, slow_path] if slow_path else notices:
        console.warn(notice)
    console.info(
        f"{len(samples.train):,} training, {len(samples.validation):,} validation and {len(samples.test):,} test "
        "samples"
    )
    rows = []
    for component in summarize_components(model, bundle.family):
        sizes = (component.num_tensors, component.num_parameters, component.num_trained)
        rates = []
        for stage in stages:
            frozen = config.model.with_freeze(stage.freeze).freeze
            is_trained = component.num_trained and component.component not in frozen
            rates.append(f"{stage.optimizer.component_lr(component.component):g}" if is_trained else "")
        rows.append((component.component, *(f"{size:,}" for size in sizes), "+".join(component.dtypes), *rates))
    columns = ("part", "tensors", "parameters", "trained", "type", *(f"lr in {stage.name}" for stage in stages))
    console.print_table(f"{type(model).__name__} on {model.device}", columns, rows)

"""One RL stage of a run: builds its parts and runs the loop of `mmrl.training.rl`."""

from __future__ import annotations

from functools import partial

from mmrl import checkpoint
from mmrl.algo.advantages import compute_advantages
from mmrl.algo.credit import compute_turn_advantages
from mmrl.algo.replay import ReplaySettings
from mmrl.algo.select_experiences import ExperienceSelector
from mmrl.config.schema import CurriculumOrderConfig, RlStage, SftStage
from mmrl.data.stage_data import merge_visits_of_copies
from mmrl.data.stage_tables import write_history_table
from mmrl.learner.optimizer import Optimizer
from mmrl.learner.reference import ReferencePolicy
from mmrl.protocols import Sampler, SampleSource, Selector
from mmrl.rollout.logprob_check import LogprobCheck
from mmrl.scoring.group_reward_calls import reward_weights
from mmrl.training.async_rollouts import AsyncRollouts
from mmrl.training.build import RunComponents
from mmrl.training.health import HealthMonitor
from mmrl.training.media_recheck import find_changed_media
from mmrl.training.rl import RlParts, train_rl
from mmrl.training.run_checkpoints import OptimizerState
from mmrl.training.stage import StageServices, build_callbacks, build_learner, build_optimizer, open_stage
from mmrl.types import TrainingState


def run_rl_stage(stage: RlStage, services: StageServices, state: TrainingState) -> None:
    """Train an RL stage to its end."""
    run = services.run
    health = HealthMonitor(stage.health, run.console.warn, services.logger.log_event)
    health.restore(services.logger.step_metrics(stage.name))
    with open_stage(stage, services, state) as source:
        optimizer = build_optimizer(stage, run, services.sharded_model)
        loaded = services.checkpoints.take_optimizer_state()
        reference = build_reference(stage, services, state, loaded)
        if loaded:
            optimizer.load_state(loaded)
        del loaded  # a copy that would stay in memory for the whole stage
        parts = build_parts(
            stage, services, state, source=source, optimizer=optimizer, reference=reference, health=health
        )
        train_rl(parts, state)
        run.console.info(health.summary())
    if run.config.is_selected_from(stage.name):
        table_path = run.run_dir.outputs / f"{stage.name}.jsonl"
        samples = run.stage_data.stage_samples(stage)
        history = merge_visits_of_copies(samples, stage.repeat_samples_to, state.reward_history)
        run.ranks.on_rank0(partial(write_history_table, table_path, samples, history))


def build_parts(
    stage: RlStage,
    services: StageServices,
    state: TrainingState,
    *,
    source: SampleSource,
    optimizer: Optimizer,
    reference: ReferencePolicy | None,
    health: HealthMonitor,
) -> RlParts:
    """Build the parts that the loop calls.

    On return, the engine has the current weights and the log-prob check has passed.
    """
    run, engine = services.run, services.run.engine
    sampler = engine.make_sampler(
        run.config.run.seed,
        stage.name,
        version=state.version,
        concurrent=stage.async_rollouts,
        record_routes=stage.loss.routing_replay == "engine",
    )
    engine.sync_weights(state.version)
    logprob_check = start_logprob_check(stage, services, sampler, state)
    pipeline = run.build_rollout_pipeline(stage, sampler)
    async_rollouts = None
    if stage.async_rollouts:
        async_rollouts = AsyncRollouts(pipeline=pipeline, executor=engine.rollout_thread)

    def save_optimizer() -> OptimizerState:
        return {**optimizer.state(), **(reference.state() if reference else {})}

    update_reference = None
    if reference is not None and not reference.is_frozen:
        update_reference = partial(reference.update, reset_optimizer=optimizer.reset)
    learner = build_learner(stage, run, optimizer, reference.policy if reference else None)
    return RlParts(
        num_steps=stage.steps,
        prompts_per_round=stage.prompts_per_round,
        source=source,
        processor=run.processor,
        rollout_pipeline=pipeline,
        engine=engine,
        async_rollouts=async_rollouts,
        scorer=run.scorer,
        group_rewards=run.group_rewards,
        selector=build_selector(stage, run),
        learner=learner,
        update_reference=update_reference,
        sync_weights=sampler.sync,
        callbacks=build_callbacks(stage, services, learner, save_optimizer, health, logprob_check),
        ranks=run.ranks,
        activity=run.console.activity,
    )


def build_reference(
    stage: RlStage, services: StageServices, state: TrainingState, loaded: OptimizerState
) -> ReferencePolicy | None:
    """Return the policy that the KL penalty measures from, or None if the stage has no penalty.

    `loaded` is the state of the optimizer and of a moving reference in the stage's last checkpoint; empty without one.

    A copy that never moves is saved once, beside the checkpoints; one that moves is part of each checkpoint. No copy is
    needed if the model without its adapter can serve as the reference.
    """
    if not stage.loss.kl.coef:
        return None
    run, options, checkpoints = services.run, stage.reference, services.checkpoints
    earlier_stages = run.config.stages[: state.stage_index]
    trained_before = any(isinstance(earlier, SftStage | RlStage) for earlier in earlier_stages)
    # A new adapter has changed nothing yet, so the model without it is the policy at the stage's start.
    adapter_is_new = run.config.model.lora is not None and not trained_before
    if options.init_from == "base" or (options.update == "never" and adapter_is_new):
        return ReferencePolicy(run.policy, options, initial_copy=run.policy.without_adapter())
    reference = ReferencePolicy(run.policy, options, ranks=run.ranks)
    folder = run.run_dir.reference_weights / stage.name
    if not reference.is_frozen:
        if loaded:
            reference.load_state(loaded)
    elif state.step == 0:
        weights = checkpoints.checkpoint_weights(reference.policy)
        run.ranks.on_rank0(partial(checkpoint.save_weights, folder, weights))
    else:
        checkpoint.load_weights(folder, checkpoints.checkpoint_weights(reference.policy))
    return reference


def start_logprob_check(
    stage: RlStage, services: StageServices, sampler: Sampler, state: TrainingState
) -> LogprobCheck | None:
    """Check that the sampler's log-probs match the learner's, and return the check, which repeats when it is due.

    Return None for the engine `hf`, where the policy itself samples, unless `logprob_check.every` is set.
    """
    run, options = services.run, services.run.config.rollout
    if options.engine == "hf" and not options.logprob_check.every:
        return None
    check = LogprobCheck(
        sampler,
        run.policy,
        run.processor,
        samples=run.samples.train,
        sampling_params=run.engine.build_sampling_params(stage.sampling),
        options=options.logprob_check,
        warn=run.console.warn,
        ranks=run.ranks,
    )
    measure = partial(check.measure, state.version)
    metrics = run.console.wait_for("comparing the rollout engine with the learner", measure)
    # A resumed stage has logged its first check already.
    if state.step == 0:
        services.logger.log_metrics(state, metrics)
    return check


def build_selector(stage: RlStage, run: RunComponents) -> Selector:
    """Return the part that selects the experiences of each step of the stage."""
    seed = run.config.run.seed
    replay = None
    if stage.replay is not None:
        rollouts_per_step = stage.prompts_per_step * stage.group_size
        replay = ReplaySettings(options=stage.replay, rollouts_per_step=rollouts_per_step, seed=(seed, stage.name))
    phases = stage.data_order.phases if isinstance(stage.data_order, CurriculumOrderConfig) else ()
    credit_turns = None
    if stage.advantage.credit != "broadcast":
        credit_turns = partial(compute_turn_advantages, options=stage.advantage)
    return ExperienceSelector(
        compute_advantages=partial(
            compute_advantages,
            options=stage.advantage,
            weights=reward_weights(run.scorer, run.group_rewards),
            custom_advantage=run.functions.advantages[stage.name],
        ),
        compute_turn_advantages=credit_turns,
        prompts_per_step=stage.prompts_per_step,
        dynamic_sampling=stage.dynamic_sampling,
        carry_over=stage.carries_groups,
        mask_truncated=stage.loss.mask_truncated,
        replay=replay,
        find_changed_media=partial(find_changed_media, processor=run.processor, ranks=run.ranks, warn=run.console.warn),
        # A rollout correction, which requires `loss.old_logprobs: recomputed`, treats stale rollouts like fresh ones.
        stale_old_logprobs="recorded" if stage.loss.rollout_correction.method == "none" else None,
        rollouts_span_versions=stage.async_rollouts or stage.has_partial_rollouts,
        tracked_terms=stage.track_rewards,
        curriculum_phases=phases if stage.track_rewards else (),
    )

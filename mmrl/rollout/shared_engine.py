"""Chooses and starts the rollout engine of a run, and makes the samplers that share it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from mmrl import checkpoint
from mmrl.config import Config, EvalConfig
from mmrl.config.schema import (
    CustomEngineConfig,
    CustomStepConfig,
    EnvironmentConfig,
    RethinkConfig,
    RlStage,
    SampleStage,
    SamplingConfig,
    ToolsConfig,
)
from mmrl.distributed.ranks import Ranks
from mmrl.log.console import Console
from mmrl.policy.lora import LoraAdapter, without_adapter
from mmrl.policy.policy import PolicyModel
from mmrl.policy.pretrained import ModelExport
from mmrl.policy.processor import PromptProcessor
from mmrl.protocols import Sampler
from mmrl.rollout.available import VLLM_ENGINES, check_family_engine
from mmrl.rollout.engine_sampler import EngineSampler
from mmrl.rollout.engines.base import EngineContext, RolloutEngine
from mmrl.rollout.engines.hf import HfEngine
from mmrl.rollout.engines.vllm_start import start_vllm
from mmrl.rollout.weight_sync import PolicyWeightStream
from mmrl.types import SamplingParams, UserError
from mmrl.utils.plugin_args import check_methods
from mmrl.utils.torch_threads import init_worker_thread

# Upper bounds in tokens. A token is at least one byte, and UTF-8 takes at most four bytes for a character.
_MEDIA_LABEL_BYTES = 100  # of the label that precedes an image or video shown by a tool
_TOKENS_PER_CHAR = 4


class SharedEngine:
    """Starts the engine that the config names, and makes samplers that share it."""

    def __init__(
        self,
        config: Config | EvalConfig,
        policy: PolicyModel,
        processor: PromptProcessor,
        *,
        adapter: LoraAdapter | None,
        work_dir: Path,
        ranks: Ranks,
        console: Console,
        make_custom_engine: Callable[[EngineContext], RolloutEngine] | None = None,
    ) -> None:
        """Start the engine with the model that the policy started from. It gets the policy's weights at the first sync.

        `work_dir` is for files of an engine in another process. `console` warns when an engine is restarted, and shows
        how many responses are finished. `make_custom_engine` is the loaded function of `rollout.engine: {fn}`.

        Raises:
            UserError: the engine does not start, or cannot do what the config asks for.
        """
        family, engine_name = policy.family, config.rollout.engine_name
        check_family_engine(family.model_type, engine_name, takes_patches=family.takes_patches, num_ranks=ranks.size)
        self._config, self._policy, self._processor = config, policy, processor
        self._rollout_thread: ThreadPoolExecutor | None = None
        rl_stages = [stage for stage in config.stages if isinstance(stage, RlStage)]
        self._context = EngineContext(
            policy=policy,
            processor=processor,
            adapter=adapter,
            model_folder=partial(self._find_model_folder, work_dir, ranks),
            max_model_len=compute_max_model_len(config, policy),
            concurrent=isinstance(config, Config) and config.uses_async_rollouts,
            record_routes=any(stage.loss.routing_replay == "engine" for stage in rl_stages),
            work_dir=work_dir / f"rank-{ranks.rank}" if ranks.size > 1 else work_dir,
            ranks=ranks,
            warn=console.warn,
            activity=console.activity,
        )
        match config.rollout.engine:
            case "hf":
                self._engine: RolloutEngine = HfEngine(policy, processor, activity=console.activity)
            case CustomEngineConfig():
                assert make_custom_engine is not None, engine_name
                self._engine = make_custom_engine(self._context)
                check_custom_engine(self._engine, f"rollout.engine {engine_name!r}")
            case _:
                self._engine = start_vllm(config, self._context)
        self._weights = PolicyWeightStream(policy)
        self._version: int | None = None  # of the weights that the engine has; None before the first sync
        try:
            self._check_engine()
        except UserError:
            self._engine.close()
            raise

    def gather_for_sampling(self) -> AbstractContextManager[None]:
        """Gather ZeRO-3 shards inside this block if the engine generates with the learner's own tensors."""
        return self._policy.runner.gather_all() if self._engine.shares_weights else nullcontext()

    def make_sampler(
        self, *seed_parts: str | int, version: int = 0, concurrent: bool = False, record_routes: bool = False
    ) -> Sampler:
        """Return a sampler whose random numbers derive from `seed_parts`: the run's seed and words for its purpose.

        Call `sync` before generating; until then, segments are stamped `version`. A `concurrent` sampler may generate
        in `rollout_thread` while the learner updates the policy. With `record_routes` rollouts carry the experts that
        their tokens were sent to.
        """
        engine, load_version = self._engine, self.sync_weights
        if concurrent and engine.shares_weights:
            # The learner changes the shared weights meanwhile, so this sampler generates from a copy of its own.
            engine = HfEngine(self._policy, self._processor, copy_policy=True, activity=self._context.activity)

            def load_version(version: int) -> None:
                engine.load_weights(self._weights)

        return EngineSampler(
            engine,
            self._processor,
            load_version=load_version,
            seed_parts=seed_parts,
            version=version,
            record_routes=record_routes,
        )

    def sync_weights(self, version: int) -> None:
        """Have the engine load the policy's weights, unless it has those of `version`.

        Each version is loaded once, however many samplers ask for it. Raises as `RolloutEngine.load_weights`.
        """
        if version != self._version:
            self._engine.load_weights(self._weights)
            self._version = version

    def sleep(self) -> None:
        """Free the engine's memory on the learner's device until it next generates or gets weights.

        Does nothing in a run with `async_rollouts`, where the engine may be generating.
        """
        if not self._context.concurrent:
            self._engine.sleep()

    @property
    def rollout_thread(self) -> Executor:
        """The thread that generates while the learner updates the policy."""
        # Kept as long as the engine: the kernel ends a server when the thread that started it ends (not only when the
        # process does), and this thread restarts servers.
        if self._rollout_thread is None:
            init_thread = partial(init_worker_thread, self._policy.model.device, torch.get_num_threads())
            self._rollout_thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts", initializer=init_thread)
        return self._rollout_thread

    def close(self) -> None:
        """Shut down the engine. Generation that still runs in another thread fails."""
        self._engine.close()
        if self._rollout_thread is not None:
            self._rollout_thread.shutdown(cancel_futures=True)

    def _check_engine(self) -> None:
        """Raise UserError if the engine cannot do what the config asks for."""
        engine, name = self._engine, self._config.rollout.engine_name
        dtypes = engine.logits_dtypes() if self._config.model.float32_output_layer else {"float32"}
        if dtypes != {"float32"}:
            raise UserError(
                f"model.float32_output_layer: rollout.engine {name} computes logits in {' and '.join(sorted(dtypes))}, "
                "and the learner in float32; make the engine compute them in float32 (servers of your own: "
                "--hf-overrides as docs/vllm.md says), or set it to false"
            )
        if self._context.record_routes and not engine.returns_routes:
            raise UserError(
                f"loss.routing_replay: engine: rollout.engine {name} does not return the experts that tokens were sent "
                "to; set loss.routing_replay: learner"
            )
        if self._context.concurrent and engine.shares_weights and name != "hf":
            raise UserError(
                f"async_rollouts: rollout.engine {name} generates with the learner's weights (shares_weights), which "
                "change meanwhile; give it a copy, or leave out `async_rollouts`"
            )

    def _find_model_folder(self, work_dir: Path, ranks: Ranks) -> str:
        """Return `model.path`, or the folder that a model made from scratch is exported to. Collective."""
        if self._config.model.path is not None:
            return self._config.model.path
        folder = work_dir / "model"  # shared by the ranks: only rank 0 writes it
        # Exported without its adapter: the engine gets that with the first weights.
        bare = without_adapter(self._policy.model) if self._context.adapter else self._policy.model
        parts = (ModelExport(bare, self._policy.family), self._processor.hf_processor)
        ranks.on_rank0(partial(checkpoint.export_hf_folder, folder, *parts))
        return str(folder)


def check_custom_engine(engine: RolloutEngine, owner: str) -> None:
    """Raise UserError if the function `owner` returned something other than a `RolloutEngine`."""
    check_methods(engine, RolloutEngine, ("generate", "load_weights", "logits_dtypes", "sleep", "close"), owner=owner)
    for name in ("max_model_len", "shares_weights", "returns_routes"):
        if name not in dir(engine):
            raise UserError(
                f"{owner} returned {engine!r:.80}, which has no attribute {name!r}; set it, or inherit the default "
                f"from {RolloutEngine.__module__}.{RolloutEngine.__name__}"
            )


def build_sampling_params(
    options: SamplingConfig | EvalConfig,
    banned_token_ids: tuple[int, ...],
    stop_strings: tuple[str, ...],
) -> SamplingParams:
    """Return the sampling parameters of a stage or of an evaluation."""
    generation = options.evaluation if isinstance(options, EvalConfig) else options
    return SamplingParams(
        temperature=generation.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        banned_token_ids=banned_token_ids,
        stop=stop_strings,
        max_new_tokens=generation.max_new_tokens,
    )


def compute_max_response_tokens(config: Config | EvalConfig, context_tokens: int) -> int:
    """Return the most tokens of a response in any stage or the evaluation, including what rollout steps may add.

    `context_tokens` is the length of the model's context.

    Raises:
        UserError: the model's context is too short for one of them; the error names the key.
    """
    generating = [("evaluation", "evaluation", config.evaluation.max_new_tokens, config.evaluation.rollout_steps)]
    for index, stage in enumerate(config.stages):
        if isinstance(stage, RlStage | SampleStage):
            key = f"stages.{index}"
            generating.append((key, f"{key}.sampling", stage.sampling.max_new_tokens, stage.rollout_steps))
    longest = 0
    for key, sampling_key, max_new_tokens, steps in generating:
        _check_fits_context(f"{sampling_key}.max_new_tokens", max_new_tokens, context_tokens)
        length = max_new_tokens
        for index, step in enumerate(steps):
            match step:
                case RethinkConfig():
                    _check_fits_context(
                        f"{key}.rollout_steps.{index}.max_new_tokens", step.max_new_tokens, context_tokens
                    )
                    # A token is a byte at least.
                    length += step.max_new_tokens + max(len(trigger.text.encode()) for trigger in step.triggers)
                case ToolsConfig():
                    # One more result may follow a response of `max_total_tokens`.
                    brackets = len(step.result_prefix.encode()) + len(step.result_suffix.encode())
                    labels = _MEDIA_LABEL_BYTES * (1 + step.max_media)
                    length += step.max_total_tokens + brackets + _TOKENS_PER_CHAR * step.max_result_chars + labels
                case EnvironmentConfig():
                    _check_fits_context(f"{key}.rollout_steps.{index}.max_tokens", step.max_tokens, context_tokens)
                    length = max(length, step.max_tokens)
                case CustomStepConfig():
                    length += step.max_added_tokens
        longest = max(longest, length)
    return longest


def compute_max_model_len(config: Config | EvalConfig, policy: PolicyModel) -> int:
    """Return the most tokens that a prompt and its response may have together: no more than the engine takes."""
    rollout = config.rollout
    # A smaller limit than the model's own saves the engine memory for keys and values.
    wanted = config.model.max_prompt_tokens + compute_max_response_tokens(config, _context_tokens(policy))
    if rollout.engine == "vllm_server" and rollout.server.urls:
        from mmrl.rollout.engines.vllm_server import common_max_model_len

        return min(wanted, common_max_model_len(rollout.server.urls, rollout.server))
    return min(wanted, _context_tokens(policy))


def prompt_limit(config: Config | EvalConfig, policy: PolicyModel) -> tuple[int, str]:
    """Return the most tokens that a prompt may have, and a description of what limits them.

    Raises:
        UserError: a response may be longer than the model's context, or leaves the engine no room for a prompt.
    """
    response = compute_max_response_tokens(config, _context_tokens(policy))
    limit = (config.model.max_prompt_tokens, "model.max_prompt_tokens")
    steps = chain(config.evaluation.rollout_steps, *(getattr(stage, "rollout_steps", ()) for stage in config.stages))
    # Other engines have no limit of their own, but episodes are as long as the model's context allows.
    if config.rollout.engine not in VLLM_ENGINES and not any(isinstance(step, EnvironmentConfig) for step in steps):
        return limit
    model_len = compute_max_model_len(config, policy)
    if model_len <= response:
        raise UserError(
            f"rollout.engine {config.rollout.engine}: a response may have {response} tokens, with all that "
            f"steps add to it, and the engine takes {model_len} with the prompt; lower max_new_tokens (of "
            "`sampling`, `evaluation` or rethink), max_tokens of an environment, and max_total_tokens and "
            f"max_result_chars of tools, whose characters count as {_TOKENS_PER_CHAR} tokens"
        )
    engine_limit = (model_len - response, f"{model_len} tokens of the rollout engine less {response} for the response")
    return min(limit, engine_limit)


def _context_tokens(policy: PolicyModel) -> int:
    return int(policy.model.config.get_text_config().max_position_embeddings)


def _check_fits_context(key: str, tokens: int, context_tokens: int) -> None:
    if tokens >= context_tokens:
        raise UserError(
            f"{tokens} tokens of a response and its prompt do not fit the model's context of {context_tokens}; use "
            "fewer",
            key=key,
        )

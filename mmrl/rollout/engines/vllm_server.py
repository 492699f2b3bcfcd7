"""vLLM servers, one or several: token ids and encoded media go in, token ids and log-probabilities come out.

A replica is one server with the whole model. A replica that hangs or has died does not answer within
`rollout.server.timeout_s`. It is restarted, and its requests go to all replicas again, with the same seeds.
`mmrl.rollout.engines.vllm_replica` starts, restarts and ends the processes.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import partial
from itertools import cycle
from operator import itemgetter, methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.entrypoints.scale_out.token_in_token_out.mm_features import extract_mm_features

from mmrl.config.schema import VllmServerConfig
from mmrl.distributed.launch import find_free_port
from mmrl.policy.expert_routing import router_layers
from mmrl.rollout.engines.base import EngineContext, GenerationRequest, RolloutEngine
from mmrl.rollout.engines.vllm_inputs import build_engine_input
from mmrl.rollout.engines.vllm_replica import ADAPTER_NAME, START_HINT, Replica, ReplicaError
from mmrl.rollout.engines.vllm_requests import parse_completion, read_routes, sampling_arguments
from mmrl.rollout.engines.vllm_weight_transfer import RequireKey
from mmrl.rollout.engines.vllm_weights import export_adapter
from mmrl.rollout.responses import GeneratedTokens
from mmrl.rollout.weight_sync import ShardedWeightStream, WeightStream
from mmrl.types import SamplingParams, UserError

# The module that `vllm serve` runs. The command itself does not start in the build for CPUs.
_SERVE = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")

_REQUESTS_PER_REPLICA = 64  # at a time: a replica batches them itself and only needs a full queue


class ServerEngine(RolloutEngine):
    """Divides requests among replicas."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        context: EngineContext,
        *,
        workers_per_replica: int,
        takes_adapter: bool = False,
    ) -> None:
        """Start the replicas that belong to the run, and wait until all of them answer.

        `workers_per_replica` counts the processes of each replica that hold weights. With `takes_adapter`,
        `load_weights` loads the adapter's files instead of full weights. If several ranks share the servers, it is
        collective, and rank 0 sends the weights. `context.warn` is called when a replica is restarted.

        Raises:
            UserError: a replica does not answer in time.
        """
        self._replicas, self._context, self._workers_per_replica = replicas, context, workers_per_replica
        self._takes_adapter, self._ranks = takes_adapter, context.ranks
        # If a replica restarts while the learner already updates the weights, it must get the weights that it had.
        # Servers that several ranks share are never restarted, so they need no copy.
        self._keep_weights = context.concurrent and context.ranks.size == 1
        self._eos_id: int = context.processor.tokenizer.eos_token_id
        self._load_last_weights: Callable[[Replica], None] = lambda replica: None
        self._expert_layers = router_layers(context.policy.model) if context.record_routes else ()
        self.max_model_len, self.returns_routes = context.max_model_len, bool(self._expert_layers)
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

    def generate(
        self, requests: Sequence[GenerationRequest], sampling_params: SamplingParams, *, record_routes: bool = False
    ) -> list[list[GeneratedTokens]]:
        """Return the continuations of each request. Those of a replica that fails are divided among all again."""
        layers = self._expert_layers if record_routes else ()
        self._context.activity.begin_count("rollout", sum(request.num_samples for request in requests))
        answers: dict[int, list[GeneratedTokens]] = {}
        while len(answers) < len(requests):
            unanswered = sorted(set(range(len(requests))) - answers.keys())
            failures: dict[Replica, ReplicaError] = {}
            sent: dict[int, tuple[Replica, Future[list[GeneratedTokens]]]] = {}
            # Leaving the block waits for all requests.
            with ThreadPoolExecutor(max_workers=_REQUESTS_PER_REPLICA * len(self._replicas)) as pool:
                for number, replica in zip(unanswered, cycle(self._replicas), strict=False):
                    body = self._request_body(requests[number], sampling_params, replica)
                    layout = (len(requests[number].rollout.prompt.token_ids), layers)
                    sent[number] = (replica, pool.submit(_generate_on_replica, replica, body, *layout))
                # Progress is counted in this thread only. Errors of failed futures are raised below, with all results.
                for future in as_completed([future for _, future in sent.values()]):
                    if future.exception() is None:
                        self._context.activity.advance("rollout", len(future.result()))
            for number, (replica, future) in sent.items():
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
        """Load weights, or the adapter's files, into all replicas, one after the other."""
        if self._takes_adapter:
            folder = export_adapter(self._context)
            self._ranks.on_rank0(partial(self._load_into_all, methodcaller("load_adapter", folder)))
            for replica in self._replicas:
                replica.adapter_loaded = True  # on the other ranks, too: their requests name the adapter
            return
        ShardedWeightStream(weights, self._ranks).load_on_rank0(self._load_weights_on_rank0)

    def logits_dtypes(self) -> set[str]:
        """Return the dtypes that the workers of all replicas compute logits in, such as `float32`."""
        found: set[str] = set()
        for replica in self._replicas:
            try:
                found.update(replica.call_workers("logits_dtype"))
            except ReplicaError as error:
                raise UserError(
                    f"the rollout server {replica.url} does not say what type its logits have ({error!r}); {START_HINT}"
                ) from error
        return found

    def close(self) -> None:
        """End the replicas that belong to the run. Requests that another thread is waiting for fail."""
        self._closed = True
        for replica in self._replicas:
            replica.stop()

    def _load_weights_on_rank0(self, weights: WeightStream) -> None:
        source = _HostWeightCopy(weights) if self._keep_weights else weights
        self._load_into_all(methodcaller("load_weights", source, self._workers_per_replica))

    def _load_into_all(self, load: Callable[[Replica], None]) -> None:
        # Remembered, since a replica that is restarted has to be loaded in the same way.
        self._load_last_weights = load
        for replica in self._replicas:
            try:
                load(replica)
            except ReplicaError as failure:
                self._restart(replica, failure)

    def _restart(self, replica: Replica, failure: ReplicaError) -> None:
        """Restart a replica with the weights that it had last."""
        while True:  # `Replica.restart` raises once that was too often
            replica.restart(failure)
            self._context.warn(
                f"the rollout server {replica.url} failed ({failure}); it was restarted, and its requests are being "
                "retried"
            )
            try:
                return self._load_last_weights(replica)
            except ReplicaError as next_failure:
                failure = next_failure

    def _request_body(
        self, request: GenerationRequest, sampling_params: SamplingParams, replica: Replica
    ) -> dict[str, Any]:
        engine_input = build_engine_input(request.rollout, self._context.processor)
        # A request to vLLM's server has only the start and the length of a medium, and no mask for tokens between its
        # placeholders, such as the times that the family qwen3_vl writes between the frames of a video.
        for ranges in engine_input.get("mm_placeholders", {}).values():
            if any(placeholder_range.is_embed is not None for placeholder_range in ranges):
                raise UserError(
                    f"sample {request.rollout.prompt.sample.id}: vLLM's server takes no video with words between its "
                    "frames; use `rollout.engine: vllm`, or a family that writes none"
                )
        body: dict[str, Any] = {
            "token_ids": engine_input["prompt_token_ids"],
            "sampling_params": sampling_arguments(request, sampling_params, self._eos_id),
        }
        features = extract_mm_features(engine_input)
        if features:
            body["features"] = features.model_dump()
        if replica.adapter_loaded:
            body["model"] = ADAPTER_NAME
        return body


def make_replicas(
    model: str, engine_args: Mapping[str, Any], options: VllmServerConfig, log_dir: Path
) -> list[Replica]:
    """Return a replica for each of `options.urls`, or else new ones of `model` (folder or hub id), not started yet."""
    if options.urls:
        return [Replica(url, options) for url in options.urls]
    flags = ["--served-model-name", "base", "--enable-scale-out", "--disable-uvicorn-access-log"]
    flags += ["--middleware", f"{RequireKey.__module__}.{RequireKey.__name__}"]
    if options.weight_transfer != "file":
        engine_args = {**engine_args, "weight_transfer_config": {"backend": options.weight_transfer}}
    for name, value in engine_args.items():
        flag = name.replace("_", "-")
        match value:
            case bool():
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            case dict():
                flags += [f"--{flag}", json.dumps(value)]
            case _:
                flags += [f"--{flag}", str(value)]
    log_dir.mkdir(parents=True, exist_ok=True)
    replicas = []
    for number in range(options.replicas):
        port = find_free_port()
        replica = Replica(
            f"http://127.0.0.1:{port}",
            options,
            command=[*_SERVE, "--model", model, "--host", "127.0.0.1", "--port", str(port), *flags],
            device=options.devices[number] if options.devices else "",
            log=log_dir / f"server-{number}.log",
        )
        replicas.append(replica)
    return replicas


def common_max_model_len(urls: Sequence[str], options: VllmServerConfig) -> int:
    """Return the length, in tokens, of the longest sequence that all of these servers accept.

    Raises:
        UserError: a server does not answer, or does not report its limit.
    """
    lengths = []
    for url in urls:
        replica = Replica(url, options)
        replica.wait_until_ready()
        try:
            lengths.append(int(replica.request_json("v1/models")["data"][0]["max_model_len"]))
        except (ReplicaError, LookupError, TypeError) as error:
            raise UserError(
                f"the rollout server {url} does not say how long a sequence it takes ({error!r}); {START_HINT}"
            ) from error
    return min(lengths)


class _HostWeightCopy(WeightStream):
    """A copy of weights in host memory. Iterating yields each on the device that it came from."""

    def __init__(self, weights: WeightStream) -> None:
        self._tensors: dict[str, tuple[torch.Tensor, torch.device]] = {}
        for name, tensor in weights:
            # `copy=True`: from a policy on the CPU, `to` would return the tensors that the learner keeps updating.
            self._tensors[name] = (tensor.detach().to("cpu", copy=True), tensor.device)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of each weight."""
        for name, (tensor, device) in self._tensors.items():
            yield name, tensor.to(device)


def _generate_on_replica(
    replica: Replica, body: Mapping[str, Any], num_prompt_tokens: int, expert_layers: Sequence[int]
) -> list[GeneratedTokens]:
    """Send one request and read its completions, in the order of their seeds, with routes in `expert_layers`."""
    completions = []
    try:
        choices = replica.request_json("inference/v1/generate", body)["choices"]
        for choice in sorted(choices, key=itemgetter("index")):
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
            # A .npy file in base64, sent by a server that was started with --enable-return-routed-experts.
            encoded = choice.get("routed_experts")
            routed_TLK = None if encoded is None else np.load(io.BytesIO(base64.b64decode(encoded)))
            routes = read_routes(routed_TLK, num_prompt_tokens, expert_layers)
            reasons = (choice["finish_reason"], choice["stop_reason"])
            completions.append(parse_completion(choice["token_ids"], logprobs, *reasons, *routes))
    except RuntimeError as error:
        # A completion that cannot be used (`parse_completion`) is a failure of the server: a restart may help.
        raise ReplicaError(str(error)) from error
    return completions

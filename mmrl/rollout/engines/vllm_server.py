"""Servers of vLLM, one or several: token ids and ready-made media go in, token ids and log-probabilities come out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm.entrypoints.scale_out.token_in_token_out.mm_features import extract_mm_features

from mmrl.config.schema import Server
from mmrl.policy.processor import QwenProcessor
from mmrl.rollout.engines.base import Request, drawn
from mmrl.rollout.engines.vllm_inputs import engine_input
from mmrl.rollout.engines.vllm_replica import ADAPTER, Failed, Replica, free_port
from mmrl.rollout.engines.vllm_weight_transfer import BACKEND, register
from mmrl.rollout.responses import Drawn
from mmrl.rollout.weight_sync import Weights
from mmrl.types import Prompt, UserError

_AT_ONCE = 64  # requests under way to a replica; it has its own queue, and this only keeps it filled


class ServerEngine:
    """Requests are shared out among the replicas; what one leaves unanswered is asked again, with the same seeds."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        processor: QwenProcessor,
        *,
        spread: int,
        warn: Callable[[str], None],
    ) -> None:
        """Start those that are ours, and wait for all; `spread` is the number of workers of each. `warn` is told of one
        that had to be started again.

        Raises:
            UserError: one is not up in time.
        """
        register()
        self._replicas, self._processor, self._spread, self._warn = replicas, processor, spread, warn
        self._eos: int = processor.tokenizer.eos_token_id
        self._restore: Callable[[Replica], None] = lambda replica: None
        self._closed = False
        try:
            for replica in replicas:
                replica.start()
            for replica in replicas:
                replica.wait()
        except BaseException:
            self.close()
            raise

    def draw(self, requests: Sequence[Request]) -> list[list[Drawn]]:
        """The siblings of each request, in order.

        Raises:
            UserError: a server refuses a request, or fails once too often.
        """
        answers: dict[int, list[Drawn]] = {}
        while missing := [number for number in range(len(requests)) if number not in answers]:
            failures: dict[Replica, Failed] = {}
            for number, (replica, asked) in self._asked(requests, missing).items():
                try:
                    answers[number] = asked.result()
                except Failed as failure:
                    failures[replica] = failure
            for replica, why in failures.items():
                if self._closed:
                    raise why
                self._revive(replica, why)
        return [answers[number] for number in range(len(requests))]

    def load(self, weights: Weights) -> None:
        """Send weights to every replica, one after the other. Raises as `Replica.load`."""
        self._restore = lambda replica: replica.load(weights, self._spread)
        self._give()

    def load_adapter(self, folder: Path) -> None:
        """Have every replica use the adapter."""
        self._restore = lambda replica: replica.load_adapter(folder)
        self._give()

    def ask_for_adapter(self) -> None:
        """Another process has loaded an adapter: ask every replica for it from now on."""
        for replica in self._replicas:
            replica.adapted = True

    def rest(self) -> None:
        """It has devices of its own."""

    def close(self) -> None:
        """End the replicas that are ours; what another thread is drawing fails."""
        self._closed = True
        for replica in self._replicas:
            replica.end()

    def _give(self) -> None:
        for replica in self._replicas:
            try:
                self._restore(replica)
            except Failed as failure:
                self._revive(replica, failure)

    def _revive(self, replica: Replica, failure: Failed) -> None:
        """Start it again, with the weights that it had last, as often as it may be. Raises as `Replica.revive`."""
        while True:
            replica.revive(failure)
            self._warn(f"the rollout server {replica.url} failed ({failure}); it was started again, and is asked again")
            try:
                return self._restore(replica)
            except Failed as once_more:
                failure = once_more

    def _asked(
        self, requests: Sequence[Request], numbers: Sequence[int]
    ) -> dict[int, tuple[Replica, Future[list[Drawn]]]]:
        """Ask all of them, and wait; by number, whom each was put to and its answer."""
        with ThreadPoolExecutor(max_workers=_AT_ONCE * len(self._replicas)) as pool:
            asked = {}
            for place, number in enumerate(numbers):
                replica = self._replicas[place % len(self._replicas)]
                asked[number] = replica, pool.submit(self._draw, replica, self._body(requests[number], replica))
        return asked

    def _body(self, request: Request, replica: Replica) -> dict[str, Any]:
        ready = engine_input(request.begun, self._processor)
        check_placeholders(request.begun.prompt, ready)
        features = extract_mm_features(ready)
        return {
            "token_ids": ready["prompt_token_ids"],
            "sampling_params": request.parameters(self._eos),
            **({"features": features.model_dump()} if features else {}),
            **({"model": ADAPTER} if replica.adapted else {}),
        }

    @staticmethod
    def _draw(replica: Replica, body: Mapping[str, Any]) -> list[Drawn]:
        try:
            choices = replica.ask("inference/v1/generate", body)["choices"]
            return [_drawn(choice) for choice in sorted(choices, key=lambda choice: int(choice["index"]))]
        except RuntimeError as error:
            raise Failed(str(error)) from error


def check_placeholders(prompt: Prompt, ready: Mapping[str, Any]) -> None:
    """A server is told where a medium begins and ends, not which of the tokens between are its own.

    Raises:
        UserError: a video has words between its frames, as in qwen3_vl.
    """
    if any(where.is_embed is not None for ranges in ready.get("mm_placeholders", {}).values() for where in ranges):
        raise UserError(
            f"sample {prompt.sample.id}: vLLM's server takes no video with words between its frames; use "
            "`rollout.engine: vllm`, or a family that writes none"
        )


def replicas(model: str, arguments: Mapping[str, Any], options: Server, logs: Path) -> list[Replica]:
    """Those that the options name: running already, or to be started on the folder or hub id `model`."""
    if options.urls:
        return [Replica(url, options) for url in options.urls]
    logs.mkdir(parents=True, exist_ok=True)
    made = []
    for number in range(options.replicas):
        port = free_port()
        device = options.devices[number] if options.devices else ""
        command = serve_command(model, arguments, options, port)
        log = logs / f"server-{number}.log"
        made.append(Replica(f"http://127.0.0.1:{port}", options, command=command, device=device, log=log))
    return made


def serve_command(model: str, arguments: Mapping[str, Any], options: Server, port: int) -> list[str]:
    """The command line of `vllm serve` for arguments of vLLM's `LLM`."""
    transfer = {"weight_transfer_config": {"backend": BACKEND if options.transfer == "file" else options.transfer}}
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
    for name, value in {**arguments, **transfer}.items():
        flag = name.replace("_", "-")
        match value:
            case bool():
                command.append(f"--{flag}" if value else f"--no-{flag}")
            case dict():
                command += [f"--{flag}", json.dumps(value)]
            case _:
                command += [f"--{flag}", str(value)]
    return command


def longest_of(urls: Sequence[str], options: Server) -> int:
    """Tokens of the longest sequence that every one of these servers takes.

    Raises:
        UserError: one does not answer, or does not say.
    """
    found = []
    for url in urls:
        replica = Replica(url, options)
        replica.wait()
        found.append(replica.longest())
    return min(found)


def _drawn(choice: Mapping[str, Any]) -> Drawn:
    logps = [token["logprob"] for token in choice["logprobs"]["content"]]
    return drawn(choice["token_ids"], logps, choice["finish_reason"], choice["stop_reason"])

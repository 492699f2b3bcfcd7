"""A scene of a server of vLLM's: the same tokens as in process, weights through files, deaths, deadlines."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib import request as http
from urllib.error import HTTPError

from vllm_scenes import LONGEST, Questions, Scene, ids, refusal, without_videos

from mmrl.config.schema import VllmServerConfig
from mmrl.rollout.engines.base import GenerationRequest
from mmrl.rollout.engines.vllm_replica import Replica, ReplicaError
from mmrl.rollout.engines.vllm_server import ServerEngine, common_max_model_len, make_replicas
from mmrl.rollout.engines.vllm_weight_transfer import send_files
from mmrl.rollout.weight_sync import PolicyWeightStream, WeightStream
from mmrl.types import Author, Segment

ROUTES = (
    *("health", "metrics", "v1/models", "v1/chat/completions", "inference/v1/generate", "v1/load_lora_adapter"),
    *("collective_rpc", "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"),
    *("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache", "sleep", "wake_up", "server_info", "docs"),
)
"""What a server of a run answers: generation, weights, calls of workers, caches, sleeping, settings."""


def _status(url: str, path: str, key: str = "") -> int:
    """The status of a request, by POST where the path takes that."""
    reading = path in ("health", "metrics", "v1/models", "server_info", "docs")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    asked = http.Request(f"{url}/{path}", None if reading else b"{}", headers if key else {})
    try:
        with http.build_opener(http.ProxyHandler({})).open(asked, timeout=60.0) as response:
            return int(response.status)
    except HTTPError as error:
        return error.code


def served(questions: Questions) -> dict[str, Any]:
    """Start, draw, sync, die."""
    scene = Scene(questions)
    servers = make_replicas(scene.model, scene.arguments, VllmServerConfig(max_restarts=1), questions.folder / "logs")
    engine = ServerEngine(servers, scene.context(concurrent=True), workers_per_replica=1)
    try:
        sampler = scene.sampler(engine)
        sampler.sync(1)
        groups = scene.draw(sampler)
        facts: dict[str, Any] = {"read ids": ids(groups), "gaps": scene.gaps(groups), **scene.shown(sampler, groups)}
        facts["logits"] = sorted(engine.logits_dtypes())
        (running,) = servers
        slow = _engine(scene, Replica(running.url, VllmServerConfig(timeout_s=0.005), key=running.key))
        facts["too slow"] = refusal(lambda: scene.draw(scene.sampler(slow)))
        facts["without the key"] = {path: _status(running.url, path) for path in ROUTES}
        facts["with another key"] = {path: _status(running.url, path, "other") for path in ROUTES}
        facts["with the key"] = {path: _status(running.url, path, running.key) for path in ("health", "v1/models")}
        facts["key in ps"] = running.key in " ".join(running._command)
        keyless = Replica(running.url, VllmServerConfig())
        facts["a run without the key"] = refusal(lambda: _engine(scene, keyless))
        nobody = Replica("http://127.0.0.1:9", VllmServerConfig(timeout_s=0.5))
        facts["nobody there"] = refusal(lambda: _engine(scene, nobody))
        with _another_kind_of_server() as url:
            facts["no vLLM"] = refusal(lambda: common_max_model_len([url], VllmServerConfig(timeout_s=5.0)))
        fragile = ServerEngine([Fragile()], replace(scene.context(), warn=lambda text: None), workers_per_replica=1)
        facts["broke as it was given weights"] = refusal(lambda: fragile.load_weights(PolicyWeightStream(scene.policy)))
        words = Segment(
            token_ids=(groups[0][0].prompt.token_ids[0],) * LONGEST,
            logprobs=(0.0,) * LONGEST,
            author=Author.ENVIRONMENT,
        )
        overlong = GenerationRequest(rollout=replace(groups[0][0], segments=(words,)), seed=0, sample_seeds=(0,))
        facts["refused"] = refusal(lambda: engine.generate([overlong], scene.params))
        scene.learn()
        facts["gaps with old weights"] = scene.gaps(scene.draw(sampler))
        # Every tensor in a file of its own: query apart from key.
        send_files(PolicyWeightStream(scene.policy), running.call_workers, file_bytes=1)
        running._reset_caches()
        facts["gaps after pieces"] = scene.gaps(scene.draw(sampler))
        scene.learn()
        sampler.sync(2)
        groups = scene.draw(sampler, replace(scene.params, max_new_tokens=60))
        facts["gaps after sync"] = scene.gaps(groups)
        drawn_by = {name: parameter.detach().clone() for name, parameter in scene.policy.trained.items()}
        scene.learn()  # continues while rollouts are drawn: the server is to get what it had
        with _killing(running):
            again = scene.draw(sampler, replace(scene.params, max_new_tokens=60))
        for name, parameter in scene.policy.trained.items():
            parameter.data.copy_(drawn_by[name])
        facts["same after death"] = ids(again) == ids(groups)
        facts["gaps after death"] = scene.gaps(again)
        os.killpg(running._process.pid, signal.SIGKILL)
        facts["dead twice"] = refusal(lambda: scene.draw(sampler))
    finally:
        engine.close()
    return {**facts, "warnings": scene.warnings}


def served_experts(questions: Questions) -> dict[str, Any]:
    """Start, draw, sync; and what a server says of experts that it sent tokens to."""
    scene, servers, engine = _start(questions)
    try:
        facts = _synced(scene, engine, questions)
        (running,) = servers
        again = Replica(running.url, VllmServerConfig(), key=running.key)
        routed = ServerEngine([again], scene.context(record_routes=True), workers_per_replica=1)
        facts["no routes"] = refusal(lambda: scene.draw(scene.sampler(routed, record_routes=True)))
    finally:
        engine.close()
    return facts


def served_hybrid(questions: Questions) -> dict[str, Any]:
    """Start, draw, sync, with recurrent layers."""
    scene, _, engine = _start(questions)
    try:
        return _synced(scene, engine, questions)
    finally:
        engine.close()


def _start(questions: Questions) -> tuple[Scene, list[Replica], ServerEngine]:
    """A server that is asked about the samples that it takes."""
    scene = Scene(without_videos(questions))
    servers = make_replicas(scene.model, scene.arguments, VllmServerConfig(), questions.folder / "logs")
    return scene, servers, ServerEngine(servers, scene.context(), workers_per_replica=1)


def _synced(scene: Scene, engine: ServerEngine, questions: Questions) -> dict[str, Any]:
    """Sample from a server before and after it is given new weights, and ask it about a video."""
    sampler = scene.sampler(engine)
    sampler.sync(1)
    groups = scene.draw(sampler)
    facts: dict[str, Any] = {"gaps": scene.gaps(groups), "mean gap": scene.mean_gap(groups)}
    film = scene.processor.build(questions.samples["video"])
    facts["a video"] = refusal(lambda: sampler.generate([film], 1, scene.params, step=0))
    scene.learn()
    facts["gaps with old weights"] = scene.gaps(scene.draw(sampler))
    sampler.sync(2)
    groups = scene.draw(sampler)
    return {**facts, "gaps after sync": scene.gaps(groups), "mean gap after sync": scene.mean_gap(groups)}


def _engine(scene: Scene, replica: Replica) -> ServerEngine:
    return ServerEngine([replica], scene.context(), workers_per_replica=1)


class Fragile(Replica):
    """Breaks whenever it is given weights, however often it is started."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9", VllmServerConfig(), command=("true",))

    def start(self) -> None:
        self._num_starts += 1

    def wait_until_ready(self) -> None:
        pass

    def load_weights(self, weights: WeightStream, num_workers: int) -> None:
        raise ReplicaError(f"it broke {'again' if self._num_starts > 1 else 'once'}")

    def _log_tail(self) -> str:
        return "none"


class Elsewhere(BaseHTTPRequestHandler):
    """Has nothing."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _another_kind_of_server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Elsewhere) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{other.server_port}"
        other.shutdown()


@contextmanager
def _killing(server: Any) -> Iterator[None]:
    """Kill a server while it is at work."""
    timer = threading.Timer(0.1, lambda: os.killpg(server._process.pid, signal.SIGKILL))
    timer.start()
    yield
    timer.join()

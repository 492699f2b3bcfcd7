"""Scenes of vLLM servers: the tokens of an engine in process, weights through files, deaths, deadlines."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any
from urllib import request as http
from urllib.error import HTTPError

from serving import serving
from vllm_scenes import LONGEST, Questions, Scene, ids, refusal

from mmrl.config.schema import VllmServerConfig
from mmrl.rollout.engines.base import GenerationRequest
from mmrl.rollout.engines.vllm_replica import Replica, ReplicaError
from mmrl.rollout.engines.vllm_server import ServerEngine, common_max_model_len, make_replicas
from mmrl.rollout.engines.vllm_weight_transfer import send_files
from mmrl.rollout.weight_sync import PolicyWeightStream, WeightStream
from mmrl.types import Author, Rollout, Segment

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
    """A server samples, gets new weights, refuses strangers, dies, and dies again."""
    scene = Scene(questions)
    (server,) = make_replicas(scene.model, scene.arguments, VllmServerConfig(max_restarts=1), questions.folder / "logs")
    with closing(ServerEngine([server], scene.context(concurrent=True), workers_per_replica=1)) as engine:
        sampler = scene.sampler(engine)
        sampler.sync(1)
        groups = scene.draw(sampler)
        facts: dict[str, Any] = {"ids": ids(groups), "gaps": scene.gaps(groups), **scene.show_media(sampler, groups)}
        facts["logits"] = sorted(engine.logits_dtypes())
        facts |= _refusals(scene, server, engine, groups[0][0])
        scene.learn()
        facts["gaps with old weights"] = scene.gaps(scene.draw(sampler))
        # Every tensor in a file of its own: query apart from key.
        send_files(PolicyWeightStream(scene.policy), server.call_workers, file_bytes=1)
        server._reset_caches()
        facts["gaps after files"] = scene.gaps(scene.draw(sampler))
        scene.learn()
        sampler.sync(2)
        longer = replace(scene.params, max_new_tokens=60)
        groups = scene.draw(sampler, longer)
        facts["gaps after sync"] = scene.gaps(groups)
        with scene.other_weights(), _killed_at_work(server):  # the server is to get the weights that it had
            again = scene.draw(sampler, longer)
        facts |= {"same after death": ids(again) == ids(groups), "gaps after death": scene.gaps(again)}
        facts["counted"] = list(scene.activity.counts["rollout"])
        _kill(server)
        facts["dead twice"] = refusal(lambda: scene.draw(sampler))
    return {**facts, "warnings": scene.warnings}


def _refusals(scene: Scene, server: Replica, engine: ServerEngine, rollout: Rollout) -> dict[str, Any]:
    slow = _connect(scene, _client(server, timeout_s=0.005))
    fragile = ServerEngine([Fragile()], replace(scene.context(), warn=lambda text: None), workers_per_replica=1)
    token_ids = rollout.prompt.token_ids[:1] * LONGEST
    text = Segment(token_ids=token_ids, logprobs=(0.0,) * LONGEST, author=Author.ENVIRONMENT)
    too_long = GenerationRequest(rollout=replace(rollout, segments=(text,)), seed=0, sample_seeds=(0,))
    nobody = Replica("http://127.0.0.1:9", VllmServerConfig(timeout_s=0.5))
    facts: dict[str, Any] = {
        "too slow": refusal(lambda: scene.draw(scene.sampler(slow))),
        "without the key": {path: _status(server.url, path) for path in ROUTES},
        "with another key": {path: _status(server.url, path, "other") for path in ROUTES},
        "with the key": {path: _status(server.url, path, server.key) for path in ("health", "v1/models")},
        "key in ps": server.key in " ".join(server._command),
        "a run without the key": refusal(lambda: _connect(scene, Replica(server.url, VllmServerConfig()))),
        "nobody there": refusal(lambda: _connect(scene, nobody)),
        "failed at new weights": refusal(lambda: fragile.load_weights(PolicyWeightStream(scene.policy))),
        "refused": refusal(lambda: engine.generate([too_long], scene.params)),
    }
    with serving(lambda handler: handler.send_error(404)) as url:
        facts["no vLLM"] = refusal(lambda: common_max_model_len([url], VllmServerConfig(timeout_s=5.0)))
    return facts


def served_experts(questions: Questions) -> dict[str, Any]:
    """A server with experts samples and gets new weights; it was not started to return routes."""
    with _pictures_only(questions) as (scene, server, engine):
        facts = _synced(scene, engine, questions)
        context = scene.context(record_routes=True)
        routed = ServerEngine([_client(server)], context, workers_per_replica=1)
        facts["no routes"] = refusal(lambda: scene.draw(scene.sampler(routed, record_routes=True)))
    return facts


def served_hybrid(questions: Questions) -> dict[str, Any]:
    """A server with recurrent layers samples and gets new weights."""
    with _pictures_only(questions) as (scene, _, engine):
        return _synced(scene, engine, questions)


@contextmanager
def _pictures_only(questions: Questions) -> Iterator[tuple[Scene, Replica, ServerEngine]]:
    """A server that is asked about the samples it takes, in a family with words between the frames of a video."""
    samples = {name: sample for name, sample in questions.samples.items() if "video" not in name}
    scene = Scene(replace(questions, samples=samples))
    (server,) = make_replicas(scene.model, scene.arguments, VllmServerConfig(), questions.folder / "logs")
    with closing(_connect(scene, server)) as engine:
        yield scene, server, engine


def _synced(scene: Scene, engine: ServerEngine, questions: Questions) -> dict[str, Any]:
    """Sample before and after new weights, and ask about a video."""
    sampler = scene.sampler(engine)
    sampler.sync(1)
    groups = scene.draw(sampler)
    facts: dict[str, Any] = {"gaps": scene.gaps(groups), "mean gap": scene.mean_gap(groups)}
    video = scene.processor.build(questions.samples["video"])
    facts["a video"] = refusal(lambda: sampler.generate([video], 1, scene.params, step=0))
    scene.learn()
    facts["gaps with old weights"] = scene.gaps(scene.draw(sampler))
    sampler.sync(2)
    groups = scene.draw(sampler)
    return {**facts, "gaps after sync": scene.gaps(groups), "mean gap after sync": scene.mean_gap(groups)}


def _connect(scene: Scene, replica: Replica) -> ServerEngine:
    return ServerEngine([replica], scene.context(), workers_per_replica=1)


def _client(server: Replica, **options: Any) -> Replica:
    """Another client of a running server."""
    client = Replica(server.url, VllmServerConfig(**options))
    client.key = server.key
    return client


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


def _kill(server: Replica) -> None:
    assert server._process is not None
    os.killpg(server._process.pid, signal.SIGKILL)


@contextmanager
def _killed_at_work(server: Replica) -> Iterator[None]:
    timer = threading.Timer(0.1, _kill, [server])
    timer.start()
    yield
    timer.join()

"""Puts a real engine through its paces in a process of its own: usage `engine_worker.py SCENE QUESTIONS FACTS`.

SCENE is a function below; what it finds out goes to FACTS as JSON, for tests to judge.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmrl.batch import by_prompt, collate
from mmrl.checkpoint import export_hf
from mmrl.config.schema import Lora, Scratch, Server, Vllm
from mmrl.policy.adapters import Adapter
from mmrl.policy.processor import QwenProcessor
from mmrl.policy.qwen_vl import Policy
from mmrl.policy.scratch import make_model
from mmrl.ranks import Alone
from mmrl.rollout.engine import Engine, EngineSampler, Publisher, Request
from mmrl.rollout.shared import FedByFirst
from mmrl.rollout.vllm_options import engine_arguments
from mmrl.rollout.weights import PolicyWeights
from mmrl.types import Experience, Finish, Rollout, Sample, SamplingLaw, UserError

STEP, SIBLINGS = 3, 3


@dataclass(frozen=True, kw_only=True)
class Questions:
    """A tiny world, its samples by name, and a folder to work in."""

    spec: Scratch
    processor: QwenProcessor
    samples: dict[str, Sample]
    law: SamplingLaw
    folder: Path


class Scene:
    """A policy and what an engine draws beside it."""

    def __init__(self, questions: Questions, *, lora: Lora | None = None) -> None:
        model = make_model(questions.spec, questions.processor.tokenizer, seed=1)
        export_hf(questions.folder / "model", model, questions.processor.hf)
        self.adapter = Adapter(model, lora, seed=2) if lora else None
        self.cuda = torch.cuda.is_available()
        self.policy = Policy(model.to("cuda") if self.cuda else model)
        self.processor, self.law, self.folder = questions.processor, questions.law, questions.folder
        self.prompts = {name: self.processor.ask(sample) for name, sample in questions.samples.items()}
        self.arguments = engine_arguments(
            Vllm(gpu_memory=0.2, cache_mib=64, max_sequences=64),
            dtype="float32",
            longest=1024,
            cuda=self.cuda,
            lora=lora,
        )

    @property
    def model(self) -> str:
        return str(self.folder / "model")

    def sampler(self, engine: Engine, push: Callable[[Engine], None] | None = None) -> EngineSampler:
        weights = PolicyWeights(self.policy)
        return EngineSampler(Publisher(engine, push or (lambda e: e.load(weights))), self.processor, salt=("test",))

    def draw(self, sampler: EngineSampler, law: SamplingLaw | None = None, step: int = STEP) -> list[list[Rollout]]:
        return sampler.generate(list(self.prompts.values()), SIBLINGS, law or self.law, step=step)

    def gaps(self, groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
        """Largest |engine - learner|, nats, by prompt."""
        return {name: self.gap(group) for name, group in zip(self.prompts, groups, strict=True)}

    @torch.no_grad()
    def gap(self, rollouts: Sequence[Rollout]) -> float:
        experiences = [Experience(rollout=rollout, advantage=0.0) for rollout in rollouts]
        batch = collate(by_prompt(experiences), self.processor, pad_id=self.processor.tokenizer.eos_token_id)
        batch = batch.to(self.policy.device)
        sampled = [logp for rollout in rollouts for segment in rollout.segments for logp in segment.logps]
        return float((self.policy.score(batch).logps_N.cpu() - torch.tensor(sampled)).abs().max())

    @torch.no_grad()
    def learn(self) -> None:
        """Another policy: every weight that is trained moves by about 0.05."""
        generator = torch.Generator().manual_seed(5)
        for parameter in self.policy.learned.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter))


def ids(groups: Sequence[Sequence[Rollout]]) -> list[list[list[int]]]:
    return [[[token for segment in r.segments for token in segment.ids] for r in group] for group in groups]


def refusal(act: Callable[[], Any]) -> str:
    """What a UserError says, or that there was none."""
    try:
        act()
    except (UserError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def in_process(questions: Questions) -> dict[str, Any]:
    """Start, draw, go on, sync."""
    from mmrl.rollout.vllm import VllmEngine

    scene = Scene(questions)
    before = _disturbable()
    engine = VllmEngine(scene.model, scene.processor, scene.arguments, cuda=scene.cuda)
    facts: dict[str, Any] = {"disturbed": [name for name, was in before.items() if _disturbable()[name] != was]}
    facts["second engine"] = refusal(lambda: VllmEngine(scene.model, scene.processor, scene.arguments, cuda=scene.cuda))
    sampler = scene.sampler(engine)
    sampler.sync(1)
    groups = scene.draw(sampler)
    facts["read ids"] = ids(groups)
    facts["gaps"] = scene.gaps(groups)
    facts |= _seeds(scene, sampler, groups) | _continuation(scene, sampler, groups) | _ends(scene, sampler, groups)
    scene.learn()
    facts["gaps with old weights"] = scene.gaps(scene.draw(sampler))
    awake = _memory()
    engine.rest()
    facts["given back while resting"] = awake - _memory()
    sampler.sync(2)
    groups = scene.draw(sampler)
    facts["gaps after sync"] = scene.gaps(groups)
    facts["version"] = groups[0][0].segments[0].version
    language = questions.spec.language.model_copy(update={"width": 96, "heads": 3, "kv_heads": 3})
    other = make_model(questions.spec.model_copy(update={"language": language}), scene.processor.tokenizer, seed=1)
    facts["another model"] = refusal(lambda: engine.load(PolicyWeights(Policy(other))))
    facts["gaps after refusal"] = scene.gaps(scene.draw(sampler))
    engine.close()
    return facts


def _disturbable() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads.__module__ + torch.set_num_threads.__name__,
        "torch": hash(torch.get_rng_state().numpy().tobytes()),
        "random": hash(random.getstate()),
        "numpy": hash(np.random.get_state()[1].tobytes()),
    }


def _memory() -> int:
    return (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0


def _seeds(scene: Scene, sampler: EngineSampler, groups: list[list[Rollout]]) -> dict[str, Any]:
    alone = [sampler.generate([prompt], SIBLINGS, scene.law, step=STEP)[0] for prompt in scene.prompts.values()]
    return {
        "alone": ids(alone) == ids(groups),
        "again": ids(scene.draw(sampler)) == ids(groups),
        "another step": ids(scene.draw(sampler, step=STEP + 1)) == ids(groups),
        "distinct siblings": min(len({tuple(row) for row in group}) for group in ids(groups)),
        "banned": sorted(set(scene.law.banned) & {token for group in ids(groups) for row in group for token in row}),
    }


def _continuation(scene: Scene, sampler: EngineSampler, groups: list[list[Rollout]]) -> dict[str, Any]:
    """Greedily, 4 tokens and 8 more are the same as 12."""
    greedy = [replace(scene.law, temperature=0.0, max_new_tokens=count) for count in (12, 4, 8)]
    prompts = list(scene.prompts.values())
    whole, start = (sampler.generate(prompts, 1, law, step=STEP) for law in greedy[:2])
    longer = sampler.extend([rollout for (rollout,) in start], greedy[2], step=STEP)
    drawn = sampler.extend([group[0] for group in groups], scene.law, step=STEP)
    return {
        "greedy": ids([[rollout] for rollout in longer]) == ids(whole),
        "segments": [len(rollout.segments) for rollout in longer],
        "gaps of continuation": scene.gaps([[rollout] for rollout in drawn]),
        "extended again": ids([sampler.extend([group[0]], scene.law, step=STEP) for group in groups])
        == ids([[rollout] for rollout in drawn]),
    }


def _ends(scene: Scene, sampler: EngineSampler, groups: list[list[Rollout]]) -> dict[str, Any]:
    eos = scene.processor.tokenizer.eos_token_id
    long = [r for group in scene.draw(sampler, replace(scene.law, max_new_tokens=200)) for r in group]
    ended = [r for r in long if r.finish is Finish.EOS]
    draft = next(r for group in groups for r in group if r.text.strip())
    mark = draft.text.strip()[-1]
    (stopped,) = sampler.generate([draft.prompt], SIBLINGS, replace(scene.law, stop=(mark,)), step=STEP)
    again = stopped[draft.index]
    return {
        "ended": len(ended),
        "eos is last": all(ids([[r]])[0][0].index(eos) == r.num_tokens - 1 for r in ended),
        "eos elsewhere": any(eos in ids([[r]])[0][0] for r in long if r not in ended),
        "stopped by": again.finish,
        "stop string at the end": mark in scene.processor.decode([again.segments[0].ids[-1]]),
        "stop string before": mark in scene.processor.decode(again.segments[0].ids[:-1]),
        "as without": again.segments[0].ids == draft.segments[0].ids[: again.num_tokens],
    }


def adapted(questions: Questions) -> dict[str, Any]:
    """An adapter alone goes to the engine, twice."""
    from mmrl.rollout.vllm import VllmEngine

    scene = Scene(questions, lora=Lora(rank=4, alpha=8, rslora=True))
    assert scene.adapter is not None
    engine = VllmEngine(scene.model, scene.processor, scene.arguments, cuda=scene.cuda)
    adapter, folder = scene.adapter, questions.folder / "adapter"

    def push(engine: Engine) -> None:
        export_hf(folder, adapter)
        engine.load_adapter(folder)

    sampler = scene.sampler(engine, push)
    facts: dict[str, Any] = {}
    for version in (1, 2):
        scene.learn()
        facts[f"gaps before {version}"] = scene.gaps(scene.draw(sampler))
        sampler.sync(version)
        facts[f"gaps after {version}"] = scene.gaps(scene.draw(sampler))
    engine.close()
    return facts


def served(questions: Questions) -> dict[str, Any]:
    """A server of vLLM's: the same tokens as in process, weights through files, deaths, deadlines."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from mmrl.rollout.vllm_server import Replica, ServerEngine, _Client, replicas
    from mmrl.rollout.vllm_transfer import FileSend, Recorded

    scene = Scene(questions)
    options = Server(restarts=1)
    servers = replicas(scene.model, scene.arguments, options, questions.folder / "logs")
    engine = ServerEngine(servers, scene.processor, spread=1)
    try:
        sampler = scene.sampler(FedByFirst(engine, Alone()))  # as where steps overlap
        sampler.sync(1)
        groups = scene.draw(sampler)
        facts: dict[str, Any] = {"read ids": ids(groups), "gaps": scene.gaps(groups)}
        (running,) = servers
        slow = ServerEngine([Replica(running.url, Server(deadline_s=0.005))], scene.processor, spread=1)
        facts["too slow"] = refusal(lambda: scene.draw(scene.sampler(slow)))
        nobody = Replica("http://127.0.0.1:9", Server(deadline_s=0.5))
        facts["nobody there"] = refusal(lambda: ServerEngine([nobody], scene.processor, spread=1))
        text = scene.prompts["text-only"]
        overlong = Request(prompt=text, tail=text.ids * 60, times=1, seed=0, law=scene.law)
        facts["too long"] = refusal(lambda: engine.draw([overlong]))
        scene.learn()
        facts["gaps with old weights"] = scene.gaps(scene.draw(sampler))
        sender = WeightTransferTrainerFactory.trainer_init(
            FileSend(rank=0, piece_bytes=1), client=_Client(running.ask), source=Recorded(PolicyWeights(scene.policy))
        )
        sender.send_weights()  # every tensor in a piece of its own: query apart from key
        running._forget()
        facts["gaps after pieces"] = scene.gaps(scene.draw(sampler))
        scene.learn()
        sampler.sync(2)
        groups = scene.draw(sampler, replace(scene.law, max_new_tokens=60))
        facts["gaps after sync"] = scene.gaps(groups)
        drawn_by = {name: parameter.detach().clone() for name, parameter in scene.policy.learned.items()}
        scene.learn()  # goes on while rollouts are drawn: the server is to get what it had
        with _killing(running):
            again = scene.draw(sampler, replace(scene.law, max_new_tokens=60))
        for name, parameter in scene.policy.learned.items():
            parameter.data.copy_(drawn_by[name])
        facts["same after death"] = ids(again) == ids(groups)
        facts["gaps after death"] = scene.gaps(again)
        os.killpg(running._process.pid, signal.SIGKILL)
        facts["dead twice"] = refusal(lambda: scene.draw(sampler))
    finally:
        engine.close()
    return facts


@contextmanager
def _killing(server: Any) -> Iterator[None]:
    """Kill a server while it is at work."""
    timer = threading.Timer(0.1, lambda: os.killpg(server._process.pid, signal.SIGKILL))
    timer.start()
    yield
    timer.join()


def main() -> None:
    with Path(sys.argv[2]).open("rb") as file:
        questions: Questions = pickle.load(file)
    scene = {"in_process": in_process, "adapted": adapted, "served": served}[sys.argv[1]]
    facts = scene(questions)
    Path(sys.argv[3]).write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main()

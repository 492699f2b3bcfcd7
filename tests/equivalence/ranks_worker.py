"""One of several processes that learn together: usage `ranks_worker.py LESSONS ANSWERS`, with a launcher's variables.

Takes the same steps with every engine and leaves what came of each: metrics, weights, the optimizer's state.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch

from mmrl.config.schema import Deepspeed, Kl, Lora, Loss, Optimizer, Processes
from mmrl.distributed.ranks import Homes, Ranks
from mmrl.distributed.torch_ranks import joined
from mmrl.learner import engine_deepspeed
from mmrl.learner.engine_deepspeed import DeepspeedEngine, Sharded
from mmrl.learner.engine_torch import TorchEngine
from mmrl.learner.learner import GrpoLearner, LearnPlan
from mmrl.learner.shared_prefix_check import difference
from mmrl.policy.batch import by_prompt, collate
from mmrl.policy.components import recompute_activations
from mmrl.policy.lora import adapter_of, is_adapted
from mmrl.policy.processor import QwenProcessor
from mmrl.policy.qwen_vl import Policy
from mmrl.policy.shared_prefix_attention import install
from mmrl.rollout.engines.shared_server import FedByFirst
from mmrl.rollout.weight_sync import PolicyWeights, Weights
from mmrl.types import Experience, UserError

CHUNK_ELEMENTS = 3000
OPTIMIZER = Optimizer(lr=1e-3, lr_by_role={"vision": 5e-4}, weight_decay=0.1, decayed="matrices", max_grad_norm=0.5)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An engine, None for plain torch, and what it is given in each step."""

    deepspeed: Deepspeed | None
    steps: tuple[list[Experience], ...]
    homes: dict[str, int] = field(default_factory=dict)
    kl: float = 0.0
    resume_after: int | None = None
    dtype: torch.dtype = torch.float32
    shared_prefix: bool = True
    recomputes: bool = False
    mini_batches: int = 1
    feeds: bool = False
    lora: Lora | None = None


@dataclass
class Fed:
    """An engine that keeps a copy of the weights it is given, or breaks a pass off, and notes how many were whole."""

    policy: Policy
    breaks_off: bool = False
    held: dict[str, torch.Tensor] = field(default_factory=dict)
    most_whole: int = 0

    def load(self, weights: Weights) -> None:
        names = {shape.name for shape in weights.shapes()}
        assert names >= self.policy.learned.keys() or is_adapted(self.policy.model)
        self.held.clear()
        for name, tensor in weights:
            self.held[name] = tensor.detach().clone()
            self.most_whole = max(self.most_whole, sum(p.numel() for p in self.policy.model.parameters()))
            if self.breaks_off and len(self.held) == 5:
                raise UserError("it takes no more")


@dataclass(frozen=True, kw_only=True)
class Lessons:
    """A world, and trials by name."""

    policy: Policy
    processor: QwenProcessor
    eos_id: int
    trials: dict[str, Trial]


def learn(lessons: Lessons, trial: Trial, ranks: Ranks) -> dict[str, Any]:
    """Take a trial's steps; half-way, if so wanted, all goes on in a new model and engine."""
    policy, engine, sharded = start(lessons, trial, ranks)
    reference = policy.frozen_copy() if trial.kl else None
    metrics = []
    groups = by_prompt(trial.steps[0])[:1]
    packed, plain = (
        collate(groups, lessons.processor, pad_id=lessons.eos_id, shared_prefix=shared) for shared in (True, False)
    )
    stretched = replace(plain, positions_3BL=2 * plain.positions_3BL)
    apart = [tuple(difference(policy, packed, other, ranks)) for other in (plain, stretched)]
    weights, engine_fed = PolicyWeights(policy), Fed(policy)
    feeder = FedByFirst(engine_fed, ranks)
    if trial.feeds:
        feeder.load(weights)  # what it is given now is not what it must have in the end
    for step, experiences in enumerate(trial.steps):
        if step == trial.resume_after:
            saved, state = copy.deepcopy(everything(policy, engine, ranks))
            policy, engine, sharded = start(lessons, trial, ranks, saved)
            engine.load_state(state)
        plan = LearnPlan(
            loss=Loss(kl=Kl(coef=trial.kl)),
            optimizer=OPTIMIZER,
            total_steps=9,
            micro_batch=2,
            token_budget=200,
            epochs=1,
            mini_batches=trial.mini_batches,
            shared_prefix=trial.shared_prefix,
            pad_id=lessons.eos_id,
        )
        learner = GrpoLearner(policy, lessons.processor, engine, plan, reference, ranks=ranks, homes=Homes(trial.homes))
        metrics.append(dict(learner.learn(experiences, step=step)))
    parts = ranks.gather(sum(tensor.numel() for tensor in policy.collected(ranks).values()))
    kept, state = everything(policy, engine, ranks)
    result = {"apart": apart, "metrics": metrics, "weights": kept, "state": state, "parts": parts}
    if trial.feeds:
        result |= {"refused": fed_once_more(feeder, engine_fed, weights), "most_whole": engine_fed.most_whole}
        result["fed"] = engine_fed.held
    if sharded:
        sharded.dissolve(policy)
        result["dissolved"] = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    return result


def everything(policy: Policy, engine, ranks: Ranks):
    """Weights and the engine's tables, from the parts of all ranks."""
    weights, tables = {}, {}
    for part, state in ranks.gather((policy.collected(ranks), engine.state())):
        assert not part.keys() & weights.keys()
        weights |= part
        for table, kept in state.items():
            tables.setdefault(table, {}).update(kept)
    return weights, tables


def fed_once_more(feeder: FedByFirst, engine: Fed, weights: Weights) -> str:
    """Feed an engine that breaks off, and then takes all; what it said."""
    engine.breaks_off, said = True, ""
    try:
        feeder.load(weights)
    except UserError as error:
        said = str(error)
    engine.breaks_off = False
    feeder.load(weights)
    return said


def start(lessons: Lessons, trial: Trial, ranks: Ranks, weights: dict[str, torch.Tensor] | None = None):
    """A fresh copy of the policy with its engine."""
    policy = copy.deepcopy(lessons.policy)
    if adapter_of(policy.model, trial.lora, seed=0):
        policy = Policy(policy.model)
    policy.model.to(trial.dtype)
    recompute_activations(policy.model, ("vision", "language") if trial.recomputes else ())
    install(policy.model)  # this process has not heard of it
    for name, tensor in (weights or {}).items():
        policy.learned[name].data.copy_(tensor)
    if trial.deepspeed is None:
        return policy, TorchEngine(policy.trainable, OPTIMIZER, ranks), None
    with watched() as moved:
        sharded = Sharded(policy, trial.deepspeed, ranks)
    assert moved == [0] if trial.deepspeed.zero == 3 else moved > [0]
    return policy, DeepspeedEngine(sharded, OPTIMIZER), sharded


@contextmanager
def watched() -> Iterator[list[int]]:
    """How many elements of weights DeepSpeed finds that are not divided: it moves all of them to the device at once."""
    found, initialize = [], deepspeed.initialize

    def look(*, model: torch.nn.Module, **options: object) -> object:
        found.append(sum(parameter.numel() for parameter in model.parameters()))
        return initialize(model=model, **options)

    deepspeed.initialize = look
    try:
        yield found
    finally:
        deepspeed.initialize = initialize


def main() -> None:
    lessons: Lessons = pickle.loads(Path(sys.argv[1]).read_bytes())
    torch.set_num_threads(1)
    engine_deepspeed._CHUNK_ELEMENTS = CHUNK_ELEMENTS
    with joined(Processes(heartbeat_s=20, timeout_s=60)) as ranks:
        answers = {}
        for name, trial in lessons.trials.items():
            print(ranks.rank, name, flush=True)
            answers[name] = learn(lessons, trial, ranks)
        if ranks.rank == 0:
            torch.save(answers, sys.argv[2])


if __name__ == "__main__":
    main()

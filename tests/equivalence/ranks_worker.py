"""One of several processes that train together: usage `ranks_worker.py TRIALS RESULTS`, with a launcher's variables.

Takes the same steps with every optimizer and leaves what came of each: metrics, weights, the optimizer's state.
"""

import copy
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mmrl.config.schema import DeepspeedConfig, KlConfig, LoraConfig, LossConfig, OptimizerConfig
from mmrl.distributed.ranks import Ranks
from mmrl.distributed.torch_ranks import join_ranks
from mmrl.learner.learner import LearnerConfig, PolicyLearner
from mmrl.learner.optimizer_torch import TorchOptimizer
from mmrl.learner.shared_prefix_check import compare_layouts
from mmrl.policy.batch import collate, group_by_prompt
from mmrl.policy.build import enable_gradient_checkpointing
from mmrl.policy.lora import create_adapter, has_adapter
from mmrl.policy.policy import PolicyModel
from mmrl.policy.processor import PromptProcessor
from mmrl.policy.shared_prefix_attention import install_shared_prefix_attention
from mmrl.rollout.weight_sync import PolicyWeightStream, ShardedWeightStream, WeightStream
from mmrl.types import Experience, UserError
from mmrl.utils.activity import Activity

CHUNK_ELEMENTS = 3000
# Every step has a rate of its own, and the decay is strong enough that weights which lose it on resume are seen.
OPTIMIZER = OptimizerConfig(
    lr=1.5e-3,
    lr_by_component={"vision": 7.5e-4},
    warmup_steps=2,
    lr_schedule="cosine",
    weight_decay=1.0,
    weight_decay_on="matrices",
    max_grad_norm=0.5,
)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An optimizer, None for plain torch, and what it is given in each step."""

    deepspeed: DeepspeedConfig | None
    steps: tuple[list[Experience], ...]
    media_placement: dict[str, int] = field(default_factory=dict)
    kl: float = 0.0
    resume_after: int | None = None
    dtype: torch.dtype = torch.float32
    shared_prefix: bool = True
    recomputes: bool = False
    num_mini_batches: int = 1
    old_logprobs: str = "recorded"
    routing_replay: str = "none"
    float32_output_layer: bool = False
    feeds: bool = False
    compares_layouts: bool = False
    lora: LoraConfig | None = None


@dataclass
class Fed:
    """An engine that keeps a copy of the weights it is given, or breaks a pass off, and notes how many were whole."""

    policy: PolicyModel
    breaks_off: bool = False
    held: dict[str, torch.Tensor] = field(default_factory=dict)
    most_whole: int = 0

    def load_weights(self, weights: WeightStream) -> None:
        names = {shape.name for shape in weights.specs()}
        if not has_adapter(self.policy.model):
            assert names >= {name for name, _ in for_engines(self.policy, self.policy.trainable)}
        self.held.clear()
        for name, tensor in weights:
            self.held[name] = tensor.detach().clone()
            self.most_whole = max(self.most_whole, sum(p.numel() for p in self.policy.model.parameters()))
            if self.breaks_off and len(self.held) == 5:
                raise UserError("it takes no more")


@dataclass(frozen=True, kw_only=True)
class TrialSet:
    """A policy with its processor, and trials by name."""

    policy: PolicyModel
    processor: PromptProcessor
    eos_id: int
    trials: dict[str, Trial]


def run_trial(trial_set: TrialSet, trial: Trial, ranks: Ranks) -> dict[str, Any]:
    """Take a trial's steps, after `resume_after` of them in a new model and optimizer; return what came of it."""
    policy, optimizer, sharded = start(trial_set, trial, ranks)
    reference = policy.frozen_copy() if trial.kl else None
    metrics, result = [], {}
    if trial.compares_layouts:
        groups = group_by_prompt(trial.steps[0])[:1]
        packed, plain = (
            collate(groups, trial_set.processor, pad_id=trial_set.eos_id, shared_prefix=shared)
            for shared in (True, False)
        )
        stretched = replace(plain, position_ids_3BL=2 * plain.position_ids_3BL)
        result["apart"] = [tuple(compare_layouts(policy, packed, other, ranks)) for other in (plain, stretched)]
    learner = make_learner(trial_set, trial, policy, optimizer, reference, ranks)
    engine_fed, feeder = Fed(policy), ShardedWeightStream(PolicyWeightStream(policy), ranks)
    if trial.feeds:
        before = count_hooks(policy)
        with suppress(UserError), policy.runner.gather_all():
            raise UserError("broken off")
        result["hooks"] = (before, count_hooks(policy))
        feeder.load_on_rank0(engine_fed.load_weights)  # what it is given now is not what it must have in the end
    for step, experiences in enumerate(trial.steps):
        if step == trial.resume_after:
            saved, state = copy.deepcopy(everything(policy, optimizer, ranks))
            policy, optimizer, sharded = start(trial_set, trial, ranks, saved)
            optimizer.load_state(state)
            learner = make_learner(trial_set, trial, policy, optimizer, reference, ranks)
            engine_fed, feeder = Fed(policy), ShardedWeightStream(PolicyWeightStream(policy), ranks)
        metrics.append(dict(learner.step(experiences, step=step)))
    shard = policy.runner.local_shard(policy.trainable, ranks)
    parts = ranks.all_gather(sum(tensor.numel() for tensor in shard.values()))
    kept, state = everything(policy, optimizer, ranks)
    result |= {"metrics": metrics, "weights": kept, "state": state, "parts": parts}
    if trial.feeds:
        result |= {"refused": fed_once_more(feeder, engine_fed), "most_whole": engine_fed.most_whole}
        result["fed"] = engine_fed.held
    if sharded:
        sharded.unwrap(policy)
        result["dissolved"] = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    return result


def count_hooks(policy: PolicyModel) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in policy.model.modules())


def make_learner(
    trial_set: TrialSet, trial: Trial, policy: PolicyModel, optimizer: Any, reference: PolicyModel | None, ranks: Ranks
) -> PolicyLearner:
    loss = LossConfig(kl=KlConfig(coef=trial.kl), old_logprobs=trial.old_logprobs, routing_replay=trial.routing_replay)
    plan = LearnerConfig(
        loss=loss,
        optimizer=OPTIMIZER,
        total_steps=9,
        micro_batch_groups=2,
        micro_batch_tokens=200,
        ppo_epochs=1,
        num_mini_batches=trial.num_mini_batches,
        shared_prefix=trial.shared_prefix,
        pad_id=trial_set.eos_id,
    )
    ranks.media_ranks = dict(trial.media_placement)
    return PolicyLearner(policy, trial_set.processor, optimizer, plan, reference, ranks=ranks, activity=Activity())


def for_engines(policy: PolicyModel, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights as engines take them: the experts of a layer one by one, if they are not sharded."""
    for name, tensor in weights.items():
        yield from policy.family.iter_engine_weights(name, tensor)


def everything(policy: PolicyModel, optimizer, ranks: Ranks):
    """Weights and the optimizer's tables, from the parts of all ranks."""
    weights, tables = {}, {}
    for part, state in ranks.all_gather((policy.runner.local_shard(policy.trainable, ranks), optimizer.state())):
        assert not part.keys() & weights.keys()
        weights |= part
        for table, kept in state.items():
            tables.setdefault(table, {}).update(kept)
    return weights, tables


def fed_once_more(feeder: ShardedWeightStream, engine: Fed) -> str:
    """Feed an engine that breaks off, and then takes all; what it said."""
    engine.breaks_off, said = True, ""
    try:
        feeder.load_on_rank0(engine.load_weights)
    except UserError as error:
        said = str(error)
    engine.breaks_off = False
    feeder.load_on_rank0(engine.load_weights)
    return said


def start(trial_set: TrialSet, trial: Trial, ranks: Ranks, weights: dict[str, torch.Tensor] | None = None):
    """A fresh copy of the policy with its optimizer."""
    policy = copy.deepcopy(trial_set.policy)
    if create_adapter(policy.model, trial.lora, 0, policy.family) or trial.float32_output_layer:
        policy = PolicyModel(policy.model, float32_output_layer=trial.float32_output_layer)
    policy.model.to(trial.dtype)
    enable_gradient_checkpointing(policy.model, ("vision", "language") if trial.recomputes else (), policy.family)
    install_shared_prefix_attention(policy.model)  # this process has not heard of it
    policy.family.prepare(policy.model)  # pickled without the forward methods of its layers
    for name, tensor in (weights or {}).items():
        policy.trainable[name].data.copy_(tensor)
    if trial.deepspeed is None:
        return policy, TorchOptimizer(policy.trained_by_component, OPTIMIZER, ranks), None
    # Imported here: without DeepSpeed, the tests that import this file are skipped one by one.
    from mmrl.learner import optimizer_deepspeed

    optimizer_deepspeed._CHUNK_ELEMENTS = CHUNK_ELEMENTS
    with watched() as moved:
        sharded = optimizer_deepspeed.DeepspeedModel(policy, trial.deepspeed, ranks)
    assert moved == [0] if trial.deepspeed.zero_stage == 3 else moved > [0]
    return policy, optimizer_deepspeed.DeepspeedOptimizer(sharded, OPTIMIZER), sharded


@contextmanager
def watched() -> Iterator[list[int]]:
    """How many elements of weights DeepSpeed finds that are not divided: it moves all of them to the device at once."""
    import deepspeed

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
    trial_sets: list[TrialSet] = pickle.loads(Path(sys.argv[1]).read_bytes())
    torch.set_num_threads(1)
    with join_ranks(timeout_s=60) as ranks:
        results = {}
        for trial_set in trial_sets:
            for name, trial in trial_set.trials.items():
                print(ranks.rank, name, flush=True)
                results[name] = run_trial(trial_set, trial, ranks)
        if ranks.rank == 0:
            torch.save(results, sys.argv[2])


if __name__ == "__main__":
    main()

"""What is done: imitation and reinforcement, stage by stage."""

from __future__ import annotations

from math import ceil
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from mmrl.config.schema.base import Count, Decay, Fraction, Positive, Role, Strict, When, Word, holds
from mmrl.config.schema.data_order import Curriculum, Order, Priority, Shuffled
from mmrl.config.schema.group_filter import Filter
from mmrl.config.schema.health import Health
from mmrl.config.schema.objective import Advantage, Loss, Reference
from mmrl.config.schema.presets import PRESETS, Algorithm, refuse_gaps
from mmrl.config.schema.replay import Replay
from mmrl.config.schema.rollout_steps import ONCE, Generate, Steps, UseTools, check_order, check_room
from mmrl.types import Sample

Rate = Annotated[float, Field(gt=0.0)]


class Sampling(Strict):
    """The law that rollouts are drawn from."""

    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """0 is greedy; allowed in evaluation only."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus mass."""
    top_k: Count = 0
    """Keep only the k likeliest tokens; 0 keeps all."""
    max_new_tokens: Positive = 512
    """A rollout that reaches this many tokens is cut and counted as truncated."""


class RoleRates(Strict):
    """Peak learning rates of parts of the model; the stage's `lr` where there is none."""

    vision: Rate | None = None
    """Of the vision tower."""
    projector: Rate | None = None
    """Of the projector."""
    language: Rate | None = None
    """Of the language model."""


class Optimizer(Strict):
    """AdamW with warm-up and decay."""

    lr: Rate = 1e-6
    """Peak learning rate."""
    lr_by_role: RoleRates = RoleRates()
    """Peak learning rates of parts of the model; warm-up and decay are the same for all."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the moment estimates."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay."""
    decayed: Literal["all", "matrices"] = "all"
    """What decays: every parameter, or all but biases, norms and other vectors."""
    warmup_steps: Count = 0
    """Linear rise from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Fall from the peak to `final_lr_frac` over the steps after warm-up."""
    final_lr_frac: Fraction = 0.0
    """Share of the peak rate left at the last step."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Global gradient norm above which gradients are scaled down."""

    def rate(self, role: Role) -> float:
        """Peak learning rate of a part of the model."""
        own: float | None = getattr(self.lr_by_role, role)
        return self.lr if own is None else own


class Validation(Strict):
    """Looks at the validation sources during a stage; a stage may end by what they show rather than by its steps."""

    every: Positive = 50
    """Steps between looks."""
    until: float | None = None
    """Mean reward, averaged over tasks, that ends the stage."""
    until_each: float | None = None
    """What every task's reward must also reach to end it, when set."""

    @model_validator(mode="after")
    def _each_adds_to_a_goal(self) -> Validation:
        if self.until_each is not None and self.until is None:
            raise ValueError("`until_each` adds a condition to `until`: set that too")
        return self


class Stage(Strict):
    """What every stage that trains has."""

    name: Word
    """Name in metrics, file names and on the console; unique in the run."""
    steps: Positive
    """Optimizer steps at most."""
    source: Word | None = None
    """An earlier `select` stage whose samples are trained on; those of `data.train` when left out."""
    when: When = Field(default_factory=dict)
    """Those of them that are taken, all when empty: allowed values of `task` or of a column of the sample's `meta`."""
    repeat_to: Positive | None = None
    """Samples are repeated, each time under an id and with random numbers of its own, until there are so many
    (one-example RLVR)."""
    order: Order = Shuffled(kind="shuffled")
    """The order in which samples come."""
    optimizer: Optimizer = Optimizer()
    """A stage starts with a fresh optimizer."""
    micro_batch: Positive = 8
    """Sequences (sft) or groups (rl) per forward pass, at most; the gradient does not depend on it."""
    token_budget: Positive = 16384
    """Tokens per forward pass, at most: a larger group is split, and its prompt repeated. A sequence that is longer
    alone goes alone. The gradient does not depend on it."""
    validation: Validation | None = None
    """Looks at held-out reward, and an early end by it; needs `data.validation`."""
    shared_prefix: Literal["auto", "on", "off"] = "auto"
    """Pack sequences into one row without padding, and in an rl stage encode media and prompt once per group; the
    gradient is the same without, and the first ones are computed both ways to make sure. `auto` does so wherever
    `model.attention` is not `eager`."""
    max_bad_steps: Positive = 5
    """A step whose gradient is not finite changes no weight; this many in a row end the run, their samples kept."""

    def takes(self, sample: Sample) -> bool:
        """Whether the stage trains on a sample of its source."""
        return holds(self.when, sample)

    @property
    def goes_by_rewards(self) -> bool:
        """Whether the order of samples depends on how earlier ones fared."""
        phases = self.order.phases if isinstance(self.order, Curriculum) else ()
        return isinstance(self.order, Priority) or any(phase.plateau for phase in phases)


class Sft(Stage):
    """Imitation of demonstrations (a cold start)."""

    kind: Literal["sft"]
    """Selects this kind of stage."""
    batch_size: Positive = 32
    """Samples per optimizer step."""
    imitate: Literal["label", "target", "response"] = "label"
    """Learn the annotator's label, the exact target, or the sample's whole response as it stands (one that a `select`
    stage kept, say)."""
    thought_dropout: Fraction = 0.0
    """Share of demonstrations without their thinking, drawn anew each time (TON); needs `answer.think: optional`."""
    learn: Literal["response", "answer"] = "response"
    """What of a demonstration is learned: all of it, or only the answer, given what comes before it."""
    program: Annotated[tuple[UseTools, ...], Field(max_length=1)] = ()
    """A step of kind `tools`, as an rl stage has it: calls in the sample's response are answered by the tools
    themselves, and only the response is learned."""

    @property
    def asked_per_step(self) -> int:
        """Samples that a step draws."""
        return self.batch_size

    @property
    def places(self) -> int:
        """Samples that a round has room for."""
        return self.batch_size

    @model_validator(mode="after")
    def _calls_stand_in_responses(self) -> Sft:
        if self.program and self.imitate != "response":
            raise ValueError(
                f"only a whole response can call a tool, and imitate is {self.imitate!r}; set `imitate: response`, or "
                "leave out `program`"
            )
        return self

    @model_validator(mode="after")
    def _order_needs_no_rewards(self) -> Sft:
        if self.goes_by_rewards:
            raise ValueError(f"order {self.order.kind!r} goes by rewards here, and an sft stage has none")
        return self


class Rl(Stage):
    """Policy optimisation on groups of rollouts: GRPO and its relatives."""

    kind: Literal["rl"]
    """Selects this kind of stage."""
    prompts_per_step: Positive = 16
    """Groups per optimizer step."""
    group_size: Positive = 8
    """Rollouts per prompt."""
    sampling: Sampling = Sampling()
    """How rollouts are drawn."""
    program: Annotated[Steps, AfterValidator(check_order)] = ONCE
    """What is done with a prompt: generate, and what follows."""
    overlap: bool = False
    """Draw the next step's rollouts while this step is learned: one step off-policy. It saves time where the engine has
    devices of its own (`vllm_server`); with `hf` it takes a second copy of the model, and `vllm` cannot."""
    algorithm: Algorithm = "grpo"
    """A published objective: other defaults for `advantage` and `loss`, which may still be set one by one."""
    advantage: Advantage = Advantage()
    """From rewards to advantages."""
    loss: Loss = Loss()
    """From advantages to gradients."""
    reference: Reference = Reference()
    """What the KL penalty measures from."""
    filter: Filter | None = None
    """Which groups are learned; all where there is none."""
    replay: Replay | None = None
    """What of earlier steps is learned again; nothing where there is none."""
    epochs: Positive = 1
    """Passes over the same rollouts."""
    mini_batches: Positive = 1
    """Optimizer steps of a pass: the step's groups are dealt into so many batches, each with a gradient and
    denominators of its own (PPO; verl's rollout and mini-batch sizes)."""
    history: tuple[str, ...] = ()
    """Reward terms whose mean over a group is noted for its sample each time it is drawn, for `order`, and for later
    `select` stages in RUN/outputs/NAME.jsonl."""
    health: Health = Health()
    """When to warn."""
    max_barren_steps: Positive = 20
    """This many steps in a row without a single informative group end the run with an explanation."""

    @property
    def asked_per_step(self) -> int:
        """Samples that a round of prompts draws."""
        return self.prompts_per_step

    @model_validator(mode="after")
    def _order_has_its_history(self) -> Rl:
        if self.goes_by_rewards and not self.history:
            raise ValueError(f"order {self.order.kind!r} goes by rewards: name the terms it is to go by in `history`")
        return self

    @model_validator(mode="after")
    def _group_compares(self) -> Rl:
        within = {self.advantage.baseline, self.advantage.scale} & {"group_mean", "leave_one_out", "group_std"}
        if self.group_size < 2 and within:
            raise ValueError(
                f"group_size {self.group_size} leaves a group nothing to compare: every advantage would be 0; "
                "use 2 or more"
            )
        if self.reference.update != "never" and not self.loss.kl.coef:
            raise ValueError(f"reference.update {self.reference.update!r} has no effect without `loss.kl.coef`")
        if self.sampling.temperature == 0.0:
            raise ValueError("temperature 0 makes all rollouts of a group equal; use a value above 0 to train")
        return self

    @model_validator(mode="after")
    def _mini_batches_need_no_start(self) -> Rl:
        if self.mini_batches > self.prompts_per_step:
            raise ValueError(
                f"mini_batches {self.mini_batches} leaves some without a group of prompts_per_step "
                f"{self.prompts_per_step}"
            )
        from_start = {
            "loss.old: learner": self.loss.old == "learner",
            "loss.kl.place: reward": self.loss.kl.coef > 0.0 and self.loss.kl.place == "reward",
            "replay.ratio: recomputed": self.replay is not None and self.replay.ratio == "recomputed",
        }
        if self.mini_batches > 1 and (taken := [key for key, is_so in from_start.items() if is_so]):
            raise ValueError(
                f"mini_batches with `{taken[0]}`: that needs the learner's probabilities as the step began, which the "
                "first mini-batch changes; take one of them out"
            )
        return self

    @property
    def places(self) -> int:
        """Prompts that a round works on, those that wait from the step before included."""
        (first,) = (step for step in self.program if isinstance(step, Generate))
        return ceil(self.prompts_per_step * first.over_sample)

    @model_validator(mode="after")
    def _drafts_leave_room(self) -> Rl:
        check_room(self.program, self.sampling.max_new_tokens)
        return self

    @property
    def waits(self) -> bool:
        """Whether groups may wait for later steps, half-drawn."""
        return any(isinstance(step, Generate) and step.chunk for step in self.program)

    @model_validator(mode="after")
    def _overlaps_by_one_step(self) -> Rl:
        if self.overlap and self.waits:
            raise ValueError(
                "`chunk` lets groups wait for any number of steps, and `overlap` promises rollouts that are one step "
                "old at most; take out one of them"
            )
        return self

    @model_validator(mode="after")
    def _bundle_is_in_place(self) -> Rl:
        for part, settings in PRESETS[self.algorithm].items():
            refuse_gaps(f"algorithm {self.algorithm!r}", settings, getattr(self, part).model_fields_set, f"{part}.")
        return self

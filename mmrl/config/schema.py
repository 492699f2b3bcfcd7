"""The one home of every setting: names, types, defaults, limits. Imports without torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
Word = Annotated[str, Field(pattern=r"^[^\W\d][\w-]*$")]
Tag = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]
Role = Literal["vision", "projector", "language"]


class Strict(BaseModel):
    """A mapping that refuses unknown keys and wrong types, and never changes once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class VisionScratch(Strict):
    """The vision tower of a from-scratch model."""

    depth: Positive = 2
    """Transformer blocks."""
    width: Positive = 64
    """Hidden size; a multiple of 4 x `heads`."""
    heads: Positive = 4
    """Attention heads."""
    mlp: Positive = 128
    """Inner size of the feed-forward layers."""
    patch: Positive = 8
    """Side of a patch, in pixels."""
    merge: Positive = 2
    """Patches per side merged into one language-model token."""

    @model_validator(mode="after")
    def _heads_fit(self) -> VisionScratch:
        if self.width % (4 * self.heads):  # rotary positions turn pairs along two axes
            raise ValueError(f"width {self.width} must be a multiple of 4 x heads ({self.heads})")
        return self


class LanguageScratch(Strict):
    """The language model of a from-scratch model."""

    depth: Positive = 2
    """Transformer blocks."""
    width: Positive = 96
    """Hidden size; a multiple of 2 x `heads`."""
    heads: Positive = 4
    """Attention heads."""
    kv_heads: Positive = 2
    """Key and value heads; divides `heads`."""
    mlp: Positive = 192
    """Inner size of the feed-forward layers."""
    vocab: Annotated[int, Field(ge=300)] = 448
    """Tokens the byte-level BPE may learn, special tokens included; 256 bytes and the special tokens need 300."""

    @model_validator(mode="after")
    def _heads_fit(self) -> LanguageScratch:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} must be a multiple of 2 x heads ({self.heads})")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        return self


class Scratch(Strict):
    """A tiny model of a real Qwen-VL class, made on the spot: architecture, tokenizer and processor."""

    family: Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"] = "qwen2_5_vl"
    """Which of transformers' model classes."""
    vision: VisionScratch = VisionScratch()
    """The vision tower."""
    language: LanguageScratch = LanguageScratch()
    """The language model."""
    init: Literal["fan_in", "normal"] = "fan_in"
    """`fan_in`: std 1/sqrt(fan in), half of it on residual outputs; `normal`: transformers' own std 0.02."""


class Video(Strict):
    """How many frames of a video the model sees, and how large: the rule of qwen-vl-utils."""

    fps: Annotated[float, Field(gt=0.0)] = 2.0
    """Frames per second, as long as that is from `min_frames` to `max_frames`; otherwise fewer or more, evenly."""
    min_frames: Annotated[int, Field(ge=2)] = 4
    """Fewest frames; a video that has not so many is refused."""
    max_frames: Annotated[int, Field(ge=2)] = 768
    """Most frames; a longer video is seen at a lower rate, which the model is told."""
    min_pixels: Positive = 100352
    """Smaller frames are enlarged to this area."""
    max_pixels: Positive = 602112
    """Larger frames are shrunk to this area."""
    total_pixels: Positive = 90316800
    """Frames of a long video are shrunk further, to this area for all of them (half, as frames go in pairs)."""

    @model_validator(mode="after")
    def _in_order(self) -> Video:
        for low, high in (("min_frames", "max_frames"), ("min_pixels", "max_pixels")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} {getattr(self, low)} exceeds {high} {getattr(self, high)}")
        return self


class Model(Strict):
    """The policy."""

    path: str | None = None
    """A local folder or a hub id. Exactly one of `path` and `scratch` is set."""
    scratch: Scratch | None = None
    """A from-scratch model; exactly one of `path` and `scratch` is set."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations; log-probabilities are always float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is one."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers."""
    freeze: tuple[Role, ...] = ()
    """Parts that are not trained."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    min_pixels: Positive = 3136
    """Smaller pictures are enlarged to this area."""
    max_pixels: Positive = 1003520
    """Larger pictures are shrunk to this area."""
    video: Video = Video()
    """How videos are seen."""
    max_prompt_tokens: Positive = 8192
    """A longer prompt is refused, never cut."""

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("set exactly one of `path` (a folder or hub id) and `scratch` (a tiny new model)")
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} exceeds max_pixels {self.max_pixels}")
        return self


class Origin(Strict):
    """One source of samples."""

    fn: str
    """`package.module:function` or `./file.py:function`, resolved at start."""
    args: dict[str, Any] = {}
    """Options of that function."""
    weight: Annotated[float, Field(gt=0.0)] | None = None
    """Share of the training samples drawn from this source, over the sum of all weights; without weights, every sample
    is drawn once per epoch. Give it to all sources or to none."""


class Limits(Strict):
    """What a picture or video may be; checked before it is decoded."""

    max_bytes: Positive = 50_000_000
    """Size of a picture's file."""
    max_pixels: Positive = 100_000_000
    """Width times height, of a picture or of a frame."""
    max_aspect: Annotated[int, Field(ge=1, le=200)] = 200
    """Longer side over shorter side; the families' resize rule knows nothing beyond 200."""
    max_expansion: Positive = 2000
    """Bytes of pixels per byte of a picture's file; beyond it is a decompression bomb."""
    max_video_bytes: Positive = 2_000_000_000
    """Size of a video's file."""
    max_frames: Positive = 500_000
    """Frames in a video's file."""
    max_seconds: Annotated[float, Field(gt=0.0)] = 7200.0
    """Length of a video's file."""
    max_drift_s: Annotated[float, Field(gt=0.0)] = 0.5
    """How far a sampled frame may stand from where a constant rate would have it: variable rates mislead the model."""
    max_data_url_bytes: Positive = 10_000_000
    """Size of a medium written into a data URL."""


class Data(Strict):
    """Where samples come from."""

    train: Annotated[tuple[Origin, ...], Field(min_length=1)]
    """Sources of training samples, mixed in a seeded order."""
    validation: tuple[Origin, ...] = ()
    """Sources that a stage's `validation` looks at; never trained on."""
    test: tuple[Origin, ...] = ()
    """Sources of the before/after table; looked at for nothing else."""
    bad_sample: Literal["stop", "skip"] = "stop"
    """What an unreadable medium or unusable row does: end the run, or be left out, counted and listed."""
    over_long: Literal["reject_at_load", "drop"] = "reject_at_load"
    """What a prompt beyond `model.max_prompt_tokens` does: end the run before it begins, or be left out, counted and
    listed. Nothing is ever cut."""
    roots: tuple[str, ...] = (".",)
    """Folders that media must lie in, from the config's folder; links that lead out of them are refused."""
    urls: tuple[Literal["http", "file", "data"], ...] = ()
    """Kinds of URLs that may name a medium; `http` stands for https too and is fetched once, when samples are read."""
    workers: Count = 0
    """Processes that decode and process the next step's media while this step trains; 0 does it in between."""
    limits: Limits = Limits()
    """Safety limits on media."""

    @model_validator(mode="after")
    def _weights_for_all_or_none(self) -> Data:
        weighted = [origin.weight is not None for origin in self.train]
        if any(weighted) and not all(weighted):
            raise ValueError("give a `weight` to every training source or to none")
        if any(origin.weight is not None for origin in (*self.validation, *self.test)):
            raise ValueError("`weight` mixes training sources; held-out data are looked at whole")
        return self


class Section(Strict):
    """A part of a response before the answer, besides the thinking: an observation, say."""

    tag: Tag
    """Its name."""
    required: bool = True
    """Whether a response may leave it out."""
    after_thinking: bool = False
    """Whether it stands between thinking and answer, rather than before both."""


class AnswerGrammar(Strict):
    """How a response is written. One statement drives prompt text, parser, demonstrations and the format reward."""

    think: Literal["none", "optional", "required"] = "none"
    """Whether the response opens with <think>...</think>."""
    style: Literal["tags", "boxed", "json"] = "tags"
    """Where the answer stands: in <answer>...</answer>; in \\boxed{...}, with free words before it; or as the last
    field of one JSON object, whose other fields are the thinking and the sections."""
    answer_tag: Tag = "answer"
    """Name of the answer's tag, or of its JSON field."""
    think_tag: Tag = "think"
    """Name of the thinking's tag, or of its JSON field."""
    sections: tuple[Section, ...] = ()
    """Other parts that come before the answer, in their order."""
    more_stops: tuple[str, ...] = ()
    """Strings that end a response, besides the closing tag of the answer."""
    instruct: bool = True
    """Append a sentence to the question that states the format."""

    @model_validator(mode="after")
    def _names_differ(self) -> AnswerGrammar:
        names = [self.answer_tag, self.think_tag, *(section.tag for section in self.sections)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two parts of a response are named {twice[0]!r}")
        return self


class Term(Strict):
    """One reward term."""

    fn: str
    """`module:function` or `./file.py:function`."""
    name: str | None = None
    """Name in metrics; the function's own name when left out."""
    weight: float = 1.0
    """Factor in the total."""
    args: dict[str, Any] = {}
    """Options of the reward function."""
    tasks: tuple[str, ...] = ()
    """Tasks the term applies to; empty means all."""
    train_only: bool = False
    """Leave the term out of evaluation totals (a shaping bonus, say)."""


class Rewards(Strict):
    """How a response is scored: the weighted sum of the terms that apply to its task."""

    terms: Annotated[tuple[Term, ...], Field(min_length=1)]
    """The terms."""


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


class Optimizer(Strict):
    """AdamW with warm-up and decay."""

    lr: Annotated[float, Field(gt=0.0)] = 1e-6
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the moment estimates."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay."""
    warmup_steps: Count = 0
    """Linear rise from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Fall from the peak to `final_lr_frac` over the steps after warm-up."""
    final_lr_frac: Fraction = 0.0
    """Share of the peak rate left at the last step."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Global gradient norm above which gradients are scaled down."""


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
    """What every stage has."""

    name: Word
    """Name in metrics, file names and on the console; unique in the run."""
    steps: Positive
    """Optimizer steps at most."""
    optimizer: Optimizer = Optimizer()
    """A stage starts with a fresh optimizer."""
    micro_batch: Positive = 8
    """Sequences (sft) or groups (rl) per forward pass; the gradient does not depend on it."""
    validation: Validation | None = None
    """Looks at held-out reward, and an early end by it; needs `data.validation`."""


class Sft(Stage):
    """Imitation of demonstrations (a cold start)."""

    kind: Literal["sft"]
    """Selects this kind of stage."""
    batch_size: Positive = 32
    """Samples per optimizer step."""
    imitate: Literal["label", "target"] = "label"
    """Learn the annotator's label, or the exact target."""


class Advantage(Strict):
    """A_i = (R_i - baseline) / scale, within a group."""

    baseline: Literal["group_mean", "none"] = "group_mean"
    """What is subtracted."""
    scale: Literal["group_std", "none"] = "group_std"
    """What divides: the group's standard deviation (GRPO) or nothing (Dr.GRPO)."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-4
    """Added to the standard deviation."""


class Loss(Strict):
    """Token-level clipped surrogate and the optional KL penalty."""

    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """The ratio is clipped at 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0.0)] = 0.2
    """The ratio is clipped at 1 + clip_high."""
    kl_coef: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the k3 estimate of KL(policy || reference); above 0 a frozen copy of the stage's start is kept."""


class Rl(Stage):
    """Group-relative policy optimisation (GRPO)."""

    kind: Literal["rl"]
    """Selects this kind of stage."""
    prompts_per_step: Positive = 16
    """Groups per optimizer step."""
    group_size: Positive = 8
    """Rollouts per prompt."""
    sampling: Sampling = Sampling()
    """How rollouts are drawn."""
    advantage: Advantage = Advantage()
    """From rewards to advantages."""
    loss: Loss = Loss()
    """From advantages to gradients."""
    epochs: Positive = 1
    """Optimizer steps over the same rollouts."""
    shared_prefix: bool = True
    """Encode image and prompt once per group in the learner; the gradient is the same without."""
    max_barren_steps: Positive = 20
    """This many steps in a row without a single informative group end the run with an explanation."""

    @model_validator(mode="after")
    def _group_compares(self) -> Rl:
        if self.group_size < 2 and self.advantage.baseline == "group_mean":
            raise ValueError(
                f"group_size {self.group_size} leaves a group nothing to compare: every advantage would be 0; "
                "use 2 or more"
            )
        if self.sampling.temperature == 0.0:
            raise ValueError("temperature 0 makes all rollouts of a group equal; use a value above 0 to train")
        return self


class Evaluation(Strict):
    """How held-out reward is measured."""

    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    """0 is greedy."""
    max_new_tokens: Positive = 512
    """Longest response."""
    batch_size: Positive = 64
    """Prompts per generation batch."""


class Checkpoints(Strict):
    """When runs are saved."""

    every: Positive = 100
    """Steps between checkpoints; one more at each stage's end."""
    keep: Positive = 2
    """How many of the latest stay."""


class Run(Strict):
    """The run itself."""

    name: FileName
    """Name of the run."""
    dir: str = "runs/{name}"
    """Where everything of the run is written; `{name}` is the run's name."""
    seed: Count = 0
    """Every random choice derives from it."""
    threads: Count = 0
    """CPU threads; 0 takes one per core."""
    keep_rollouts_every: Positive = 10
    """Steps between the rollouts kept for reading."""


class Config(Strict):
    """A whole experiment."""

    run: Run
    """Name, place and seed."""
    model: Model
    """The policy."""
    data: Data
    """Training and held-out samples."""
    answer: AnswerGrammar = AnswerGrammar()
    """How responses are written."""
    rewards: Rewards
    """How responses are scored."""
    stages: Annotated[tuple[Annotated[Sft | Rl, Field(discriminator="kind")], ...], Field(min_length=1)]
    """What is done, in order, each from the previous one's weights."""
    evaluation: Evaluation = Evaluation()
    """How held-out reward is measured."""
    checkpoints: Checkpoints = Checkpoints()
    """When the run is saved."""

    @field_validator("stages")
    @classmethod
    def _stages_fit(cls, stages: tuple[Sft | Rl, ...], info: ValidationInfo) -> tuple[Sft | Rl, ...]:
        names = [stage.name for stage in stages]
        if len(set(names)) < len(names):
            raise ValueError(f"stage names must be unique, got {', '.join(names)}")
        looking = [stage.name for stage in stages if stage.validation]
        if looking and "data" in info.data and not info.data["data"].validation:
            raise ValueError(f"stage {looking[0]!r} has `validation`, which needs `data.validation`")
        return stages

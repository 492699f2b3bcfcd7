"""Section `model`: the policy, from a folder, from the hub, or tiny and new."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmrl.config.schema.base import (
    COMPONENTS,
    ROUNDING_EFFECT,
    Component,
    DecayRate,
    Dimension,
    FunctionConfig,
    NumTokens,
    PositiveInt,
    StrictModel,
)

BuiltinFamily = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
LoraTarget = Literal[
    "language.attention", "language.mlp", "language.experts", "vision.attention", "vision.mlp", "projector.mlp"
]


class VisionFromScratchConfig(StrictModel):
    """The vision tower of a from-scratch model."""

    num_layers: Dimension = 2
    """Transformer blocks of the tower."""
    hidden_size: Dimension = 64
    """Size of a patch's hidden state; it must be a multiple of 4 x `num_heads`."""
    num_heads: Dimension = 4
    """Attention heads of each block."""
    intermediate_size: Dimension = 128
    """Size of the inner layer of each feed-forward network."""
    patch_size: Dimension = 8
    """Side of a square patch, in pixels."""
    spatial_merge_size: Dimension = 2
    """Side, in patches, of the square of patches that becomes one token of the language model."""

    @model_validator(mode="after")
    def _check_heads(self) -> VisionFromScratchConfig:
        # Rotary positions rotate pairs of numbers, half of them by height and half by width.
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of 4 x num_heads ({self.num_heads})")
        return self


class LanguageFromScratchConfig(StrictModel):
    """The language model of a from-scratch model."""

    num_layers: Dimension = 2
    """Transformer blocks of the model."""
    hidden_size: Dimension = 96
    """Size of a token's hidden state; it must be a multiple of 2 x `num_heads`."""
    num_heads: Dimension = 4
    """Attention heads of each block."""
    num_kv_heads: Dimension = 2
    """Key and value heads of each block; they must divide `num_heads`."""
    intermediate_size: Dimension = 192
    """Size of the inner layer of each feed-forward network."""
    num_experts: Annotated[int, Field(ge=2, le=100_000)] = 4
    """Experts of each layer, in a family with experts."""
    experts_per_token: Dimension = 2
    """Experts that a token goes to; at most `num_experts`."""
    expert_intermediate_size: Dimension = 128
    """Size of the inner layer of each expert, and of a shared one."""
    linear_head_dim: Dimension = 16
    """Size of a key and of a value in each head of a Gated DeltaNet, in a family that has such layers; vLLM on a CPU
    needs 128."""
    vocab_size: Annotated[int, Field(ge=300, le=10_000_000)] = 448
    """Tokens of the byte-level BPE, special tokens included; 256 bytes and the special tokens need 300."""

    @model_validator(mode="after")
    def _check_heads(self) -> LanguageFromScratchConfig:
        # Rotary positions rotate pairs of numbers, so a head needs an even size.
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of 2 x num_heads ({self.num_heads})")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}")
        return self


class FromScratchConfig(StrictModel):
    """A tiny randomly initialised model of a real Qwen-VL class, with its own tokenizer and processor."""

    family: BuiltinFamily = "qwen2_5_vl"
    """Model class of transformers to build."""
    vision: VisionFromScratchConfig = VisionFromScratchConfig()
    """The vision tower."""
    language: LanguageFromScratchConfig = LanguageFromScratchConfig()
    """The language model."""


class VideoConfig(StrictModel):
    """Number and size of the frames that the model sees of a video: the rule of qwen-vl-utils."""

    # The defaults are those of qwen-vl-utils.
    fps: Annotated[float, Field(gt=0.0, le=1000.0)] = 2.0
    """Frames sampled per second of video; where `min_frames` or `max_frames` binds, that many, evenly spaced."""
    min_frames: Annotated[int, Field(ge=2, le=1_000_000)] = 4  # frames go in pairs
    """Sample at least this many frames of a video; a video with fewer frames is refused."""
    max_frames: Annotated[int, Field(ge=2, le=1_000_000)] = 768
    """Sample at most this many frames of a video; a longer video is sampled at a lower rate, which the model is
    told."""
    min_pixels: PositiveInt = 100352  # 128 x 28 x 28: a token of Qwen2-VL covers 28 x 28 pixels
    """Frames of a smaller area, in pixels, are enlarged to it."""
    max_pixels: PositiveInt = 602112  # 768 x 28 x 28
    """Frames of a larger area, in pixels, are shrunk to it."""
    total_pixels: PositiveInt = 90316800  # 128,000 x 28 x 28 x 0.9
    """The frames of a long video are shrunk until their areas add up to twice this many pixels: the model merges frames
    in pairs, and a pair counts as one frame."""

    @model_validator(mode="after")
    def _check_bounds(self) -> VideoConfig:
        for low, high in (("min_frames", "max_frames"), ("min_pixels", "max_pixels")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} {getattr(self, low)} exceeds {high} {getattr(self, high)}")
        return self


class LoraConfig(StrictModel):
    """A low-rank adapter; all weights of the model itself are frozen."""

    rank: Dimension = 16
    """Each adapted matrix gets an update of this rank."""
    alpha: Dimension = 32
    """The update is scaled by alpha / rank."""
    dropout: DecayRate = 0.0
    """Share of an adapter's inputs dropped in training; above 0, the learner's probabilities differ from the
    sampler's."""
    targets: Annotated[tuple[LoraTarget, ...], Field(min_length=1)] | None = None
    """Layers that are adapted. Null adapts the language model's attention and those feed-forward layers that every
    token passes."""
    use_dora: bool = False
    """Learn magnitude and direction separately (DoRA): better at low ranks, slower."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA), so that adapters of high rank still learn."""

    @model_validator(mode="after")
    def _check_experts(self) -> LoraConfig:
        if "language.experts" in (self.targets or ()) and (self.dropout or self.use_dora):
            raise ValueError(
                "`targets` has language.experts, whose adapter takes neither `dropout` nor `use_dora`; leave them out"
            )
        return self

    @property
    def adapted_components(self) -> tuple[str, ...]:
        """The components that have adapted layers."""
        return tuple(map(_component_of, self.targets)) if self.targets else ("language",)


class ModelFamilyConfig(FunctionConfig):
    """A user's model family: `fn` returns a `ModelFamily`. See docs/extending/model_family.md."""


class ModelConfig(StrictModel):
    """The policy."""

    path: str | None = None
    """A local folder or a hub id that the model is loaded from. Exactly one of `path` and `from_scratch` is set."""
    from_scratch: FromScratchConfig | None = None
    """A tiny model with random weights. Exactly one of `path` and `from_scratch` is set."""
    family: ModelFamilyConfig | None = None
    """The family of the model at `path`, needed only if mmrl does not support it: names of components, chat tokens,
    resize rule and position ids."""
    chat: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Options of the model's chat template, such as `enable_thinking: false` (Qwen3.5) or `reasoning_effort: low`
    (Qwen3.8). An option that the template does not read is refused."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations; log-probabilities are always float32."""
    float32_output_layer: bool = False
    """Convert hidden states and output weights to float32 before their product, in the learner and the engine. Under
    `dtype: bfloat16` their log-probabilities then agree better. The larger the vocabulary, the more time this costs.
    As in MiniMax-M1 (arXiv:2506.13585) and ScaleRL (arXiv:2510.13786)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is CUDA where there is a GPU."""
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers."""
    freeze: tuple[Component, ...] = ()
    """Components that are not trained. A stage that sets its own `freeze` uses that list instead."""
    freeze_router: bool = False
    """Do not train the router, which assigns tokens to experts; the experts themselves are trained."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter, not the weights. The exported model contains the merged adapter; RUN/adapter holds
    only the adapter."""
    gradient_checkpointing: Annotated[tuple[Literal["vision", "language"], ...], ROUNDING_EFFECT] = ()
    """Components whose activations are recomputed in the backward pass: less memory, about a third more time."""
    logits_chunk_tokens: Annotated[NumTokens, ROUNDING_EFFECT] = 1024
    """Tokens whose logits are in memory at a time in training; each token takes 12 bytes per vocabulary entry."""
    min_pixels: PositiveInt = 3136  # 4 x 28 x 28: 4 tokens of Qwen2-VL
    """Images of a smaller area, in pixels, are enlarged to it."""
    max_pixels: PositiveInt = 1003520  # 1280 x 28 x 28
    """Images of a larger area, in pixels, are shrunk to it."""
    video: VideoConfig = VideoConfig()
    """Frames of a video that the model sees, and their size."""
    max_prompt_tokens: NumTokens = 8192
    """A prompt of more tokens is refused, never cut."""

    @model_validator(mode="after")
    def _check_options(self) -> ModelConfig:
        if (self.path is None) == (self.from_scratch is None):
            raise ValueError("set exactly one of `path` (a folder or hub id) and `from_scratch` (a tiny new model)")
        if self.family is not None and self.from_scratch is not None:
            raise ValueError(
                "`family` describes a model that `path` names; a model from scratch has `from_scratch.family`"
            )
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} exceeds max_pixels {self.max_pixels}")
        for target in (self.lora.targets or ("language.attention",)) if self.lora else ():
            if _component_of(target) in self.freeze:
                raise ValueError(f"`lora` targets {target}, which `freeze` forbids; take it out of one of them")
        if not self.trainable_components:
            raise ValueError("`freeze` holds every component of the model; leave at least one to train")
        return self

    @property
    def trainable_components(self) -> tuple[Component, ...]:
        """The components that have trained weights, of their own or of an adapter."""
        reached = set(self.lora.adapted_components) if self.lora else set(COMPONENTS)
        return tuple(component for component in COMPONENTS if component in reached and component not in self.freeze)

    def with_freeze(self, freeze: tuple[Component, ...] | None) -> ModelConfig:
        """Return this section with the `freeze` of a stage in place of its own; unchanged if the stage has none."""
        return self if freeze is None else self.model_copy(update={"freeze": freeze})


def _component_of(target: LoraTarget) -> str:
    return target.partition(".")[0]

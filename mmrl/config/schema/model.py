"""The policy: from a folder, from the hub, or tiny and new."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmrl.config.schema.base import COMPONENTS, Component, PositiveInt, StrictModel

LoraTarget = Literal["language.attention", "language.mlp", "vision.attention", "vision.mlp", "projector.mlp"]


class VisionFromScratchConfig(StrictModel):
    """The vision tower of a from-scratch model."""

    num_layers: PositiveInt = 2
    """Transformer blocks."""
    hidden_size: PositiveInt = 64
    """Hidden size; a multiple of 4 x `heads`."""
    num_heads: PositiveInt = 4
    """Attention heads."""
    intermediate_size: PositiveInt = 128
    """Inner size of the feed-forward layers."""
    patch_size: PositiveInt = 8
    """Side of a patch, in pixels."""
    spatial_merge_size: PositiveInt = 2
    """Patches per side merged into one language-model token."""

    @model_validator(mode="after")
    def _check_heads(self) -> VisionFromScratchConfig:
        if self.hidden_size % (4 * self.num_heads):  # rotary positions turn pairs along two axes
            raise ValueError(f"width {self.hidden_size} must be a multiple of 4 x heads ({self.num_heads})")
        return self


class LanguageFromScratchConfig(StrictModel):
    """The language model of a from-scratch model."""

    num_layers: PositiveInt = 2
    """Transformer blocks."""
    hidden_size: PositiveInt = 96
    """Hidden size; a multiple of 2 x `heads`."""
    num_heads: PositiveInt = 4
    """Attention heads."""
    num_kv_heads: PositiveInt = 2
    """Key and value heads; divides `heads`."""
    intermediate_size: PositiveInt = 192
    """Inner size of the feed-forward layers."""
    vocab_size: Annotated[int, Field(ge=300)] = 448
    """Tokens the byte-level BPE may learn, special tokens included; 256 bytes and the special tokens need 300."""

    @model_validator(mode="after")
    def _check_heads(self) -> LanguageFromScratchConfig:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(f"width {self.hidden_size} must be a multiple of 2 x heads ({self.num_heads})")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"heads {self.num_heads} must be a multiple of kv_heads {self.num_kv_heads}")
        return self


class FromScratchConfig(StrictModel):
    """A tiny model of a real Qwen-VL class, made on the spot: architecture, tokenizer and processor."""

    family: Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"] = "qwen2_5_vl"
    """Which of transformers' model classes."""
    vision: VisionFromScratchConfig = VisionFromScratchConfig()
    """The vision tower."""
    language: LanguageFromScratchConfig = LanguageFromScratchConfig()
    """The language model."""
    init: Literal["fan_in", "normal"] = "fan_in"
    """`fan_in`: std 1/sqrt(fan in), half of it on residual outputs; `normal`: transformers' own std 0.02."""


class VideoConfig(StrictModel):
    """How many frames of a video the model sees, and how large: the rule of qwen-vl-utils."""

    fps: Annotated[float, Field(gt=0.0)] = 2.0
    """Frames per second, as long as that is from `min_frames` to `max_frames`; otherwise fewer or more, evenly."""
    min_frames: Annotated[int, Field(ge=2)] = 4
    """Fewest frames; a video that has not so many is refused."""
    max_frames: Annotated[int, Field(ge=2)] = 768
    """Most frames; a longer video is seen at a lower rate, which the model is told."""
    min_pixels: PositiveInt = 100352
    """Smaller frames are enlarged to this area."""
    max_pixels: PositiveInt = 602112
    """Larger frames are shrunk to this area."""
    total_pixels: PositiveInt = 90316800
    """Frames of a long video are shrunk further, to this area for all of them (half, as frames go in pairs)."""

    @model_validator(mode="after")
    def _check_bounds(self) -> VideoConfig:
        for low, high in (("min_frames", "max_frames"), ("min_pixels", "max_pixels")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} {getattr(self, low)} exceeds {high} {getattr(self, high)}")
        return self


class LoraConfig(StrictModel):
    """A low-rank adapter; all weights of the model itself are frozen."""

    rank: PositiveInt = 16
    """Rank of the update of a matrix."""
    alpha: PositiveInt = 32
    """The update is scaled by alpha / rank."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of an adapter's inputs left out while learning; above 0 the learner's law is not quite the sampler's."""
    targets: Annotated[tuple[LoraTarget, ...], Field(min_length=1)] = ("language.attention", "language.mlp")
    """The linear layers that get an update."""
    use_dora: bool = False
    """Learn lengths and directions apart (DoRA): better at low ranks, slower."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) (rsLoRA), which keeps high ranks learning."""


class ModelConfig(StrictModel):
    """The policy."""

    path: str | None = None
    """A local folder or a hub id. Exactly one of `path` and `scratch` is set."""
    from_scratch: FromScratchConfig | None = None
    """A from-scratch model; exactly one of `path` and `scratch` is set."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations; log-probabilities are always float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is one."""
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    """Attention implementation of transformers."""
    freeze: tuple[Component, ...] = ()
    """Parts that are not trained."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter rather than the weights. The exported model has it merged; RUN/adapter has it alone."""
    gradient_checkpointing: tuple[Literal["vision", "language"], ...] = ()
    """Parts whose activations are recomputed in the backward pass: less memory, about a third more time."""
    logits_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at a time while learning: each takes 4 bytes per token of the vocabulary, thrice."""
    min_pixels: PositiveInt = 3136
    """Smaller pictures are enlarged to this area."""
    max_pixels: PositiveInt = 1003520
    """Larger pictures are shrunk to this area."""
    video: VideoConfig = VideoConfig()
    """How videos are seen."""
    max_prompt_tokens: PositiveInt = 8192
    """A longer prompt is refused, never cut."""

    @model_validator(mode="after")
    def _check_one_source(self) -> ModelConfig:
        if (self.path is None) == (self.from_scratch is None):
            raise ValueError("set exactly one of `path` (a folder or hub id) and `scratch` (a tiny new model)")
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} exceeds max_pixels {self.max_pixels}")
        return self

    @model_validator(mode="after")
    def _check_trainable(self) -> ModelConfig:
        frozen = [target for target in self.lora.targets if _component_of(target) in self.freeze] if self.lora else []
        if frozen:
            raise ValueError(f"`lora` targets {frozen[0]}, which `freeze` forbids; take it out of one of them")
        if not self.trainable_components:
            raise ValueError("`freeze` holds every part of the model; leave at least one to train")
        return self

    @property
    def trainable_components(self) -> tuple[Component, ...]:
        """The roles of which something is trained."""
        reached = {_component_of(target) for target in self.lora.targets} if self.lora else set(COMPONENTS)
        return tuple(role for role in COMPONENTS if role in reached and role not in self.freeze)


def _component_of(target: LoraTarget) -> str:
    return target.partition(".")[0]

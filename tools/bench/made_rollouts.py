"""Rollouts made by hand, for benchmarks that need no model."""

from __future__ import annotations

from mmrl.types import (
    Answer,
    Author,
    CoordinateSystem,
    FinishReason,
    Prompt,
    ResizeMap,
    Rollout,
    Sample,
    SamplingParams,
    Segment,
)


def make_prompt(sample: Sample, resize_maps: tuple[ResizeMap, ...] = ()) -> Prompt:
    """Return a prompt of 300 tokens, with a grid of 10 x 10 patches for each image."""
    return Prompt(
        sample=sample,
        token_ids=(1,) * 300,
        grids=((1, 10, 10),) * len(resize_maps),
        resize_maps=resize_maps,
        coordinate_system=CoordinateSystem.PX_ORIGINAL,
        digest=sample.id,
    )


def make_rollout(prompt: Prompt, index: int, text: str, answer: Answer, *, version: int = 0) -> Rollout:
    """Return a finished rollout of 100 tokens."""
    segment = Segment(token_ids=(5,) * 100, logprobs=(-1.0,) * 100, author=Author.POLICY, version=version)
    return Rollout(
        prompt=prompt,
        index=index,
        segments=(segment,),
        text=text,
        answer=answer,
        finish_reason=FinishReason.EOS,
        sampling_params=SamplingParams(max_new_tokens=100),
    )

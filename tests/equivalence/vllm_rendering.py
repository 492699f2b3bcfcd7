"""What vLLM's own processor makes of media that are resized already, and the positions that transformers computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from PIL import Image
from vllm_scenes import VIDEO, Scene, media_store

from mmrl.media.image import resized_size
from mmrl.media.video import FrameSampling
from mmrl.policy.batch import PromptTensors
from mmrl.policy.families import VideoTimeEncoding
from mmrl.policy.processor import PromptProcessor
from mmrl.rollout.engines.vllm_inputs import build_engine_input
from mmrl.rollout.responses import empty_rollout
from mmrl.types import MediaObservation, Prompt, Sample, Size, VideoRef


def differences(llm: Any, scene: Scene, name: str) -> list[str]:
    """Names of what differs between our input for a prompt and vLLM's own; `timestamps` are for pruning, which is
    off.
    """
    ready = build_engine_input(empty_rollout(scene.prompts[name], 0, scene.params), scene.processor)
    ours, theirs = _described(ready), _described(_rendered(llm, scene.processor, scene.samples[name]))
    names = (ours.keys() | theirs.keys()) - {"video 0 timestamps"}
    return sorted(name for name in names if not _equal(ours.get(name), theirs.get(name)))


def _resized(image: Image.Image, **area: int) -> Image.Image:
    return image.resize(resized_size(Size(*image.size), **area))


def _rendered(llm: Any, processor: PromptProcessor, sample: Sample) -> Any:
    """What vLLM's own processor makes of a sample with one placeholder per medium, pictures and frames resized."""
    images, store = processor.hf_processor.image_processor, media_store()
    area = {"factor": 16, "min_pixels": images.size["shortest_edge"], "max_pixels": images.size["longest_edge"]}
    clips = [
        store.read_video(ref, FrameSampling(video=VIDEO, patch_size=8))
        for ref in sample.media
        if isinstance(ref, VideoRef)
    ]
    media = {
        "image": [_resized(store.get_image(ref), **area) for ref in sample.images],
        "video": [(clip.frames_TCHW, _metadata(clip.plan)) for clip in clips],
    }
    prompt: dict[str, Any] = {"prompt_token_ids": processor.tokenizer(_collapsed(processor, sample)).input_ids}
    if sample.media:
        done = {"do_resize": False, "do_sample_frames": False}
        prompt |= {"multi_modal_data": {name: items for name, items in media.items() if items}}
        prompt |= {"mm_processor_kwargs": done}
    (rendered,) = llm.renderer.render_cmpl([prompt])
    return rendered


def _collapsed(processor: PromptProcessor, sample: Sample) -> str:
    """The question with one placeholder per medium.

    Each frame of a Qwen3-VL video has its own vision tokens; transformers 5, and vLLM with it, would leave those of the
    video around them.
    """
    question = processor.encoder.render_chat(sample)
    if processor.encoder.family.video_time is VideoTimeEncoding.TEXT_TIMESTAMPS:
        return question.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")
    return question


def _metadata(plan: Any) -> dict[str, Any]:
    return {
        "fps": plan.fps,
        "frames_indices": list(plan.indices),
        "total_num_frames": plan.total_frames,
        "duration": plan.total_frames / plan.fps,
        "width": plan.resized_size.width,
        "height": plan.resized_size.height,
        "video_backend": "decord",
        "do_sample_frames": False,
    }


def _described(ready: Any) -> dict[str, Any]:
    """Everything of an input that the model comes to see, by name."""
    found = {"type": ready["type"], "ids": list(ready["prompt_token_ids"])}
    for modality, items in ready.get("mm_kwargs", {}).items():
        for number, item in enumerate(items):
            found |= {f"{modality} {number} {key}": element.data for key, element in item.items()}
    for modality, ranges in ready.get("mm_placeholders", {}).items():
        for number, where in enumerate(ranges):
            mask = torch.ones(where.length, dtype=torch.bool) if where.is_embed is None else where.is_embed
            found[f"{modality} {number} places"] = where.offset + mask.nonzero().squeeze(1)
    return found


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool((one == other).all())
    return type(one) is type(other) and one == other


class PositionsOfTransformers:
    """Gives the learner the positions that transformers computes itself."""

    def __init__(self, scene: Scene) -> None:
        self.placeholders = scene.processor.placeholders
        self._processor, self._model = scene.processor, scene.policy.model

    def prompt_tensors(self, prompt: Prompt) -> PromptTensors:
        ours = self._processor.prompt_tensors(prompt)
        ids = torch.tensor([prompt.token_ids])
        positions, _ = self._model.model.get_rope_index(
            input_ids=ids,
            mm_token_type_ids=self.placeholders.token_types(ids),
            video_grid_thw=torch.tensor(prompt.grids),
            second_per_grid_ts=ours.second_per_grid_V,
            attention_mask=torch.ones_like(ids),
        )
        return replace(ours, position_ids_3P=positions[:, 0])

    def tool_media_tensors(self, view: MediaObservation) -> PromptTensors:
        return self._processor.tool_media_tensors(view)

"""TinyModel models: real Qwen-VL classes of a few thousand parameters, with generated samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

# Before torch is imported: pytest runs a process a core, and a process that starts a thread for each core makes all
# of them wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from samplers import hf_sampler
from videos import SMALL, write_video

from mmrl.answer import ResponseFormat
from mmrl.config.schema import (
    FromScratchConfig,
    LanguageFromScratchConfig,
    MediaLimitsConfig,
    VideoConfig,
    VisionFromScratchConfig,
)
from mmrl.media.cache import MediaCache
from mmrl.policy.encoder import PromptEncoder
from mmrl.policy.families import get_family
from mmrl.policy.policy import Policy, banned_ids
from mmrl.policy.pretrained import ProcessorBundle
from mmrl.policy.processor import PromptProcessor
from mmrl.policy.tiny_models import make_model, make_processor, train_tokenizer
from mmrl.rollout.engine_sampler import EngineSampler
from mmrl.types import DatasetContext, MediaPolicy, Sample, SamplingParams, VideoRef
from mmrl_datasets.generators import scenes


@dataclass(frozen=True)
class TinyModel:
    """A tiny policy, its prompt processor, and samples for it.

    The samples have one image, two images, text alone, a video, an image and a video; then single images.
    """

    policy: Policy
    processor: PromptProcessor
    samples: tuple[Sample, ...]
    params: SamplingParams

    @property
    def eos_id(self) -> int:
        return self.processor.tokenizer.eos_token_id

    def fresh(
        self,
        *,
        store_bytes: int = 0,
        add_instruction: bool = False,
        max_prompt_tokens: int = 500,
        video: VideoConfig = SMALL,
        root: Path = Path("/"),
    ) -> PromptProcessor:
        """A processor with the same settings and empty caches."""
        known = self.processor.encoder
        store = MediaCache(MediaPolicy(roots=(root,)), MediaLimitsConfig(), max_bytes=store_bytes)
        options = {"video": video, "add_instruction": add_instruction, "max_prompt_tokens": max_prompt_tokens}
        return PromptProcessor(PromptEncoder(known.bundle, known.response_format, store, **options))

    def sampler(self, *seed_parts: str) -> EngineSampler:
        return hf_sampler(self.policy, self.processor, seed_parts=seed_parts or ("test",))


def _mixed(samples: Iterable[Sample], clip: VideoRef) -> tuple[Sample, ...]:
    one, two, three, *rest = samples
    double = replace(one, id="two-images", parts=(*two.images, "and", *three.images, "Which is larger?"))
    text = replace(two, id="text-only", parts=("How many shapes are there without a picture?",))
    video = replace(two, id="video", parts=(clip, "Which way does it run?"))
    both = replace(one, id="image-and-video", parts=("Is", *one.images, "in", clip, "at the end?"))
    return (one, double, text, video, both, two, three, *rest)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> DatasetContext:
    return DatasetContext(work_dir=tmp_path_factory.mktemp("data"), base_dir=Path.cwd(), seed=0)


@pytest.fixture(scope="session")
def scene_samples(place: DatasetContext) -> tuple[Sample, ...]:
    makers = (scenes.counting, scenes.grounding, scenes.digits)
    return tuple(sample for make in makers for sample in make(place, split="train", size=4))


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> VideoRef:
    return write_video(tmp_path_factory.mktemp("clips") / "clip.mp4", range(24), size=(64, 32))


@pytest.fixture(scope="session")
def make_tiny(scene_samples: tuple[Sample, ...], clip: VideoRef) -> Callable[[str], TinyModel]:
    """Make a tiny policy of a family; each call makes new weights, so that a test may train them."""

    @cache
    def words() -> tuple[str, ...]:
        response_format = ResponseFormat()
        questions = [part for sample in scene_samples for part in sample.parts if isinstance(part, str)]
        return (*questions, *(response_format.render(sample.target) for sample in scene_samples))

    def make(family: str = "qwen2_5_vl") -> TinyModel:
        spec = FromScratchConfig(
            family=family,
            vision=VisionFromScratchConfig(hidden_size=32, num_heads=2, intermediate_size=32),
            language=LanguageFromScratchConfig(
                hidden_size=48, num_heads=4, num_kv_heads=2, intermediate_size=64, vocab_size=330
            ),
        )
        tokenizer = train_tokenizer(words(), spec.language.vocab_size)
        policy = Policy(make_model(spec, tokenizer, seed=1))
        encoder = PromptEncoder(
            ProcessorBundle(
                family=get_family(policy.model.config), processor=make_processor(spec, tokenizer, (2304, 2304))
            ),
            ResponseFormat(),
            MediaCache(MediaPolicy(roots=(Path("/"),)), MediaLimitsConfig(), max_bytes=10**8),
            video=SMALL,
            add_instruction=False,
            max_prompt_tokens=500,
        )
        params = SamplingParams(banned_token_ids=banned_ids(tokenizer, len(tokenizer)), max_new_tokens=6)
        return TinyModel(
            policy=policy, processor=PromptProcessor(encoder), samples=_mixed(scene_samples, clip), params=params
        )

    return make

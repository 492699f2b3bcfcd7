"""Tiny worlds: real Qwen-VL classes of a few thousand parameters, real pictures, real rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from mmrl.answer import Grammar
from mmrl.config.schema import LanguageScratch, Limits, Scratch, VisionScratch
from mmrl.media.store import MediaStore
from mmrl.policy.families import FAMILIES
from mmrl.policy.processor import QwenProcessor
from mmrl.policy.qwen_vl import Policy, banned_ids
from mmrl.policy.scratch import make_model, make_processor, train_tokenizer
from mmrl.rollout.hf import HfSampler
from mmrl.types import Access, Place, Sample, SamplingLaw
from mmrl_datasets import scenes


@dataclass(frozen=True)
class Tiny:
    """A model with everything around it, and samples that fit: one picture, two pictures, text alone."""

    policy: Policy
    processor: QwenProcessor
    samples: tuple[Sample, ...]
    law: SamplingLaw

    @property
    def eos_id(self) -> int:
        return self.processor.tokenizer.eos_token_id

    def sampler(self, *salt: str) -> HfSampler:
        return HfSampler(self.policy, self.processor, salt=salt or ("test",))


def _mixed(samples: Iterable[Sample]) -> tuple[Sample, ...]:
    one, two, three, *rest = samples
    double = replace(one, id="two-images", parts=(*two.images, "and", *three.images, "Which is larger?"))
    text = replace(two, id="text-only", parts=("How many shapes are there without a picture?",))
    return (one, double, text, two, three, *rest)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(work=tmp_path_factory.mktemp("data"), base=Path.cwd(), seed=0)


@pytest.fixture(scope="session")
def scene_samples(place: Place) -> tuple[Sample, ...]:
    makers = (scenes.counting, scenes.grounding, scenes.digits)
    return tuple(sample for make in makers for sample in make(place, split="train", size=4))


@pytest.fixture(scope="session")
def tiny(scene_samples: tuple[Sample, ...]) -> Callable[[str], Tiny]:
    """A fresh world for each call, so that a test may train it."""

    @cache
    def words() -> tuple[str, ...]:
        grammar = Grammar()
        questions = [part for sample in scene_samples for part in sample.parts if isinstance(part, str)]
        return (*questions, *(grammar.render(sample.target) for sample in scene_samples))

    def make(family: str = "qwen2_5_vl") -> Tiny:
        spec = Scratch(
            family=family,
            vision=VisionScratch(width=32, heads=2, mlp=32),
            language=LanguageScratch(width=48, heads=4, kv_heads=2, mlp=64, vocab=330),
        )
        tokenizer = train_tokenizer(words(), spec.language.vocab)
        processor = QwenProcessor(
            make_processor(spec, tokenizer, (2304, 2304)),
            FAMILIES[family],
            Grammar(),
            MediaStore(Access(roots=(Path("/"),)), Limits(), max_bytes=10**8),
            instruct=False,
            max_prompt_tokens=500,
        )
        policy = Policy(make_model(spec, tokenizer, seed=1))
        law = SamplingLaw(banned=banned_ids(tokenizer, len(tokenizer)), max_new_tokens=6)
        return Tiny(policy=policy, processor=processor, samples=_mixed(scene_samples), law=law)

    return make

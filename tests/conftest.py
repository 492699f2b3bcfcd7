"""Tiny models: real Qwen-VL classes of a few thousand parameters, with generated samples."""

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

# Before torch is imported: pytest runs a process a core, and a process that starts a thread for each core makes all
# of them wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What vLLM knows of a class it learned by 20 s of imports in another process. That holds for every run and test.
os.environ.setdefault("VLLM_CACHE_ROOT", os.path.expanduser(os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/vllm"))
# What tests find in files is of no use to the user's runs.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="mmrl-tests-")

import pytest
import torch
from families import FAST_FAMILIES
from processors import make_media_cache, make_prompt_processor
from samplers import hf_sampler
from videos import write_video

from mmrl.answer import ResponseFormat
from mmrl.config.schema import FromScratchConfig, LanguageFromScratchConfig, VisionFromScratchConfig
from mmrl.plan.pretended_device import register_device
from mmrl.policy.batch import Batch, collate, group_by_prompt
from mmrl.policy.families import FAMILIES, get_family
from mmrl.policy.policy import PolicyModel
from mmrl.policy.processor import PromptProcessor
from mmrl.policy.tiny_models import make_model, make_processor, train_tokenizer
from mmrl.rollout.engine_sampler import EngineSampler
from mmrl.types import DatasetContext, Experience, Sample, SamplingParams, UserError, VideoRef
from mmrl_datasets.generators import scenes

# Before any test computes a gradient, or torch would have no queue for the device. Where it cannot be registered, tests
# that need it are skipped with the reason. Beside a GPU it would be torch's accelerator, and pin the host's memory.
if not torch.cuda.is_available():
    with suppress(UserError):
        register_device()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what is done with one more family, outside the unit tests, and put slow files first."""
    for item in items:
        families = item.callspec.params.values() if hasattr(item, "callspec") else ()
        others = set(FAMILIES).difference(FAST_FAMILIES).intersection(map(str, families))
        if others and "unit" not in item.path.parts:
            item.add_marker(pytest.mark.slow)
    # Each process of pytest-xdist begins with a part of the list, as long as those of the others, and then takes tests
    # from the ends of theirs. So each part begins with files that take long, and ends with tests that do not.
    slow_files = {item.path for item in items if item.get_closest_marker("slow")}
    sizes = [0] * int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    part_of: dict[Path, int] = {}
    for path, count in Counter(item.path for item in items).most_common():
        part_of[path] = sizes.index(min(sizes))
        sizes[part_of[path]] += count
    items.sort(key=lambda item: (part_of[item.path], item.path not in slow_files))


@dataclass(frozen=True)
class TinyModel:
    """A tiny policy, its prompt processor, and samples for it.

    The samples have one image, two images, text alone, a video, an image and a video; then single images.
    """

    policy: PolicyModel
    processor: PromptProcessor
    samples: tuple[Sample, ...]
    params: SamplingParams

    @property
    def eos_id(self) -> int:
        return self.processor.tokenizer.eos_token_id

    def fresh(self, *, store_bytes: int = 0, root: Path = Path("/"), **options: Any) -> PromptProcessor:
        """A processor with the same settings, empty caches and these options of `PromptEncoder`."""
        base = self.processor.encoder
        cache = make_media_cache(root, max_bytes=store_bytes)
        return make_prompt_processor(base.family, base.hf_processor, base.response_format, media_cache=cache, **options)

    def save(self, folder: Path) -> None:
        """Write the model and its processor into a folder that `model.path` may name."""
        self.policy.model.save_pretrained(folder)
        self.processor.hf_processor.save_pretrained(folder)

    def experiences(
        self, samples: Iterable[Sample], group_size: int = 1, *, advantage: float = 1.0, **params: Any
    ) -> list[Experience]:
        """Sample a group of rollouts for each sample; `params` replace those of `self.params`."""
        prompts = [self.processor.build(sample) for sample in samples]
        groups = self.sampler().generate(prompts, group_size, replace(self.params, **params), step=0)
        return [Experience(rollout=rollout, advantage=advantage) for group in groups for rollout in group]

    def collate(self, experiences: Sequence[Experience], *, shared_prefix: bool = True) -> Batch:
        groups = group_by_prompt(experiences)
        return collate(groups, self.processor, pad_id=self.eos_id, shared_prefix=shared_prefix)

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
def place(tmp_path_factory) -> DatasetContext:
    return DatasetContext(work_dir=tmp_path_factory.mktemp("data"), base_dir=Path.cwd(), seed=0)


@pytest.fixture(scope="session")
def scene_samples(place) -> tuple[Sample, ...]:
    makers = (scenes.counting, scenes.grounding, scenes.digits)
    return tuple(sample for make in makers for sample in make(place, split="train", size=4))


@pytest.fixture(scope="session")
def clip(tmp_path_factory) -> VideoRef:
    return write_video(tmp_path_factory.mktemp("clips") / "clip.mp4", range(24), size=(64, 32))


@pytest.fixture(scope="session")
def make_tiny(scene_samples, clip) -> Callable[[str], TinyModel]:
    """Make a tiny policy of a family; each call makes new weights, so that a test may train them.

    Its heads have a quarter of `hidden_size` channels.
    """

    @cache
    def words():
        response_format = ResponseFormat()
        questions = [part for sample in scene_samples for part in sample.parts if isinstance(part, str)]
        return (*questions, *(response_format.render(sample.target) for sample in scene_samples))

    def make(family: str = "qwen2_5_vl", hidden_size: int = 48) -> TinyModel:
        spec = FromScratchConfig(
            family=family,
            vision=VisionFromScratchConfig(hidden_size=32, num_heads=2, intermediate_size=32),
            language=LanguageFromScratchConfig(
                hidden_size=hidden_size, num_heads=4, num_kv_heads=2, intermediate_size=64, vocab_size=330
            ),
        )
        tokenizer = train_tokenizer(words(), spec.language.vocab_size)
        policy = PolicyModel(make_model(spec, tokenizer, seed=1))
        hf_processor = make_processor(spec, tokenizer, (2304, 2304))
        processor = make_prompt_processor(
            get_family(policy.model.config), hf_processor, media_cache=make_media_cache(max_bytes=10**8)
        )
        params = SamplingParams(banned_token_ids=policy.banned_ids(tokenizer), max_new_tokens=6)
        return TinyModel(policy=policy, processor=processor, samples=_mixed(scene_samples, clip), params=params)

    return make


@pytest.fixture(scope="module")
def tiny(make_tiny) -> TinyModel:
    """The tiny policy that the tests of a file share."""
    return make_tiny()

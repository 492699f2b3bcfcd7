"""Prints how far log-probs and gradients of the shared-prefix forward are from those of the plain forward.

    python tools/exactness.py                      # tiny models of all families, made on the spot
    python tools/exactness.py --model Qwen/Qwen2.5-VL-3B-Instruct --dtype bfloat16

Images and videos are noise, and completions are random: only the two computations matter. Rows named "wrong" are
computed wrongly on purpose, and must stand out.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from mmrl.answer import ResponseFormat
from mmrl.config.schema import (
    FromScratchConfig,
    LanguageFromScratchConfig,
    MediaLimitsConfig,
    ModelConfig,
    VideoConfig,
    VisionFromScratchConfig,
)
from mmrl.learner.shared_prefix_check import compare_layouts
from mmrl.media.cache import MediaCache
from mmrl.policy.batch import Batch, PackedGroup, collate
from mmrl.policy.encoder import PromptEncoder
from mmrl.policy.families import FAMILIES, get_family
from mmrl.policy.policy import PolicyModel
from mmrl.policy.pretrained import ModelBundle, load_pretrained
from mmrl.policy.processor import PromptProcessor
from mmrl.policy.tiny_models import make_model, make_processor, train_tokenizer
from mmrl.types import (
    AnswerType,
    Author,
    ContentPart,
    Experience,
    FinishReason,
    MediaPolicy,
    Prompt,
    Rollout,
    Sample,
    SamplingParams,
    Segment,
    Target,
)
from mmrl_datasets.media_files import RenderedVideo, save_mp4, save_png

MEDIA_BY_PROMPT = {"text": "", "image": "i", "two images": "ii", "video": "v", "image and video": "iv"}
COMPLETION_LENGTHS = (23, 1, 40, 11)
VIDEO = VideoConfig(min_pixels=1024, max_pixels=4096)


def make_prompt_processor(loaded: ModelBundle, folder: Path) -> PromptProcessor:
    """Return the processor of a model's prompts, whose media lie in `folder`."""
    cache = MediaCache(MediaPolicy(roots=(folder.resolve(),)), MediaLimitsConfig(), max_bytes=0)
    options = {"video": VIDEO, "add_instruction": False, "max_prompt_tokens": 16384}
    return PromptProcessor(PromptEncoder(loaded, ResponseFormat(), cache, **options))


def make_samples(folder: Path) -> Iterator[Sample]:
    """Yield a question about each choice of media, which are noise."""
    rng = np.random.default_rng(0)
    frames = list(map(Image.fromarray, rng.integers(0, 256, (6, 64, 96, 3), np.uint8)))
    image, video = save_png(frames[0], folder, "noise"), save_mp4(RenderedVideo(frames=frames, fps=2), folder, "noise")
    for name, kinds in MEDIA_BY_PROMPT.items():
        parts: list[ContentPart] = [part for kind in kinds for part in ("a few words", image if kind == "i" else video)]
        target = Target(answer_type=AnswerType.TEXT, value="")
        yield Sample(id=name, task="t", parts=(*parts, "are enough"), target=target)


def make_experiences(prompt: Prompt, processor: PromptProcessor) -> list[Experience]:
    """Return completions of several lengths, of random tokens."""
    vocabulary = {*processor.tokenizer.get_vocab().values()}
    words, rng = sorted(vocabulary - {*processor.tokenizer.added_tokens_decoder}), random.Random(0)
    experiences = []
    for index, length in enumerate(COMPLETION_LENGTHS):
        tokens = tuple(rng.choices(words, k=length))
        rollout = Rollout(
            prompt=prompt,
            index=index,
            segments=(Segment(token_ids=tokens, logprobs=(0.0,) * length, author=Author.POLICY),),
            text="",
            answer=ResponseFormat().parse("", AnswerType.TEXT),
            finish_reason=FinishReason.LENGTH,
            sampling_params=SamplingParams(max_new_tokens=max(COMPLETION_LENGTHS)),
        )
        experiences.append(Experience(rollout=rollout, advantage=1.0))
    return experiences


def make_wrong_batches(batch: Batch) -> Iterator[tuple[str, Batch]]:
    """Return batches that a check must refuse: positions that do not restart, and siblings that see each other."""
    assert batch.packed_groups is not None
    ((prompt, lengths),) = batch.packed_groups
    first, count = batch.position_ids_3BL[..., :prompt], sum(lengths)
    onward = (first.max() + 1 + torch.arange(count)).expand(3, 1, -1)
    yield "wrong: positions", replace(batch, position_ids_3BL=torch.cat([first, onward], dim=-1))
    yield "wrong: leak", replace(batch, packed_groups=(PackedGroup(prompt, (count,)),))


def compare_model(loaded: ModelBundle) -> Iterator[tuple[str, str, str, str]]:
    """Yield rows for each prompt: name, activations, largest difference in nats, the gradient's relative difference."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        policy, processor = PolicyModel(loaded.model), make_prompt_processor(loaded, folder)
        prompts = list(map(processor.build, make_samples(folder)))
    for recompute in (False, True):
        if recompute:
            loaded.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for prompt in prompts:
            group = make_experiences(prompt, processor)
            packed, plain = (collate([group], processor, pad_id=0, shared_prefix=shared) for shared in (True, False))
            compared = [(prompt.sample.id, packed)]
            if prompt.sample.id == "two images" and not recompute:
                compared += make_wrong_batches(packed)
            for what, batch in compared:
                found = compare_layouts(policy, batch, plain)
                yield what, "recomputed" if recompute else "kept", f"{found.logprobs:.1e}", f"{found.gradient:.1e}"


def make_tiny_model(family: str) -> ModelBundle:
    """Return a tiny model with grouped query heads."""
    vision, language = (
        VisionFromScratchConfig(hidden_size=32, num_heads=2, intermediate_size=32),
        LanguageFromScratchConfig(hidden_size=64, num_heads=4, num_kv_heads=2),
    )
    spec = FromScratchConfig.model_validate({"family": family, "vision": vision, "language": language})
    tokenizer = train_tokenizer(["a few words are enough"], spec.language.vocab_size)
    model = make_model(spec, tokenizer, seed=0)
    return ModelBundle(
        family=get_family(model.config), processor=make_processor(spec, tokenizer, (1024, 4096)), model=model
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub id; tiny models of all families when left out")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    models = (
        [load_pretrained(ModelConfig(path=arguments.model, dtype=arguments.dtype))]
        if arguments.model
        else map(make_tiny_model, FAMILIES)
    )
    table = Table(title=f"Packed against plain, {arguments.dtype}, {arguments.device}")
    for heading in ("family", "prompt", "activations", "max |dlogp|", "gradient"):
        table.add_column(heading)
    for loaded in models:
        loaded.model.to(arguments.device, getattr(torch, arguments.dtype))
        for row in compare_model(loaded):
            table.add_row(loaded.family.model_type, *row)
    Console().print(table)


if __name__ == "__main__":
    main()

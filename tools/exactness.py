"""Prints how far log-probs and gradients of the shared-prefix forward are from those of the plain forward.

    python tools/exactness.py                      # tiny models of all families, made on the spot
    python tools/exactness.py --model Qwen/Qwen2.5-VL-3B-Instruct --dtype bfloat16

Pictures and videos are noise, prompts and completions are random: only the two computations matter. The last rows of
each model are computed wrongly on purpose, and must stand out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch
from rich.console import Console
from rich.table import Table

from mmrl.answer import ResponseFormat
from mmrl.config.schema import FromScratchConfig, LanguageFromScratchConfig, ModelConfig, VisionFromScratchConfig
from mmrl.learner.shared_prefix_check import compare_layouts
from mmrl.policy.batch import Batch, PackedGroup, Placeholders, PromptTensors, collate
from mmrl.policy.families import FAMILIES, Grid, PlaceholderRun, VideoTimeEncoding, get_family
from mmrl.policy.policy import PolicyModel
from mmrl.policy.pretrained import ModelBundle, load_pretrained
from mmrl.policy.tiny_models import make_model, make_processor, train_tokenizer
from mmrl.types import (
    AnswerType,
    Author,
    Experience,
    FinishReason,
    ImageRef,
    MediaRef,
    Prompt,
    Rollout,
    Sample,
    SamplingParams,
    Segment,
    Target,
    VideoRef,
)

MEDIA_BY_PROMPT = {"text": "", "image": "i", "two images": "ii", "video": "v", "image and video": "iv"}
GRIDS: dict[str, Grid] = {"i": (1, 8, 12), "v": (3, 4, 8)}
COMPLETION_LENGTHS = (23, 1, 40, 11)
IMAGE, VIDEO = ImageRef(path="noise.png", sha256=""), VideoRef(path="noise.mp4", sha256="")


class NoiseProcessor:
    """The part of a processor that packing uses, for prompts whose media are noise."""

    def __init__(self, loaded: ModelBundle) -> None:
        images = loaded.processor.image_processor
        self.placeholders = Placeholders(
            image_id=loaded.processor.image_token_id,
            video_id=loaded.processor.video_token_id,
            merge_size=images.merge_size,
        )
        self._family = loaded.family
        self._patch_width = 3 * images.temporal_patch_size * images.patch_size**2
        self._vocab_size = len(loaded.processor.tokenizer)
        self._special_tokens = set(loaded.processor.tokenizer.added_tokens_decoder)
        self._placeholder_runs: dict[str, dict[int, list[PlaceholderRun]]] = {}

    def random_tokens(self, count: int, seed: int) -> tuple[int, ...]:
        """Return random tokens, none of them special."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, self._vocab_size, (4 * count,), generator=generator).tolist()
        return tuple(token for token in drawn if token not in self._special_tokens)[:count]

    def make_prompt(self, media_kinds: str) -> Prompt:
        """Return a prompt with these media ("i", "v") between words."""
        ids = list(self.random_tokens(20, 0))
        runs: dict[int, list[PlaceholderRun]] = {self.placeholders.image_id: [], self.placeholders.video_id: []}
        for place, kind in enumerate(media_kinds):
            token = self.placeholders.image_id if kind == "i" else self.placeholders.video_id
            found = (
                self._family.video_placeholder_runs(GRIDS[kind], 1.0) if kind == "v" else (PlaceholderRun(GRIDS[kind]),)
            )
            for run in found:
                ids += [token] * (prod(run.grid) // self.placeholders.merge_size**2)
                ids += (
                    self.random_tokens(3, place + 1)
                    if self._family.video_time is VideoTimeEncoding.TEXT_TIMESTAMPS
                    else ()
                )
            runs[token] += found
            ids += self.random_tokens(5, place + 10)
        refs: list[MediaRef] = [IMAGE if kind == "i" else VIDEO for kind in media_kinds]
        sample = Sample(
            id=media_kinds or "text", task="t", parts=tuple(refs), target=Target(answer_type=AnswerType.TEXT, value="")
        )
        self._placeholder_runs[sample.id] = runs
        grids = tuple(GRIDS[kind] for kind in media_kinds)
        return Prompt(
            sample=sample,
            token_ids=tuple(ids),
            grids=grids,
            resize_maps=(),
            coordinate_system=self._family.coordinate_system,
            digest=sample.id,
        )

    def prompt_tensors(self, prompt: Prompt) -> PromptTensors:
        """Return the tensors of a prompt, with noise for its media."""
        generator = torch.Generator().manual_seed(1)
        counts = {kind: prompt.grids.count(grid) * prod(grid) for kind, grid in GRIDS.items()}
        patches = {kind: torch.randn(count, self._patch_width, generator=generator) for kind, count in counts.items()}
        return PromptTensors(
            image_patches_MD=patches["i"],
            video_patches_MD=patches["v"],
            position_ids_3P=self._family.position_ids(
                prompt.token_ids, self._placeholder_runs[prompt.sample.id], merge_size=self.placeholders.merge_size
            ),
            second_per_grid_V=torch.ones(len(prompt.sample.media)),
        )

    def make_experiences(self, prompt: Prompt) -> list[Experience]:
        """Return completions of several lengths."""
        sampling_params = SamplingParams(max_new_tokens=max(COMPLETION_LENGTHS))
        experiences = []
        for index, length in enumerate(COMPLETION_LENGTHS):
            segment = Segment(
                token_ids=self.random_tokens(length, 100 + index), logprobs=(0.0,) * length, author=Author.POLICY
            )
            rollout = Rollout(
                prompt=prompt,
                index=index,
                segments=(segment,),
                text="",
                answer=ResponseFormat().parse("", AnswerType.TEXT),
                finish_reason=FinishReason.LENGTH,
                sampling_params=sampling_params,
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
    policy, feeder = PolicyModel(loaded.model), NoiseProcessor(loaded)
    for recompute in (False, True):
        if recompute:
            loaded.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for name, kinds in MEDIA_BY_PROMPT.items():
            group = feeder.make_experiences(feeder.make_prompt(kinds))
            packed, plain = (collate([group], feeder, pad_id=0, shared_prefix=shared) for shared in (True, False))
            compared = [(name, packed)]
            if name == "two images" and not recompute:
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

"""How exact the shared-prefix forward is: its log-probs and gradients against the plain forward's, as a table.

    python tools/exactness.py                      # tiny models of all three families, made on the spot
    python tools/exactness.py --model Qwen/Qwen2.5-VL-3B-Instruct --dtype bfloat16

Pictures and videos are noise, prompts and completions random: nothing but the two computations is looked at. The last
rows of each model are computed wrongly on purpose, and must stand out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch
from rich.console import Console
from rich.table import Table

from mmrl.answer import Grammar
from mmrl.config.schema import LanguageScratch, Model, Scratch, VisionScratch
from mmrl.learner.shared_prefix_check import difference
from mmrl.policy.batch import Batch, Placeholders, PromptTensors, Stem, collate
from mmrl.policy.families import FAMILIES, Clock, family_of
from mmrl.policy.mrope import Grid, Run, mrope_positions
from mmrl.policy.pretrained import Loaded, load_pretrained
from mmrl.policy.qwen_vl import Policy
from mmrl.policy.tiny_models import make_model, make_processor, train_tokenizer
from mmrl.types import (
    Author,
    Experience,
    Finish,
    ImageRef,
    Kind,
    MediaRef,
    Prompt,
    Rollout,
    Sample,
    SamplingLaw,
    Segment,
    Target,
    VideoRef,
)

KINDS = {"text": "", "image": "i", "two images": "ii", "video": "v", "image and video": "iv"}
GRIDS: dict[str, Grid] = {"i": (1, 8, 12), "v": (3, 4, 8)}
LENGTHS = (23, 1, 40, 11)
IMAGE, VIDEO = ImageRef(path="noise.png", sha256=""), VideoRef(path="noise.mp4", sha256="")


class Noise:
    """A feeder of prompts that hold media of noise."""

    def __init__(self, loaded: Loaded) -> None:
        images = loaded.processor.image_processor
        self.placeholders = Placeholders(
            image=loaded.processor.image_token_id, video=loaded.processor.video_token_id, merge=images.merge_size
        )
        self._family = loaded.family
        self._width = 3 * images.temporal_patch_size * images.patch_size**2
        self._words = len(loaded.processor.tokenizer)
        self._special = set(loaded.processor.tokenizer.added_tokens_decoder)
        self._runs: dict[str, dict[int, list[Run]]] = {}

    def words(self, count: int, seed: int) -> tuple[int, ...]:
        """Random tokens, none of them special."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(0, self._words, (4 * count,), generator=generator).tolist()
        return tuple(token for token in drawn if token not in self._special)[:count]

    def prompt(self, kinds: str) -> Prompt:
        """A prompt with these media ("i", "v") between words."""
        ids = list(self.words(20, 0))
        runs: dict[int, list[Run]] = {self.placeholders.image: [], self.placeholders.video: []}
        for place, kind in enumerate(kinds):
            token = self.placeholders.image if kind == "i" else self.placeholders.video
            found = self._family.video_runs(GRIDS[kind], 1.0) if kind == "v" else (Run(GRIDS[kind]),)
            for run in found:
                ids += [token] * (prod(run.grid) // self.placeholders.merge**2)
                ids += self.words(3, place + 1) if self._family.clock is Clock.STAMPS else ()
            runs[token] += found
            ids += self.words(5, place + 10)
        refs: list[MediaRef] = [IMAGE if kind == "i" else VIDEO for kind in kinds]
        sample = Sample(id=kinds or "text", task="t", parts=tuple(refs), target=Target(kind=Kind.TEXT, value=""))
        self._runs[sample.id] = runs
        grids = tuple(GRIDS[kind] for kind in kinds)
        return Prompt(
            sample=sample, ids=tuple(ids), grids=grids, resizes=(), frame=self._family.frame, digest=sample.id
        )

    def tensors(self, prompt: Prompt) -> PromptTensors:
        """Noise for its media."""
        generator = torch.Generator().manual_seed(1)
        counts = {kind: sum(grid == GRIDS[kind] for grid in prompt.grids) * prod(GRIDS[kind]) for kind in GRIDS}
        patches = {kind: torch.randn(count, self._width, generator=generator) for kind, count in counts.items()}
        return PromptTensors(
            images_ND=patches["i"],
            videos_ND=patches["v"],
            positions_3P=mrope_positions(prompt.ids, self._runs[prompt.sample.id], merge=self.placeholders.merge),
            seconds_V=torch.ones(len(prompt.sample.media)),
        )

    def group(self, prompt: Prompt) -> list[Experience]:
        """Completions of several lengths."""
        law = SamplingLaw(max_new_tokens=max(LENGTHS))
        experiences = []
        for index, length in enumerate(LENGTHS):
            segment = Segment(ids=self.words(length, 100 + index), logps=(0.0,) * length, author=Author.POLICY)
            rollout = Rollout(
                prompt=prompt,
                index=index,
                segments=(segment,),
                text="",
                answer=Grammar().parse("", Kind.TEXT),
                finish=Finish.LENGTH,
                law=law,
            )
            experiences.append(Experience(rollout=rollout, advantage=1.0))
        return experiences


def wrong(batch: Batch) -> Iterator[tuple[str, Batch]]:
    """What must not pass: positions that do not restart, and siblings that see each other."""
    assert batch.tree is not None
    ((prompt, lengths),) = batch.tree
    first, count = batch.positions_3BL[..., :prompt], sum(lengths)
    onward = (first.max() + 1 + torch.arange(count)).expand(3, 1, -1)
    yield "wrong: positions", replace(batch, positions_3BL=torch.cat([first, onward], dim=-1))
    yield "wrong: leak", replace(batch, tree=(Stem(prompt, (count,)),))


def rows(loaded: Loaded) -> Iterator[tuple[str, str, str, str]]:
    """One model, prompt by prompt: what, activations, largest difference in nats, relative one of the gradient."""
    policy, feeder = Policy(loaded.model), Noise(loaded)
    for recompute in (False, True):
        if recompute:
            loaded.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for name, kinds in KINDS.items():
            group = feeder.group(feeder.prompt(kinds))
            packed, plain = (collate([group], feeder, pad_id=0, shared_prefix=shared) for shared in (True, False))
            compared = [(name, packed)]
            if name == "two images" and not recompute:
                compared += wrong(packed)
            for what, batch in compared:
                found = difference(policy, batch, plain)
                yield what, "recomputed" if recompute else "kept", f"{found.logps:.1e}", f"{found.gradient:.1e}"


def scratch(family: str) -> Loaded:
    """A tiny model with grouped query heads."""
    vision, language = VisionScratch(width=32, heads=2, mlp=32), LanguageScratch(width=64, heads=4, kv_heads=2)
    spec = Scratch.model_validate({"family": family, "vision": vision, "language": language})
    tokenizer = train_tokenizer(["a few words are enough"], spec.language.vocab)
    model = make_model(spec, tokenizer, seed=0)
    return Loaded(family=family_of(model.config), processor=make_processor(spec, tokenizer, (1024, 4096)), model=model)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or hub id; tiny models of all families when left out")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    models = (
        [load_pretrained(Model(path=arguments.model, dtype=arguments.dtype))]
        if arguments.model
        else map(scratch, FAMILIES)
    )
    table = Table(title=f"Packed against plain, {arguments.dtype}, {arguments.device}")
    for heading in ("family", "prompt", "activations", "max |dlogp|", "gradient"):
        table.add_column(heading)
    for loaded in models:
        loaded.model.to(arguments.device, getattr(torch, arguments.dtype))
        for row in rows(loaded):
            table.add_row(loaded.family.model_type, *row)
    Console().print(table)


if __name__ == "__main__":
    main()

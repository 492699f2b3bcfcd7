"""CPU time of transformers' `generate` with `num_return_sequences`, divided by our sampler's.

    python tools/bench/rollout.py
    python tools/bench/rollout.py --family qwen3_5
    python tools/bench/rollout.py --size wide --prompts 4    # a language model as wide as in learner_vs_trl.py
    python tools/bench/rollout.py --size 3b --prompts 8      # Qwen2.5-VL-3B's shape, on a CUDA device

Both draw the same tokens: transformers' logits are turned into our choice by the same random numbers. Then the learner
scores the samples, and the mean difference of log-probs is printed. A model of 3B is in bfloat16, whose rounding lets
the two draw different tokens, but equally many; its seconds are wall-clock.
"""

from __future__ import annotations

import mmrl.policy  # noqa: F401  # isort: skip - mends what transformers would trip over, so it comes first

import argparse
import hashlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from learner_vs_trl import MODEL as LEARNER_MODEL
from learner_vs_trl import MODEL_3B, make_model_3b, make_spec
from PIL import Image, ImageOps
from results import make_parser, write_results
from sklearn.datasets import load_sample_images
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerFast

from mmrl.answer import ResponseFormat
from mmrl.config.schema import (
    FromScratchConfig,
    LanguageFromScratchConfig,
    MediaLimitsConfig,
    ModelConfig,
    VisionFromScratchConfig,
)
from mmrl.media.cache import MediaCache
from mmrl.policy.batch import TokenSpan, collate, group_by_prompt, pad_left
from mmrl.policy.encoder import PromptEncoder
from mmrl.policy.families import FAMILIES
from mmrl.policy.logprobs import compute_logprobs, sample_tokens
from mmrl.policy.policy import PolicyModel, banned_ids
from mmrl.policy.pretrained import ProcessorBundle
from mmrl.policy.processor import PromptProcessor
from mmrl.policy.tiny_models import make_model, make_processor, train_tokenizer
from mmrl.rollout.engine_sampler import EngineSampler
from mmrl.rollout.engines.hf import HfEngine
from mmrl.types import AnswerType, Experience, ImageRef, MediaPolicy, Prompt, Sample, SamplingParams, Target
from mmrl.utils.seeds import derive_seed

SEED_PARTS = ("bench",)
QUESTION = "How many flowers are there in the picture, and which of them is the largest? " * 3
MODEL = FromScratchConfig(
    vision=VisionFromScratchConfig(hidden_size=128, num_layers=4, num_heads=4, intermediate_size=512),
    language=LanguageFromScratchConfig(
        hidden_size=256,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=1024,
        # Together, a token's experts are as wide as the feed-forward network of a family without experts.
        num_experts=8,
        experts_per_token=2,
        expert_intermediate_size=512,
        linear_head_dim=128,
        vocab_size=2000,
    ),
)
# With patches of this model's size, so a picture has as many tokens.
WIDE = LEARNER_MODEL.model_copy(
    update={"vision": LEARNER_MODEL.vision.model_copy(update={"patch_size": MODEL.vision.patch_size})}
)
SIZES = {"small": MODEL, "wide": WIDE, "3b": MODEL_3B}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationComparison:
    """Holds a model, prompts, and the numbers of rollouts and tokens to generate."""

    policy: PolicyModel
    plain_model: PreTrainedModel  # the same model, as transformers runs it
    processor: PromptProcessor
    prompts: Sequence[Prompt]
    sampling_params: SamplingParams
    group_size: int

    def generate_mmrl(self) -> list[list[int]]:
        """Return the token ids that our sampler draws."""
        groups = self.make_sampler().generate(self.prompts, self.group_size, self.sampling_params, step=0)
        return [list(rollout.segments[0].token_ids) for group in groups for rollout in group]

    @torch.no_grad()
    def generate_transformers(self) -> list[list[int]]:
        """Return the token ids that `generate` draws."""
        spans = [TokenSpan.from_prompt(prompt, self.processor) for prompt in self.prompts]
        batch = pad_left(spans, self.processor.placeholders, self.processor.tokenizer.eos_token_id)
        batch = batch.to(self.policy.model.device)
        config = GenerationConfig(
            do_sample=True,  # among one token
            top_k=0,
            num_return_sequences=self.group_size,
            max_new_tokens=self.sampling_params.max_new_tokens,
            eos_token_id=None,
            pad_token_id=self.processor.tokenizer.eos_token_id,
        )
        patches, grids = batch.media.image_patches_MD, batch.media.image_grids_I3.to(self.policy.model.device)
        images = {"pixel_values": patches}
        if "image" not in self.plain_model.input_modalities:
            # For Qwen3.5's class, `generate` would repeat single patches instead of images. Other classes encode images
            # once, before rows are repeated; so does this.
            features = self.plain_model.base_model.get_image_features(patches, grids, return_dict=True)
            images = {"mm_encoder_outputs": {"image": features}}
        out = self.plain_model.generate(
            **images,
            input_ids=batch.input_ids_BP,
            attention_mask=batch.attention_mask_BP,
            mm_token_type_ids=batch.token_types_BP,
            image_grid_thw=grids,
            generation_config=config,
            logits_processor=[ForcedTokenProcessor(self)],
        )
        drawn: list[list[int]] = out[:, batch.input_ids_BP.shape[1] :].tolist()
        return drawn

    def make_sampler(self) -> EngineSampler:
        """Return a new sampler."""
        engine = HfEngine(self.policy, self.processor)  # with the learner's own weights, so it never has to load any
        return EngineSampler(engine, self.processor, load_version=lambda _: None, seed_parts=SEED_PARTS)

    def logprob_diff(self) -> float:
        """Return the mean difference, in nats, between log-probs as sampled and as the learner computes them."""
        groups = self.make_sampler().generate(self.prompts, self.group_size, self.sampling_params, step=0)
        experiences = [Experience(rollout=rollout, advantage=1.0) for group in groups for rollout in group]
        batch = collate(group_by_prompt(experiences), self.processor, pad_id=self.processor.tokenizer.eos_token_id)
        with torch.no_grad():
            scores = self.policy.compute_logprobs(batch)
        recorded = [logp for group in groups for rollout in group for s in rollout.segments for logp in s.logprobs]
        return float((scores.logprobs_N.cpu() - torch.tensor(recorded)).abs().mean())


class ForcedTokenProcessor(LogitsProcessor):
    """Masks all logits but one: the token that our sampling parameters and random numbers choose."""

    def __init__(self, comparison: GenerationComparison) -> None:
        rows = [(prompt.sample.id, index) for prompt in comparison.prompts for index in range(comparison.group_size)]
        seeds = [derive_seed(*SEED_PARTS, 0, *row) for row in rows]
        chances = [
            np.random.Generator(np.random.Philox(seed)).random(comparison.sampling_params.max_new_tokens)
            for seed in seeds
        ]
        self._uniforms_RT = torch.from_numpy(np.stack(chances)).to(comparison.policy.model.device)
        self._sampling_params = comparison.sampling_params
        self._position = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return logits of which one a row is finite."""
        logps = compute_logprobs(
            scores, self._sampling_params.effective_temperature, self._sampling_params.banned_token_ids
        )
        chosen = sample_tokens(logps, self._sampling_params, self._uniforms_RT[:, self._position])
        self._position += 1
        return torch.full_like(scores, -torch.inf).scatter_(-1, chosen[:, None], 0.0)


def make_comparison(folder: Path, asked: argparse.Namespace) -> GenerationComparison:
    """Return a model with random weights, and questions about crops of a photograph."""
    spec = MODEL_3B if asked.size == "3b" else make_spec(SIZES[asked.size], asked.family)
    tokenizer = train_tokenizer([QUESTION], spec.language.vocab_size)
    processor = make_processor(spec, tokenizer, (16 * 16 * 14 * 16, 16 * 16 * 14 * 16))
    store = MediaCache(MediaPolicy(roots=(folder,)), MediaLimitsConfig(), max_bytes=2**26)
    bundle = ProcessorBundle(family=FAMILIES[asked.family], processor=processor)
    video = ModelConfig(from_scratch=spec).video
    encoder = PromptEncoder(bundle, ResponseFormat(), store, video=video, add_instruction=False, max_prompt_tokens=4096)
    plain_model, model = (make_sized_model(spec, tokenizer) for _ in range(2))
    policy = PolicyModel(model)
    asker = PromptProcessor(encoder)
    eos: int = tokenizer.eos_token_id
    banned = tuple(sorted({*banned_ids(tokenizer, policy.model.get_input_embeddings().num_embeddings), eos}))
    photograph = Image.fromarray(load_sample_images().images[0])
    return GenerationComparison(
        policy=policy,
        plain_model=plain_model.eval(),
        processor=asker,
        prompts=[asker.build(make_sample(folder, photograph, place)) for place in range(asked.prompts)],
        sampling_params=SamplingParams(
            banned_token_ids=banned, max_new_tokens=asked.completion
        ),  # nothing ends early, so both draw as much
        group_size=asked.group,
    )


def make_sized_model(spec: FromScratchConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return a model with the same weights at each call."""
    return make_model_3b(tokenizer, "bfloat16") if spec is MODEL_3B else make_model(spec, tokenizer, seed=0)


def read_clock(device: torch.device) -> float:
    """Return seconds of this process's CPU time, or with a CUDA device of the clock."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def make_sample(folder: Path, photograph: Image.Image, index: int) -> Sample:
    """Return a question about a crop."""
    path = folder / f"{index}.png"
    ImageOps.fit(photograph.crop((10 * index, 0, 400 + 10 * index, 400)), (256, 224)).save(path)
    ref = ImageRef(path=str(path), sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    target = Target(answer_type=AnswerType.NUMBER, value=1)
    return Sample(id=f"flowers-{index}", task="count", parts=(ref, QUESTION), target=target)


def main() -> None:
    """Measure in pairs, and print the median of their ratios."""
    options = make_parser(__doc__)
    options.add_argument("--family", choices=tuple(FAMILIES), default=MODEL.family)
    options.add_argument("--prompts", type=int, default=2)
    options.add_argument("--group", type=int, default=8)
    options.add_argument("--completion", type=int, default=100)
    options.add_argument("--pairs", type=int, default=5)
    sizes = "the language model has 256 or 512 channels, 23 million parameters, or is Qwen2.5-VL-3B's"
    options.add_argument("--size", choices=SIZES, default="small", help=sizes)
    asked = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bench = make_comparison(Path(folder), asked)
        print(f"prompt {len(bench.prompts[0].token_ids)} tokens, completion {asked.completion}, group {asked.group}")
        seconds: dict[str, list[float]] = {"transformers": [], "ours": []}
        for pair in range(asked.pairs + 1):
            drawn = {}
            for name, run in (("transformers", bench.generate_transformers), ("ours", bench.generate_mmrl)):
                start = read_clock(bench.policy.model.device)
                drawn[name] = run()
                if pair:  # the first warms up
                    seconds[name].append(read_clock(bench.policy.model.device) - start)
            same = np.mean(np.array(drawn["ours"]) == np.array(drawn["transformers"]))
            if same < 1 and asked.size != "3b":
                raise SystemExit("the two drew different tokens")
        ratios = [theirs / ours for theirs, ours in zip(seconds["transformers"], seconds["ours"], strict=True)]
        found = ", ".join(f"{name} {median(of):.2f}" for name, of in seconds.items())
        print(f"{same:.0%} of tokens are the same; seconds: {found}")
        print(f"ratio {median(ratios):.2f} (pairs: {', '.join(f'{ratio:.2f}' for ratio in sorted(ratios))})")
        numbers = {"family": asked.family, "size": asked.size, "ratio": median(ratios), "same_tokens": float(same)}
        numbers |= {f"{name}_s": median(of) for name, of in seconds.items()}
        numbers["logprob_diff_nats"] = bench.logprob_diff()
        write_results(asked.json, "rollout", numbers)
        apart = numbers["logprob_diff_nats"]
        print(f"log-probs as sampled and as the learner has them: {apart:.1e} nats apart on average")


if __name__ == "__main__":
    main()

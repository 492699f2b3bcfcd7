"""What scenes with real vLLM engines share.

A scene is a function of `Questions` that returns facts for tests to judge. Engines need processes of their
own, which load torch and vLLM for ten seconds: `start` has one process play several scenes, one after the other.
"""

import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from fork_server import Forked
from processors import make_media_cache, make_prompt_processor
from recorded import recorded

from mmrl import types
from mmrl.checkpoint import export_hf_folder
from mmrl.config import schema
from mmrl.distributed.ranks import SingleProcess
from mmrl.policy.batch import collate, group_by_prompt
from mmrl.policy.lora import LoraAdapter
from mmrl.policy.policy import PolicyModel
from mmrl.policy.pretrained import ModelExport
from mmrl.policy.processor import PromptProcessor
from mmrl.policy.tiny_models import make_model
from mmrl.rollout.engine_sampler import EngineSampler
from mmrl.rollout.engines.base import EngineContext, RolloutEngine
from mmrl.rollout.engines.vllm_start import build_engine_args
from mmrl.rollout.weight_sync import PolicyWeightStream
from mmrl.utils.activity import Activity

STEP, SIBLINGS, LONGEST = 3, 3, 1024
SAMPLES = ("text-only", "one image", "two-images", "video", "image-and-video")
VIDEO = schema.VideoConfig(min_pixels=1024, max_pixels=2304)
WORKER = Path(__file__).with_name("engine_worker.py")
# Largest difference, in nats, between what an engine says of a token and what the learner finds, in float32. Kernels
# round differently on every kind of CPU: the largest honest difference seen is 1.0e-5 (AMD, a video), most are 1e-6.
# The smallest error that these tests make on purpose is 0.1 (positions as transformers counts them on a video);
# others, old weights or a missing adapter, are above 0.4. The bound keeps a factor of 30 from both.
ROUNDING = 3e-4
# In bfloat16 they differ by up to 3e-2 in one token, and by at most 8e-3 on average.
ROUNDING_BFLOAT16 = 1e-1
# With experts too: where a router rounds otherwise, a token goes to another expert. Seen: 0.19 in one token, 7e-3 on
# average; with old weights above 1.1.
ROUNDING_EXPERTS_BFLOAT16 = 0.35


@dataclass(frozen=True, kw_only=True)
class Questions:
    """A tiny model, its samples by name, a video, and a folder to work in."""

    spec: schema.FromScratchConfig
    processor: PromptProcessor
    samples: dict[str, types.Sample]
    clip: types.VideoRef
    params: types.SamplingParams
    folder: Path

    @property
    def dtype(self) -> str:
        """vLLM's Gated DeltaNet for CPUs works only in bfloat16."""
        return "bfloat16" if self.processor.encoder.family.has_recurrent_layers else "float32"


def questions(tiny: Any, family: str, clip: types.VideoRef, folder: Path) -> Questions:
    """Heads of 32, as vLLM's attention wants on a CPU; `clip` in place of the tiny model's video, which is shorter."""
    one, two, text, video, both, *_ = tiny.samples
    video, both = (
        replace(sample, parts=tuple(clip if isinstance(part, types.VideoRef) else part for part in sample.parts))
        for sample in (video, both)
    )
    known = tiny.processor.encoder
    cache = make_media_cache(max_bytes=10**8)
    processor = make_prompt_processor(known.family, known.hf_processor, media_cache=cache, video=VIDEO)
    return Questions(
        spec=schema.FromScratchConfig(
            family=family,
            vision=schema.VisionFromScratchConfig(hidden_size=32, num_heads=2, intermediate_size=32),
            language=schema.LanguageFromScratchConfig(
                hidden_size=64, num_heads=2, num_kv_heads=1, intermediate_size=64, vocab_size=330, linear_head_dim=128
            ),
        ),
        processor=processor,
        samples=dict(zip(SAMPLES, (text, one, two, video, both), strict=True)),
        clip=clip,
        params=replace(tiny.params, temperature=0.7, max_new_tokens=12),
        folder=folder,
    )


def start(scenes: Mapping[str, Questions], folder: Path) -> Forked:
    """Start a process that plays scenes, by name, in their order; `facts` waits for its end."""
    (folder / "questions.pkl").write_bytes(pickle.dumps(scenes))
    return Forked([WORKER, folder], env={"HF_HUB_OFFLINE": "1"})


def facts(process: Forked, folder: Path) -> dict[str, dict[str, Any]]:
    """Return what each scene found out."""
    output, errors = process.communicate(timeout=1200)
    assert process.returncode == 0, (output + errors)[-5000:]
    found: dict[str, dict[str, Any]] = json.loads((folder / "facts.json").read_text())
    return found


class Scene:
    """A policy and what an engine draws beside it."""

    def __init__(self, questions: Questions, *, lora: schema.LoraConfig | None = None) -> None:
        self.spec, self.clip = questions.spec, questions.clip
        model = make_model(questions.spec, questions.processor.tokenizer, seed=1, dtype=questions.dtype)
        family = questions.processor.encoder.family
        export_hf_folder(questions.folder / "model", ModelExport(model, family), questions.processor.hf_processor)
        self.adapter = LoraAdapter(model, lora, seed=2) if lora else None
        self.cuda = torch.cuda.is_available()
        self.policy = PolicyModel(model.to("cuda") if self.cuda else model)
        self.processor, self.params, self.folder = questions.processor, questions.params, questions.folder
        self.samples = questions.samples
        self.prompts = {name: self.processor.build(sample) for name, sample in questions.samples.items()}
        self.lora = lora
        self.arguments = self.build_arguments(questions.dtype)
        self.warnings: list[str] = []
        self.activity = Activity()

    @property
    def model(self) -> str:
        return str(self.folder / "model")

    def build_arguments(self, dtype: str, *, float32_output_layer: bool = False) -> dict[str, Any]:
        """Return the arguments of an engine."""
        return build_engine_args(
            schema.VllmConfig(gpu_memory_utilization=0.2, cpu_kv_cache_mib=64, max_num_seqs=64),
            dtype=dtype,
            max_model_len=LONGEST,
            cuda=self.cuda,
            lora=self.lora,
            family=self.policy.family,
            float32_output_layer=float32_output_layer,
        )

    def context(self, *, concurrent: bool = False, record_routes: bool = False) -> EngineContext:
        return EngineContext(
            policy=self.policy,
            processor=self.processor,
            adapter=self.adapter,
            model_folder=lambda: self.model,
            max_model_len=LONGEST,
            concurrent=concurrent,
            record_routes=record_routes,
            work_dir=self.folder,
            ranks=SingleProcess(),
            warn=self.warnings.append,
            activity=self.activity,
        )

    def sampler(self, engine: RolloutEngine, *, record_routes: bool = False) -> EngineSampler:
        return EngineSampler(
            engine,
            self.processor,
            load_version=lambda _: engine.load_weights(PolicyWeightStream(self.policy)),
            seed_parts=("test",),
            record_routes=record_routes,
        )

    def draw(
        self, sampler: EngineSampler, params: types.SamplingParams | None = None, step: int = STEP
    ) -> list[list[types.Rollout]]:
        return sampler.generate(list(self.prompts.values()), SIBLINGS, params or self.params, step=step)

    def gaps(self, groups: Sequence[Sequence[types.Rollout]]) -> dict[str, float]:
        """Largest |engine - learner|, nats, by prompt."""
        return {name: self.gap(group) for name, group in zip(self.prompts, groups, strict=True)}

    def gap(self, rollouts: Sequence[types.Rollout], tensor_provider: PromptProcessor | None = None) -> float:
        return float(self._token_gaps(rollouts, tensor_provider).max())

    def mean_gap(self, groups: Sequence[Sequence[types.Rollout]]) -> float:
        """Mean |engine - learner| of a token, nats, over all prompts."""
        return float(torch.cat([self._token_gaps(group) for group in groups]).mean())

    @torch.no_grad()
    def _token_gaps(
        self, rollouts: Sequence[types.Rollout], tensor_provider: PromptProcessor | None = None
    ) -> torch.Tensor:
        experiences = [types.Experience(rollout=rollout, advantage=0.0) for rollout in rollouts]
        pad_id = self.processor.tokenizer.eos_token_id
        batch = collate(group_by_prompt(experiences), tensor_provider or self.processor, pad_id=pad_id)
        scores = self.policy.compute_logprobs(batch.to(self.policy.model.device))
        return (scores.logprobs_N.cpu() - recorded(experiences)).abs()

    @torch.no_grad()
    def learn(self) -> None:
        """Another policy: every weight that is trained moves by about 0.05."""
        generator = torch.Generator().manual_seed(5)
        for parameter in self.policy.trainable.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter))

    @contextmanager
    def other_weights(self) -> Iterator[None]:
        """Give the policy other weights inside this block."""
        kept = {name: parameter.detach().clone() for name, parameter in self.policy.trainable.items()}
        self.learn()
        yield
        for name, parameter in self.policy.trainable.items():
            parameter.data.copy_(kept[name])

    def show_media(self, sampler: EngineSampler, groups: Sequence[Sequence[types.Rollout]]) -> dict[str, Any]:
        """Show media to siblings, as tools do, and continue; then show them the last of the media again, and continue.

        The media are parts of an image, a frame of a video, and a passage.
        """
        (image,) = self.samples["one image"].images
        part = replace(image, crop=(4, 8, 40, 32))
        frame = types.ImageRef(path=self.clip.path, sha256=self.clip.sha256, timestamp=1)
        passage = replace(self.clip, start=1.0, end=4.0)
        media = {
            "text-only": [frame],
            "one image": [part],
            "video": [passage],
            "image-and-video": [part, passage, replace(frame, crop=(0, 0, 32, 32))],
        }
        shown = {name: list(group) for name, group in zip(self.prompts, groups, strict=True) if name in media}
        for turn in (slice(None), slice(-1, None)):
            rollouts = [self._append(rollout, media[name][turn]) for name, group in shown.items() for rollout in group]
            extended = iter(sampler.extend(rollouts, self.params, step=STEP))
            shown = {name: [next(extended) for _ in group] for name, group in shown.items()}
        return {
            "ids after media": ids(shown.values()),
            "gaps after media": {name: self.gap(group) for name, group in shown.items()},
            "num shown": {name: len(group[0].observations) for name, group in shown.items()},
        }

    def _append(self, rollout: types.Rollout, media: Sequence[types.MediaRef]) -> types.Rollout:
        token_ids = tuple(self.processor.tokenizer("and").input_ids)
        text = types.Segment(token_ids=token_ids, logprobs=(0.0,) * len(token_ids), author=types.Author.ENVIRONMENT)
        segments = [segment for ref in media for segment in (text, self.processor.build_tool_segment(ref), text)]
        return replace(rollout, segments=(*rollout.segments, *segments))


def ids(groups: Any) -> list[list[list[int]]]:
    return [[[token for segment in r.segments for token in segment.token_ids] for r in group] for group in groups]


def logprobs(groups: Any) -> list[list[list[float]]]:
    return [[[value for segment in r.segments for value in segment.logprobs] for r in group] for group in groups]


def refusal(act: Callable[[], Any]) -> str:
    """What an error says, or that there was none."""
    try:
        act()
    except (types.UserError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"

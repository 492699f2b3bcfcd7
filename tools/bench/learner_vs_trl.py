"""Time and peak memory of a learner's pass over one group, in TRL's GRPOTrainer and here.

    pip install trl
    python tools/bench/learner_vs_trl.py                                # all cells, 5 pairs
    python tools/bench/learner_vs_trl.py --cell 300x100 --pairs 9
    python tools/bench/learner_vs_trl.py --family qwen3_5               # three layers of four are Gated DeltaNet
    python tools/bench/learner_vs_trl.py --cell 3b-300x100              # Qwen2.5-VL-3B's shape, on a CUDA device

A pass is the reference's log-probs, loss and backward, with entropies for the metrics; no optimizer. Each side is one
process with one thread; they take turns, so a busy machine slows both. Both are given the same weights, picture,
question, completions, behaviour log-probs and rewards; turning these into a batch is timed here and not in TRL. A ratio
is printed only if loss and gradients agree.

A cell is named by the tokens of the prompt and of a completion; `ragged` ones are half as long on average. The vision
tower attends to the whole picture in every block, without the windows of the released models. The cell `3b-300x100` is
as large as Qwen2.5-VL-3B, windows included, in bfloat16; seconds there are wall-clock, and memory is the device's.
"""

from __future__ import annotations

import ctypes
import gc
import json
import pickle
import random
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import version
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from PIL import Image
from results import make_parser, write_results
from rich.console import Console as Screen
from rich.table import Table
from torch import nn

from mmrl.algo.advantages import compute_advantages
from mmrl.config import load_config
from mmrl.config.schema import FromScratchConfig, LanguageFromScratchConfig, VisionFromScratchConfig
from mmrl.distributed.ranks import SingleProcess
from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir
from mmrl.policy.families import FAMILIES
from mmrl.policy.pretrained import hide_progress_bars
from mmrl.policy.tiny_models import make_model, make_processor, train_tokenizer
from mmrl.rollout.engine_sampler import EngineSampler
from mmrl.rollout.engines.hf import HfEngine
from mmrl.training.build import RunComponents, RunSetup, build_run
from mmrl.training.functions import load_functions
from mmrl.training.stage import build_learner
from mmrl.types import Experience, Group, Rollout, SamplingParams, Score

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

MODEL = FromScratchConfig(
    vision=VisionFromScratchConfig(num_layers=4, hidden_size=256, num_heads=4, intermediate_size=512, patch_size=14),
    language=LanguageFromScratchConfig(
        num_layers=6,
        hidden_size=512,
        num_heads=8,
        num_kv_heads=2,
        intermediate_size=1536,
        # Together, a token's experts are as wide as the feed-forward network of a family without experts.
        num_experts=16,
        experts_per_token=4,
        expert_intermediate_size=384,
        linear_head_dim=128,
        vocab_size=4096,
    ),
)
# Qwen2.5-VL-3B but for its tokenizer, whose rows of the embedding are added.
MODEL_3B = FromScratchConfig(
    vision=VisionFromScratchConfig(
        num_layers=32, hidden_size=1280, num_heads=16, intermediate_size=3420, patch_size=14
    ),
    language=LanguageFromScratchConfig(
        num_layers=36, hidden_size=2048, num_heads=16, num_kv_heads=2, intermediate_size=11008, vocab_size=4096
    ),
)
VOCAB_SIZE_3B = 151_936
HYBRID_LAYERS = 8  # twice three layers of Gated DeltaNet and one of attention, as in the released models
WHOLE_IMAGE_BLOCKS_3B = [7, 15, 23, 31]
REWARDS = (0.0, 1.0, 0.5, 0.0, 1.0, 0.2, 0.0, 0.7)
KL_COEF = 0.04
POLICY_NOISE_STD = 0.1  # how far the policy has moved from the reference, in standard deviations of each weight
TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 0.1  # of gradients; the loss is a sum of terms that nearly cancel, so its rounding says little


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One group: a picture of `side` x `side` tokens in a prompt of `prompt` tokens, a completion of each length."""

    side: int
    prompt_tokens: int
    completion_tokens: tuple[int, ...]
    min_speedup: float
    min_memory_ratio: float | None = None
    model: FromScratchConfig = MODEL
    device: str = "cpu"

    @property
    def dtype(self) -> str:
        """Precision of weights and activations."""
        return "float32" if self.device == "cpu" else "bfloat16"


WORKLOADS = {
    "300x100": Workload(
        side=15, prompt_tokens=300, completion_tokens=(100,) * 8, min_speedup=3.5, min_memory_ratio=3.0
    ),
    "1000x100": Workload(side=25, prompt_tokens=1000, completion_tokens=(100,) * 8, min_speedup=5.5),
    "300x100-ragged": Workload(
        side=15, prompt_tokens=300, completion_tokens=(100, 80, 65, 50, 40, 30, 20, 15), min_speedup=4.0
    ),
    "300x300": Workload(side=15, prompt_tokens=300, completion_tokens=(300,) * 8, min_speedup=2.0),
    "3b-300x100": Workload(
        side=15,
        prompt_tokens=300,
        completion_tokens=(100,) * 8,
        min_speedup=1.0,
        min_memory_ratio=1.0,
        model=MODEL_3B,
        device="cuda",
    ),
    # For a smoke test: too small to say anything about speed.
    "40x8": Workload(side=4, prompt_tokens=40, completion_tokens=(8, 8, 6, 4, 8, 8, 6, 4), min_speedup=0.0),
}
DEFAULT_WORKLOADS = ("300x100", "1000x100", "300x100-ragged", "300x300")
# Where a family's target is not the one above.
MIN_SPEEDUPS = {
    ("qwen3_vl_moe", "1000x100"): 3.5,
    ("qwen3_vl_moe", "300x100-ragged"): 3.5,
    ("qwen3_5", "300x100"): 3.0,
    ("qwen3_5", "1000x100"): 5.0,
    ("qwen3_5_moe", "300x100"): 3.0,
    ("qwen3_5_moe", "1000x100"): 5.0,
}


def make_spec(model: FromScratchConfig, family: str) -> FromScratchConfig:
    """Return the sizes of `model` for another family."""
    changes = {"num_layers": HYBRID_LAYERS} if FAMILIES[family].has_recurrent_layers else {}
    return model.model_copy(update={"family": family, "language": model.language.model_copy(update=changes)})


class LearnerUnderTest(Protocol):
    """Holds a learner and a group to learn from."""

    model: nn.Module
    settings: str

    def run_pass(self) -> float:
        """Add the gradient of the group; returns the loss."""


MakeLearner = Callable[[Path, Workload], LearnerUnderTest]
RunInProcess = Callable[[Callable[[LearnerUnderTest], Any]], Any]


class GradientOnlyOptimizer:
    """Computes gradients and leaves the weights alone."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of `loss`; `last` marks an update's final one, which only ranks need to know."""
        loss.backward()

    def update(self, lr: float) -> dict[str, float]:
        """Change no weight."""
        return {}


class MmrlLearner:
    """PolicyLearner, as the composition root builds it."""

    def __init__(self, folder: Path, workload: Workload) -> None:
        world = open_run_context(folder, "policy", workload)
        reference = open_run_context(folder, "reference", workload).policy
        (stage,) = world.config.stages
        self._learner = build_learner(stage, world, GradientOnlyOptimizer(), reference)
        rollouts = tuple(read_rollouts(folder))
        scores = tuple(Score(terms={}, total=reward) for reward in REWARDS)
        group = Group(prompt=rollouts[0].prompt, rollouts=rollouts, scores=scores)
        pairs = zip(rollouts, *compute_advantages([group], stage.advantage, {}), strict=True)
        self._experiences = [Experience(rollout=rollout, advantage=advantage) for rollout, advantage in pairs]
        self.model = world.policy.model
        self.settings = f"mmrl {version('mmrl')}: {json.dumps(mmrl_config(folder, 'policy', workload))}"

    def run_pass(self) -> float:
        """Compute loss and gradient of the group once."""
        return self._learner.step(self._experiences, step=0)["learner/loss"]


class TrlLearner:
    """TRL's GRPOTrainer: its batch, reference pass, loss and backward."""

    def __init__(self, folder: Path, workload: Workload) -> None:
        from datasets import Dataset
        from transformers import AutoProcessor
        from trl import GRPOConfig, GRPOTrainer

        settings = {
            "per_device_train_batch_size": len(workload.completion_tokens),
            "num_generations": len(workload.completion_tokens),
            "max_completion_length": max(workload.completion_tokens),
            "beta": KL_COEF,
            "use_bias_correction_kl": False,
            "router_aux_loss_coef": 0.0,
            "gradient_checkpointing": False,
            "bf16": False,
            "use_cpu": workload.device == "cpu",
        }
        model_class = FAMILIES[workload.model.family].model_class
        with hide_progress_bars():
            model = model_class.from_pretrained(folder / "policy", dtype=getattr(torch, workload.dtype))
        model.config._name_or_path = str(folder / "reference")  # from here the trainer loads its reference
        # A group shares its dataset row; its rewards differ, so they come with the rollouts.
        question = json.loads((folder / "rows.jsonl").read_text())["question"]
        row = {"prompt": [{"role": "user", "content": question}]}
        rollouts = read_rollouts(folder)

        def rolled_out(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
            segments = [rollout.segments[0] for rollout in rollouts]
            return {
                "prompt_ids": trainer._tokenize_prompts(prompts)[0],
                "completion_ids": [list(segment.token_ids) for segment in segments],
                "logprobs": [list(segment.logprobs) for segment in segments],
                "given": list(REWARDS),
            }

        def rewarded(given: list[float], **_: Any) -> list[float]:
            return given

        self._trainer = GRPOTrainer(
            model=model,
            reward_funcs=rewarded,
            args=GRPOConfig(output_dir=str(folder / "trl"), report_to="none", **settings),
            train_dataset=Dataset.from_list([row]),
            processing_class=AutoProcessor.from_pretrained(folder / "policy"),
            rollout_func=rolled_out,
        )
        self.model = self._trainer.model.train()
        self._trainer.current_gradient_accumulation_steps = 1  # set by `train`, which we do not call
        asked = [row | {"image": make_image(workload)} for _ in rollouts]
        self._batch = self._trainer._prepare_inputs(asked)
        # Without old log-probs, TRL would reuse the current ones.
        self._batch["old_per_token_logps"] = self._batch.pop("sampling_per_token_logps")
        self.settings = f"trl {version('trl')}: GRPOConfig {json.dumps(settings)}"

    def run_pass(self) -> float:
        """Compute loss and gradient of the group once."""
        batch = dict(self._batch)
        batch["ref_per_token_logps"] = self._reference_logps()
        loss = self._trainer.compute_loss(self.model, batch)
        self._trainer.accelerator.backward(loss)
        return loss.item()

    @torch.no_grad()
    def _reference_logps(self) -> torch.Tensor:
        """Compute reference log-probs as `GRPOTrainer._generate_and_score_completions` does."""
        batch = self._batch
        logps, _, _ = self._trainer._get_per_token_logps_and_entropies(
            self._trainer.ref_model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
            batch["completion_ids"].shape[1],
            batch_size=self._trainer.args.per_device_train_batch_size,
            **{name: batch[name] for name in ("num_images", "pixel_values", "image_grid_thw", "mm_token_type_ids")},
        )
        return logps


def read_rollouts(folder: Path) -> list[Rollout]:
    return pickle.loads((folder / "rollouts.pickle").read_bytes())


def mmrl_config(folder: Path, weights: str, workload: Workload) -> dict[str, Any]:
    """Return our config; all other settings have their defaults."""
    columns = {"id": "id", "images": "image", "question": "question", "answer": "answer"}
    table = {"path": "rows.jsonl", "answer_type": "number", "columns": columns}
    stage = {"name": "rl", "kind": "rl", "steps": 1, "prompts_per_step": 1, "micro_batch_groups": 1}
    return {
        "run": {"name": "bench", "cpu_threads": 1},
        "model": {"path": f"{folder}/{weights}", "dtype": workload.dtype, "device": workload.device},
        "data": {"train": [{"fn": "mmrl_datasets.readers.table:rows", "args": table}]},
        "response_format": {"add_instruction": False},
        "rewards": {"terms": [{"fn": "mmrl_rewards.number:exact"}]},
        "stages": [stage | {"group_size": len(REWARDS), "loss": {"kl": {"coef": KL_COEF}}}],
    }


def open_run_context(folder: Path, weights: str, workload: Workload) -> RunComponents:
    (path := folder / f"{weights}.yaml").write_text(json.dumps(mmrl_config(folder, weights, workload)))
    with (folder / f"{weights}.log").open("w") as log:
        config = load_config(path).config
        setup = RunSetup(
            config=config,
            base_dir=folder,
            functions=load_functions(config, folder),
            run_dir=RunDir(folder / "run"),
            console=Console(log),
            ranks=SingleProcess(),
        )
        with ExitStack() as resources:
            return build_run(setup, resources)


def write_inputs(folder: Path, workload: Workload) -> None:
    """Write the files that both sides read: two models, a picture, a question, and rollouts of the reference."""
    torch.set_num_threads(1 if workload.device == "cpu" else torch.get_num_threads())
    processor = write_models(
        workload.model, {"reference": folder / "reference", "policy": folder / "policy"}, workload.dtype
    )
    make_image(workload).save(folder / "picture.png")
    digits = count_digits(processor, workload.prompt_tokens, workload.side)
    question = "".join(random.Random(0).choices("0123456789", k=digits))
    row = {"id": "0", "image": "picture.png", "question": question, "answer": "1"}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    (folder / "rollouts.pickle").write_bytes(pickle.dumps(sample_rollouts(folder, workload)))


def count_digits(processor: ProcessorMixin, prompt_tokens: int, side: int) -> int:
    """Return how many digits beside an image of `side` x `side` tokens fill a prompt; each is a token."""
    blank = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ""}]}]
    template = processor.apply_chat_template(blank, add_generation_prompt=True, tokenize=False)
    return prompt_tokens - side**2 - (len(processor.tokenizer(template).input_ids) - 1)


def write_models(spec: FromScratchConfig, folders: Mapping[str, Path], dtype: str) -> ProcessorMixin:
    """Write a model to each folder, with the policy moved away from the others; return their processor."""
    words = random.Random(0)
    text = [" ".join("".join(words.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(6000)), "0123456789"]
    tokenizer = train_tokenizer(text, spec.language.vocab_size)
    processor = make_processor(spec, tokenizer, (3136, 1003520))
    torch.manual_seed(1)
    # One after the other: two models of 3B would fill a small machine.
    for name, folder in folders.items():
        if spec is MODEL_3B:
            model = make_model_3b(tokenizer, dtype)
        else:
            model = make_model(spec, tokenizer, seed=0, dtype=dtype)
        if name == "policy":
            add_noise(model)
        with hide_progress_bars():
            model.save_pretrained(folder)
        processor.save_pretrained(folder)
        del model
        torch.cuda.empty_cache()  # the processes that read it need the device's memory
    return processor


def make_model_3b(tokenizer: PreTrainedTokenizerFast, dtype: str) -> PreTrainedModel:
    """Return a model as large as Qwen2.5-VL-3B, on a GPU where there is one: it draws the weights within a second."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = make_model(MODEL_3B, tokenizer, seed=0, dtype=dtype)
        model.resize_token_embeddings(VOCAB_SIZE_3B, mean_resizing=False)
    model.config.vision_config.fullatt_block_indexes = WHOLE_IMAGE_BLOCKS_3B
    return model


@torch.no_grad()
def add_noise(model: nn.Module) -> None:
    """Move a policy away from its reference."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.add_(POLICY_NOISE_STD * parameter.std() * torch.randn_like(parameter))


def make_image(workload: Workload) -> Image.Image:
    pixels = workload.side * workload.model.vision.patch_size * workload.model.vision.spatial_merge_size
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (pixels, pixels, 3), dtype=np.uint8))


def sample_rollouts(folder: Path, workload: Workload) -> list[Rollout]:
    """Return rollouts of the reference, none of which ended by itself."""
    world = open_run_context(folder, "reference", workload)
    prompt = world.processor.build(world.samples.train[0])
    assert len(prompt.token_ids) == workload.prompt_tokens
    plain = SamplingParams(max_new_tokens=max(workload.completion_tokens))
    tokenizer = world.processor.tokenizer
    endless = replace(plain, banned_token_ids=(*world.policy.banned_ids(tokenizer), tokenizer.eos_token_id))
    engine = HfEngine(world.policy, world.processor)  # with the learner's own weights, so it never has to load any
    sampler = EngineSampler(engine, world.processor, load_version=lambda _: None, seed_parts=("bench",))
    (group,) = sampler.generate([prompt], len(workload.completion_tokens), endless, step=0)
    # TRL's learner has no banned tokens, so ours gets none either.
    return [truncate(rollout, length, plain) for rollout, length in zip(group, workload.completion_tokens, strict=True)]


def truncate(rollout: Rollout, length: int, sampling_params: SamplingParams) -> Rollout:
    (segment,) = rollout.segments
    segment = replace(segment, token_ids=segment.token_ids[:length], logprobs=segment.logprobs[:length])
    return replace(rollout, segments=(segment,), sampling_params=sampling_params)


def loss_and_gradients(learner: LearnerUnderTest, file: Path) -> float:
    """Return the loss, and write the gradient of each parameter to a file."""
    loss = learner.run_pass()
    torch.save({n: p.grad.cpu() for n, p in learner.model.named_parameters() if p.grad is not None}, file)
    return loss


def seconds_of_pass(learner: LearnerUnderTest) -> tuple[float, float]:
    """Return the seconds of a pass, and the user-mode seconds among them.

    They are CPU seconds on a CPU, and wall-clock seconds on a CUDA device.
    """
    if next(learner.model.parameters()).is_cuda:
        torch.cuda.synchronize()
        start = time.perf_counter()
        learner.run_pass()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return seconds, seconds
    before = resource.getrusage(resource.RUSAGE_SELF)
    learner.run_pass()
    after = resource.getrusage(resource.RUSAGE_SELF)
    user = after.ru_utime - before.ru_utime
    return user + after.ru_stime - before.ru_stime, user


def peak_memory_of_pass(learner: LearnerUnderTest) -> int:
    """Return the bytes by which a pass raises the memory of its device.

    On a CPU, this is the resident memory of a process that has returned all unused memory.
    """
    gc.collect()
    if next(learner.model.parameters()).is_cuda:
        torch.cuda.reset_peak_memory_stats()
        on_device = torch.cuda.memory_allocated()
        learner.run_pass()
        return torch.cuda.max_memory_allocated() - on_device
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident_bytes("VmRSS")
    learner.run_pass()
    return resident_bytes("VmHWM") - before


def resident_bytes(field: str) -> int:
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE))
    return int(sizes[field]) * 1024


@cache
def process_learner(make: MakeLearner, folder: Path, workload: Workload) -> LearnerUnderTest:
    """Return the learner that this process measures."""
    torch.set_num_threads(1)
    return make(folder, workload)


def run_task(task: Callable[[LearnerUnderTest], Any], make: MakeLearner, folder: Path, workload: Workload) -> Any:
    side = process_learner(make, folder, workload)
    side.model.zero_grad(set_to_none=True)
    result = task(side)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the other side needs the device's memory
    return result


@contextmanager
def run_in_own_process(make: MakeLearner, folder: Path, workload: Workload) -> Iterator[RunInProcess]:
    """Start a learner in a separate process; return a function that runs a task there."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:

        def run(task: Callable[[LearnerUnderTest], Any]) -> Any:
            return process.submit(run_task, task, make, folder, workload).result()

        yield run


def relative_differences(
    ours: RunInProcess, theirs: RunInProcess, folder: Path, workload: Workload
) -> tuple[float, float]:
    """Return the relative differences of loss and gradient from TRL's; for the gradient, in the worst component."""
    files = folder / "gradient.mmrl", folder / "gradient.trl"
    losses = [run(partial(loss_and_gradients, file=file)) for run, file in zip((ours, theirs), files, strict=True)]
    gradient, their_gradient = (torch.load(file, mmap=True) for file in files)
    if gradient.keys() != their_gradient.keys():
        raise SystemExit(f"only one side trains {sorted(gradient.keys() ^ their_gradient.keys())}")
    apart, whole, component_of = Counter[str](), Counter[str](), FAMILIES[workload.model.family].component_of
    for name in their_gradient:
        component = component_of(name)
        found, their = (each[name].to(workload.device).float() for each in (gradient, their_gradient))
        apart[component] += float((found - their).square().sum())
        whole[component] += float(their.square().sum())
    return abs(losses[0] / losses[1] - 1.0), max((apart[role] / whole[role]) ** 0.5 for role in whole)


def measure_workload(name: str, workload: Workload, pairs: int) -> list[str] | None:
    """Return a row of the table, or None if the two sides did not compute the same."""
    image = f"{workload.side}x{workload.side} of {workload.prompt_tokens} tokens are the image"
    print(f"{workload.model.family}, {name}: {image}")
    print(f"  tokens of each completion: {workload.completion_tokens}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            process.submit(write_inputs, folder, workload).result()
        with (
            run_in_own_process(MmrlLearner, folder, workload) as ours,
            run_in_own_process(TrlLearner, folder, workload) as theirs,
        ):
            with ThreadPoolExecutor() as threads:  # the two start beside each other
                settings = [threads.submit(run, attrgetter("settings")) for run in (ours, theirs)]
            print("", *(future.result() for future in settings), sep="\n  ", flush=True)
            loss, gradient = relative_differences(ours, theirs, folder, workload)
            print(f"  relative difference: loss {loss:.1e}, gradient {gradient:.1e}", flush=True)
            agrees = gradient < BFLOAT16_TOLERANCE if workload.dtype == "bfloat16" else max(loss, gradient) < TOLERANCE
            if not agrees:
                return None
            peaks = (theirs(peak_memory_of_pass), ours(peak_memory_of_pass)) if workload.min_memory_ratio else None
            costs = [(theirs(seconds_of_pass), ours(seconds_of_pass)) for _ in range(pairs)]
    row = [name, *format_ratios(costs), f"{workload.min_speedup}", format_peak_ratio(peaks, workload.min_memory_ratio)]
    print(f"  {' | '.join(row)}", flush=True)
    return row


def format_ratios(costs: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> list[str]:
    """Return the medians of both sides' seconds, and of their ratios with and without the kernel's share."""
    sides = [f"{median(theirs[0] for theirs, _ in costs):.2f} s", f"{median(ours[0] for _, ours in costs):.2f} s"]
    whole = sorted(theirs[0] / ours[0] for theirs, ours in costs)
    user = sorted(theirs[1] / ours[1] for theirs, ours in costs)
    return [*sides, f"{median(whole):.2f} [{whole[0]:.2f}, {whole[-1]:.2f}]", f"{median(user):.2f}"]


def format_peak_ratio(peaks: tuple[int, int] | None, target: float | None) -> str:
    if peaks is None:
        return ""
    theirs, ours = (f"{peak / 2**20:.0f} MiB" for peak in peaks)
    return f"{theirs} / {ours} = {peaks[0] / peaks[1]:.2f} (target {target})"


COLUMNS = ("cell", "TRL", "mmrl", "ratio [least, most]", "of user time", "target", "peak memory above base")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--cell", choices=WORKLOADS, action="append", help=f"one or more; by default {', '.join(DEFAULT_WORKLOADS)}"
    )
    parser.add_argument("--family", choices=tuple(FAMILIES), default=MODEL.family)
    parser.add_argument("--pairs", type=int, default=5, help="passes of each side, in turns")
    options = parser.parse_args()
    table = Table(*COLUMNS)
    rows = {}
    for name in options.cell or DEFAULT_WORKLOADS:
        workload = WORKLOADS[name]
        target = MIN_SPEEDUPS.get((options.family, name), workload.min_speedup)
        # The shape of 3B belongs to one family.
        model = workload.model if workload.model is MODEL_3B else make_spec(MODEL, options.family)
        workload = replace(workload, model=model, min_speedup=target)
        rows[name] = measure_workload(name, workload, options.pairs)
    for row in filter(None, rows.values()):
        table.add_row(*row)
    Screen(width=140).print(table)
    numbers = {name: row and dict(zip(COLUMNS[1:], row[1:], strict=True)) for name, row in rows.items()}
    write_results(options.json, "learner_vs_trl", {"family": options.family} | numbers)
    if refused := [name for name, row in rows.items() if row is None]:
        sys.exit(f"no ratio for {', '.join(refused)}: the two sides did not compute the same")


if __name__ == "__main__":
    main()

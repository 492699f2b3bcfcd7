"""Cost of opening and encoding media, beside a plain Pillow and processor loop, and with worker processes.

    python tools/bench/media.py throughput        # ratio of CPU time, both loops over the same files, interleaved
    python tools/bench/media.py ahead             # seconds a training step, data.workers 0 against 1, interleaved

Files are made from two photographs that come with scikit-learn.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image, ImageOps
from results import make_parser, write_results
from sklearn.datasets import load_sample_images

from mmrl.answer import ResponseFormat
from mmrl.config.schema import FromScratchConfig, MediaLimitsConfig, ModelConfig, VisionFromScratchConfig
from mmrl.media.cache import MediaCache
from mmrl.policy.encoder import PromptEncoder
from mmrl.policy.families import FAMILIES
from mmrl.policy.pretrained import ProcessorBundle
from mmrl.policy.tiny_models import make_processor, train_tokenizer
from mmrl.types import AnswerType, ImageRef, MediaPolicy, Sample, Target, VideoRef
from mmrl_datasets.media_files import RenderedVideo, encode_mp4

QUESTION = "How many flowers are there in the picture?"
SCRATCH = FromScratchConfig(vision=VisionFromScratchConfig(patch_size=14))
MODEL = ModelConfig(from_scratch=SCRATCH)
PIXEL_LIMITS = {
    "image": {"min_pixels": MODEL.min_pixels, "max_pixels": MODEL.max_pixels},
    "video": {"min_pixels": MODEL.video.min_pixels, "max_pixels": MODEL.video.max_pixels},
}
FORMATS: dict[str, dict[str, Any]] = {"jpeg": {"quality": 90}, "png": {}}


def crop_photographs(count: int, size: tuple[int, int]) -> Iterator[Image.Image]:
    """Yield different crops of the two photographs."""
    whole = [Image.fromarray(image) for image in load_sample_images().images]
    for i in range(count):
        photograph = whole[i % 2]
        box = (3 * i % 90, 2 * i % 60, photograph.width - 5 * i % 80, photograph.height - 7 * i % 50)
        yield ImageOps.fit(photograph.crop(box), size, Image.Resampling.BICUBIC)


def save_images(folder: Path, kind: str, count: int, size: tuple[int, int]) -> list[Path]:
    """Write images in one format, and return their paths."""
    paths = [folder / f"{i}.{kind}" for i in range(count)]
    for path, photograph in zip(paths, crop_photographs(count, size), strict=True):
        photograph.save(path, **FORMATS[kind])
    return paths


def save_clips(folder: Path, count: int, size: tuple[int, int]) -> list[Path]:
    """Write H.264 videos of ten seconds, 12 frames a second, in which a photograph drifts; return their paths."""
    paths = [folder / f"{i}.mp4" for i in range(count)]
    for path, photograph in zip(paths, crop_photographs(count, (size[0] + 120, size[1])), strict=True):
        film = [photograph.crop((step, 0, step + size[0], size[1])) for step in range(120)]
        path.write_bytes(encode_mp4(RenderedVideo(frames=film, fps=12)))
    return paths


def make_sample(path: Path) -> Sample:
    kind = VideoRef if path.suffix == ".mp4" else ImageRef
    ref = kind(path=str(path), sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    target = Target(answer_type=AnswerType.NUMBER, value=1)
    return Sample(id=path.name, task="count", parts=(ref, QUESTION), target=target)


def reference_patches(hf: Any, path: Path) -> torch.Tensor:
    """Return the patches of a file, made as the model cards of Qwen-VL show."""
    from qwen_vl_utils import process_vision_info  # imports torchvision, which mmrl has made loadable by now

    medium = "video" if path.suffix == ".mp4" else "image"
    content = [{"type": medium, medium: str(path), **PIXEL_LIMITS[medium]}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    text = hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    pictures, clips, options = process_vision_info(messages, return_video_kwargs=True, return_video_metadata=True)
    if clips:
        metadata = [found for _, found in clips]
        options |= {"do_resize": False, "cap_pixels_per_frame": False, "video_metadata": metadata}
    encoded = hf(
        text=[text],
        images=pictures,
        videos=[frames for frames, _ in clips] if clips else None,
        images_kwargs={"do_resize": False},
        videos_kwargs=options,
        return_tensors="pt",
    )
    patches: torch.Tensor = encoded["pixel_values" if pictures else "pixel_values_videos"]
    return patches


def make_encoder(hf: Any) -> PromptEncoder:
    """Return mmrl's encoder, with nothing cached."""
    store = MediaCache(MediaPolicy(roots=(Path("/"),)), MediaLimitsConfig(), max_bytes=2**26)
    options = {"video": MODEL.video, "add_instruction": False, "max_prompt_tokens": MODEL.max_prompt_tokens}
    bundle = ProcessorBundle(family=FAMILIES["qwen2_5_vl"], processor=hf)
    return PromptEncoder(bundle, ResponseFormat(), store, **options)


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def benchmark_throughput(count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Print, for each kind of file, files per CPU second of both loops and the median of the rounds' ratios."""
    from qwen_vl_utils import vision_process

    numbers = {}
    torch.set_num_threads(1)
    vision_process.FORCE_QWENVL_VIDEO_READER = "decord"
    tokenizer = train_tokenizer([QUESTION] * 10, SCRATCH.language.vocab_size)
    hf = make_processor(SCRATCH, tokenizer, (MODEL.min_pixels, MODEL.max_pixels))
    print(f"ours: Encoder.encode, {MediaLimitsConfig()}, model.max_pixels={MODEL.max_pixels}, nothing cached")
    print("bare: qwen-vl-utils with decord, apply_chat_template, processor(text, images, videos); no checks, no hashes")
    with tempfile.TemporaryDirectory() as folder:
        sets = {f"{kind} 640x480": save_images(Path(folder), kind, count, (640, 480)) for kind in FORMATS}
        sets["mp4 480x360, 20 of 120 frames"] = save_clips(Path(folder), count // 8, (480, 360))
        for kind, paths in sets.items():
            samples = [make_sample(path) for path in paths]
            ours = make_encoder(hf).encode(samples[0]).tensors
            same = torch.cat([ours.image_patches_MD, ours.video_patches_MD]).equal(reference_patches(hf, paths[0]))
            pairs = [_time_both(make_encoder(hf), hf, samples, paths) for _ in range(rounds)]
            rates = [len(paths) / median(side) for side in zip(*pairs, strict=True)]
            ratios = sorted(theirs / mine for mine, theirs in pairs)
            numbers[kind] = {"ours_per_s": rates[0], "bare_per_s": rates[1], "ratio": median(ratios)}
            numbers[kind]["same_pixels"] = same
            print(
                f"{kind}, {len(paths)} files, {rounds} rounds: ours {rates[0]:.1f}/s, bare {rates[1]:.1f}/s, ratio "
                f"{median(ratios):.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}], pixels equal: {same}"
            )
    return numbers


def _time_both(ours: PromptEncoder, hf: Any, samples: Sequence[Sample], paths: Sequence[Path]) -> tuple[float, float]:
    """Return the CPU seconds of both loops over all files, which take turns file by file."""
    mine = theirs = 0.0
    for sample, path in zip(samples, paths, strict=True):
        mine += cpu_seconds(partial(ours.encode, sample))
        theirs += cpu_seconds(partial(reference_patches, hf, path))
    return mine, theirs


def benchmark_prefetch(steps: int, rounds: int, prompts: int) -> dict[str, float]:
    """Print the median seconds of a training step on large pictures, without and with one process working ahead."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = save_images(folder, "jpeg", prompts * (steps + 1), (3000, 2000))
        rows = [{"id": p.name, "image": p.name, "question": QUESTION, "answer": "1"} for p in paths]
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        found: dict[int, list[dict[str, float]]] = {0: [], 1: []}
        for round_ in range(rounds):
            for workers in found:
                found[workers] += _run_step_timings(folder, f"{round_}-{workers}", workers, steps, prompts)
        numbers = {}
        for workers, timings in found.items():
            verbs = sorted({verb for step in timings for verb in step if verb.startswith("time/")})
            shares = ", ".join(f"{verb[5:-2]} {median(map(itemgetter(verb), timings)):.2f}" for verb in verbs)
            total = median(sum(map(step.__getitem__, verbs)) for step in timings)
            numbers[f"step_s with {workers} workers"] = total
            steps_taken = f"{len(timings)} steps in {rounds} runs"
            print(f"data.media_workers={workers}: {total:.2f} s a step ({shares}), {steps_taken}")
    return numbers


def _run_step_timings(folder: Path, name: str, workers: int, steps: int, prompts: int) -> list[dict[str, float]]:
    """Return the timings of a run's steps without the first, which cannot be prefetched."""
    columns = {"id": "id", "images": "image", "question": "question", "answer": "answer"}
    table = {"path": "rows.jsonl", "answer_type": "number", "columns": columns}
    config = {
        "run": {"name": name, "dir": str(folder / name), "cpu_threads": 1},
        "model": {"from_scratch": {}, "dtype": "float32", "device": "cpu", "max_pixels": 16384},
        "data": {"train": [{"fn": "mmrl_datasets.readers.table:rows", "args": table}], "media_workers": workers},
        "rewards": {"terms": [{"fn": "mmrl_rewards.number:exact"}]},
        "stages": [{"name": "rl", "kind": "rl", "steps": steps, "loss": {"kl": {"coef": 0.1}}}],
    }
    config["stages"][0]["prompts_per_step"] = prompts
    config["stages"][0]["sampling"] = {"max_new_tokens": 64}
    (folder / f"{name}.yaml").write_text(json.dumps(config))
    subprocess.run([sys.executable, "-m", "mmrl", "train", str(folder / f"{name}.yaml")], check=True)
    return [json.loads(line) for line in (folder / name / "timings.jsonl").read_text().splitlines()][1:]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=["throughput", "ahead"])
    parser.add_argument("--files", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=8, help="of a step, each with a picture of its own")
    options = parser.parse_args()
    if options.what == "throughput":
        numbers = benchmark_throughput(options.files, options.rounds)
    else:
        numbers = benchmark_prefetch(options.steps, options.rounds, options.prompts)
    write_results(options.json, f"media {options.what}", numbers)


if __name__ == "__main__":
    main()

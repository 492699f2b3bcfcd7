"""CPU time of rewards that look, as a share of the time to open their picture once.

    python tools/bench/looking.py [--rounds 15] [--width 1280]

Siblings share the pixels of a picture: "looking" is a group of eight that crops its picture and does nothing with it,
beside one call of the reward and a group of eight, with the work of its formula. Exits 1 if a group that looks, or a
call of `examples/look.py:colour`, takes more than 1.1 times the opening.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image
from results import make_parser, write_results

from mmrl.answer import ResponseFormat
from mmrl.media.pixel_reader import PixelReader
from mmrl.scoring.registry import load_bound_reward
from mmrl.scoring.trial_responses import make_trial_response
from mmrl.types import AnswerType, CoordinateSystem, ImageRef, MediaPolicy, Response, Sample, Target, use_media_opener
from mmrl_rewards.contract import BoundReward

SIBLINGS = 8
MAX_RATIO = 1.1
ROOT = Path(__file__).parents[2]
BOX = (100, 100, 300, 220)


def draw_picture(path: Path, width: int, seed: int) -> ImageRef:
    """Write a picture with detail of all sizes, as a photograph has, and return its reference."""
    rng = np.random.default_rng(seed)
    height = width * 3 // 4
    pixels = np.zeros((height, width, 3))
    for side in (4, 16, 64):
        coarse = Image.fromarray(rng.integers(0, 256, (height // side + 1, width // side + 1, 3), dtype=np.uint8))
        pixels += np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
    Image.fromarray((pixels / 3).astype(np.uint8)).save(path)
    return ImageRef(path=str(path), sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def make_call(answer_type: AnswerType, value: object, refs: list[ImageRef]) -> tuple[Response, Sample]:
    """Return a correct response, and its sample."""
    system = CoordinateSystem.PX_ORIGINAL if answer_type is AnswerType.BOX else None
    target = Target(answer_type=answer_type, value=value, coordinate_system=system)
    sample = Sample(id="s", task="t", parts=(*refs, "?"), target=target, meta={"box": BOX})
    response_format = ResponseFormat(thinking="none")
    return make_trial_response(sample, response_format.build_example(target), response_format, looks=True), sample


def time_fresh(calls: Sequence[Callable[[], object]], folder: Path, rounds: int) -> list[float]:
    """Return the least CPU seconds of each call, with no picture open before it; the calls take turns."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, times in zip(calls, seconds, strict=True):
            with use_media_opener(PixelReader(MediaPolicy(roots=(folder,)))):
                start = time.process_time()
                call()
                times.append(time.process_time() - start)
    return list(map(min, seconds))


def main() -> None:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=1280, help="pixels of a picture; its height is 3/4 of it")
    options = parser.parse_args()
    numbers, slow = {}, []
    print("| reward | file | opening, ms | 8 looking / opening | one call / opening | 8 calls / opening |")
    print("|---|---|---|---|---|---|")
    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        for suffix in ("png", "jpg"):
            refs = [draw_picture(folder / f"{index}.{suffix}", options.width, index) for index in range(2)]
            for fn, answer_type, value, media in (
                ("./look.py:colour", AnswerType.TEXT, "grey", refs[:1]),
                ("look:likeness", AnswerType.BOX, BOX, refs[:1]),
                ("look:difference", AnswerType.BOX, BOX, refs),
            ):
                reward = load_bound_reward(fn, ROOT / "examples", {})
                with use_media_opener(PixelReader(MediaPolicy(roots=(folder,)))):
                    pair = make_call(answer_type, value, media)
                    # Libraries load in the first call, which a run makes before its first step.
                    reward(*pair)

                def open_media(sample: Sample = pair[1]) -> None:
                    for index in range(len(sample.media)):
                        sample.image(index)

                def look(sample: Sample = pair[1]) -> None:
                    for _ in range(SIBLINGS):
                        for index in range(len(sample.media)):
                            sample.crop(BOX, index=index)

                def call(count: int, reward: BoundReward = reward, pair: tuple[Response, Sample] = pair) -> None:
                    for _ in range(count):
                        reward(*pair)

                calls = (open_media, look, partial(call, 1), partial(call, SIBLINGS))
                opening, *others = time_fresh(calls, folder, options.rounds)
                looking, one, group = (seconds / opening for seconds in others)
                numbers[f"{fn} {suffix}"] = {
                    "opening_ms": 1000 * opening,
                    "looking_ratio": looking,
                    "one_ratio": one,
                    "group_ratio": group,
                }
                print(f"| `{fn}` | {suffix} | {1000 * opening:.1f} | {looking:.2f} | {one:.2f} | {group:.2f} |")
                if looking > MAX_RATIO or (fn.endswith("colour") and one > MAX_RATIO):
                    slow.append(f"{fn} {suffix}")
    write_results(options.json, "looking", numbers)
    sys.exit(f"more than {MAX_RATIO} times the opening: {', '.join(slow)}" if slow else 0)


if __name__ == "__main__":
    main()

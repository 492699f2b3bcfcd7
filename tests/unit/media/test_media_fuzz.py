"""Hundreds of damaged files: each is refused by name or opened, in bounded time and without a crash."""

import itertools
import multiprocessing
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from processors import make_media_cache
from videos import picture, video_ref, write_video
from waiting import PATIENCE_S, bounded

from mmrl.config.schema import VideoConfig
from mmrl.media.video import FrameSampling
from mmrl.types import ImageRef, MediaError

SOME, ALL = (
    FrameSampling(video=VideoConfig(fps=fps, min_pixels=784, max_pixels=3136), patch_size=14) for fps in (6.0, 12.0)
)
VIDEOS = {
    "h264.mp4": {},
    "front.mp4": {"container": {"movflags": "faststart"}},  # the index comes first: truncation spares it
    "mpeg4.mp4": {"codec": "mpeg4"},
    "h264.mkv": {"options": {"g": "6"}},
    "vp8.webm": {"codec": "libvpx"},
}
IMAGES = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MUTANTS = 660


def truncate(content, rng):
    return content[: rng.randrange(len(content))]


def overwrite(content, rng):
    damaged = bytearray(content)
    for _ in range(rng.randrange(1, 16)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def splice(content, rng):
    """Replace up to 200 bytes by zeros, by nothing, or by random bytes before them."""
    start, count = rng.randrange(len(content)), rng.randrange(1, 200)
    rest = content[start + count :]
    return content[:start] + rng.choice([bytes(count) + rest, rest, rng.randbytes(count // 3 + 1) + content[start:]])


MUTATORS = (truncate, overwrite, splice)


def checked_open(cache, ref):
    """Return an image that was checked before, which must open."""
    try:
        return cache.get_image(ref)
    except MediaError as error:
        raise AssertionError(f"the check took {ref.path}") from error


@bounded()
def open_file(path, rule=SOME):
    """Return the frames of a file (an image has one), or None if it is refused. Runs in a subprocess."""
    torch.set_num_threads(1)
    path = Path(path)
    cache, ref = make_media_cache(path.parent), video_ref(path)
    try:
        if path.suffix[1:].upper() in IMAGES:
            image_ref = ImageRef(path=ref.path, sha256=ref.sha256)
            size = cache.check_image(image_ref)  # a file that passes it can be opened
            image = checked_open(cache, image_ref)
            assert image.size == size
            return np.asarray(image)[None]
        return cache.read_video(ref, rule).frames_TCHW.numpy()
    except MediaError as error:
        assert path.name in str(error)
        return None


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undamaged files: bytes by name."""
    folder = tmp_path_factory.mktemp("whole").resolve()
    for name, options in VIDEOS.items():
        write_video(folder / name, range(18), size=(64, 48), **options)
    for format_ in IMAGES:
        Image.fromarray(picture(0, 48, 40)).save(folder / f"picture.{format_.lower()}", format_)
    return {path: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.slow
def test_a_damaged_file_is_refused_by_name_or_opened_within_seconds(whole, tmp_path):
    rng = random.Random(0)
    outcomes = Counter()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        originals = {path: pool.apply(open_file, (str(path), ALL)) for path in whole}
        assert [len(frames) for frames in originals.values()] == [18 if path.name in VIDEOS else 1 for path in whole]
        jobs = itertools.islice(itertools.cycle(itertools.product(MUTATORS, whole)), MUTANTS)
        for number, (mutate, path) in enumerate(jobs):
            damaged = tmp_path.resolve() / f"{number}-{mutate.__name__}{path.suffix}"
            damaged.write_bytes(mutate(whole[path], rng))
            result = pool.apply_async(open_file, (str(damaged),)).get(timeout=PATIENCE_S)  # a crash never answers
            outcomes[path.suffix, "refused" if result is None else "opened"] += 1
            if result is not None:
                assert min(result.shape) > 0
                assert 0 <= result.min() <= result.max() <= 255
            # Only a PNG has a checksum for all that it shows.
            if result is not None and (mutate is truncate or path.suffix == ".png"):
                undamaged = {frame.tobytes() for frame in originals[path]}
                assert all(frame.tobytes() in undamaged for frame in result), damaged
    for suffix in {path.suffix for path in whole}:
        assert outcomes[suffix, "refused"] > 10, outcomes
    assert sum(outcomes[path.suffix, "opened"] for path in whole) > 20, outcomes

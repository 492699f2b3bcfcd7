"""Damaged files by the hundred: each ends in a named refusal or in a real picture or clip, soon, and without a crash."""

import itertools
import multiprocessing
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from videos import picture, video_ref, write_video

from mmrl.config.schema import Limits, Video
from mmrl.media.image import MediaError
from mmrl.media.store import MediaStore
from mmrl.media.video import ClipRule
from mmrl.types import Access, ImageRef

RULE = ClipRule(Video(fps=6.0, min_pixels=784, max_pixels=3136), 14)
VIDEOS = {
    "h264.mp4": {},
    "front.mp4": {"container": {"movflags": "faststart"}},  # the index comes first: truncation spares it
    "mpeg4.mp4": {"codec": "mpeg4"},
    "h264.mkv": {"options": {"g": "6"}},
    "vp8.webm": {"codec": "libvpx"},
}
PICTURES = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MUTANTS, SECONDS = 660, 5.0


def truncate(content, rng):
    return content[: rng.randrange(len(content))]


def overwrite(content, rng):
    damaged = bytearray(content)
    for _ in range(rng.randrange(1, 16)):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def blank(content, rng):
    start = rng.randrange(len(content))
    stop = min(len(content), start + rng.randrange(1, 200))
    return content[:start] + bytes(stop - start) + content[stop:]


def cut(content, rng):
    start = rng.randrange(len(content))
    return content[:start] + content[start + rng.randrange(1, 200) :]


def insert(content, rng):
    start = rng.randrange(len(content))
    return content[:start] + rng.randbytes(rng.randrange(1, 60)) + content[start:]


MUTATORS = (truncate, overwrite, blank, cut, insert)


def open_it(path):
    """What a file gives, or None when it is refused. Runs in a process of its own."""
    torch.set_num_threads(1)
    path = Path(path)
    store, ref = MediaStore(Access(roots=(path.parent,)), Limits(), max_bytes=0), video_ref(path)
    try:
        if path.suffix[1:].upper() in PICTURES:
            return np.asarray(store.open(ImageRef(path=ref.path, sha256=ref.sha256)))
        return store.clip(ref, RULE).frames_TCHW.numpy()
    except MediaError as error:
        assert path.name in str(error)
        return None


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undamaged files: bytes by name."""
    folder = tmp_path_factory.mktemp("whole").resolve()
    for name, options in VIDEOS.items():
        write_video(folder / name, range(18), size=(64, 48), **options)
    for format_ in PICTURES:
        Image.fromarray(picture(0, 48, 40)).save(folder / f"picture.{format_.lower()}", format_)
    return {path: path.read_bytes() for path in sorted(folder.iterdir())}


def test_every_damaged_file_is_refused_by_name_or_really_opened(whole, tmp_path):
    rng = random.Random(0)
    outcomes = Counter()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        originals = {path: pool.apply(open_it, (str(path),)) for path in whole}
        assert all(original is not None for original in originals.values())
        jobs = itertools.islice(itertools.cycle(itertools.product(MUTATORS, whole)), MUTANTS)
        for number, (mutate, path) in enumerate(jobs):
            damaged = tmp_path.resolve() / f"{number}-{mutate.__name__}{path.suffix}"
            damaged.write_bytes(mutate(whole[path], rng))
            result = pool.apply_async(open_it, (str(damaged),)).get(timeout=SECONDS)  # a crash never answers either
            outcomes[path.suffix, "refused" if result is None else "opened"] += 1
            if result is not None:
                check_real(result, originals[path], damaged)
    for suffix in {path.suffix for path in whole}:
        assert outcomes[suffix, "refused"] > 10, outcomes
        assert outcomes[suffix, "opened"] > 0, outcomes


def check_real(result, original, damaged):
    """Pictures and frames of some size; where the end is missing, what is left is as it was."""
    assert result.shape[-1 if result.ndim == 3 else 1] == 3, damaged
    assert min(result.shape) > 0, damaged
    assert 0 <= result.min() <= result.max() <= 255, damaged
    if "truncate" in damaged.name:
        assert np.array_equal(result, original), damaged

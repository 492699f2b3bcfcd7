"""Videos: frames and pixels equal qwen-vl-utils' and decord's, or the file is refused with the reason."""

import os
import random
import shutil
import struct
import sys
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from fork_server import run_forked
from processors import make_media_cache
from qwen_vl_utils import vision_process
from videos import blank_frame, picture, video_ref, write_sound, write_video

from mmrl.config.schema import MediaLimitsConfig, VideoConfig
from mmrl.media.video import FrameSampling
from mmrl.media.video_reader import VideoFileReader, open_video_file
from mmrl.types import Corruption, ImageRef, MediaError, Size, UserError, VideoRef

ROOTS = (Path("/"),)


def sampling(patch_size=14, **video):
    """The rule by which frames are chosen and resized, by default for small frames."""
    return FrameSampling(video=VideoConfig(**{"min_pixels": 784, "max_pixels": 6272, **video}), patch_size=patch_size)


def plan(ref, rule=None, **cache):
    return make_media_cache(**cache).get_frame_plan(ref, rule or sampling())


def all_frames(ref):
    """Every frame of a video, in order, at full size."""
    with open_video_file(ref, ROOTS, MediaLimitsConfig()) as reader:
        return np.stack(list(reader.read_frames(range(len(reader.timeline.timestamps)))))


def nearest(frames, size):
    """Return the index of the test picture that each frame shows."""
    pictures = np.stack([picture(index, *size) for index in range(48)]).astype(int)
    return [int(np.abs(pictures - frame).mean((1, 2, 3)).argmin()) for frame in frames.astype(int)]


RELEASED = {"min_pixels": VideoConfig().min_pixels, "max_pixels": VideoConfig().max_pixels}


@pytest.mark.parametrize(
    "rule",
    [
        sampling(14, **RELEASED),
        sampling(16, **RELEASED),
        sampling(8, **RELEASED),  # 768 tokens a frame are less than max_pixels
        sampling(14, fps=4.0, max_frames=6),
        sampling(14, fps=0.5, min_frames=5, max_pixels=78400, total_pixels=40000),
    ],
)
@pytest.mark.parametrize("span", [{}, {"start": 0.5, "end": 3.1}], ids=["whole", "part"])
def test_frames_are_those_of_fetch_video(tmp_path, monkeypatch, rule, span):
    pytest.importorskip("decord")
    path = tmp_path / "v.mp4"
    write_video(path)
    monkeypatch.setattr(vision_process, "get_video_reader_backend", lambda: "decord")
    request = rule.video.model_dump() | {f"video_{name}": second for name, second in span.items()}
    options = {"image_patch_size": rule.patch_size, "return_video_metadata": True, "return_video_sample_fps": True}
    (theirs, metadata), sample_fps = vision_process.fetch_video({"video": str(path), **request}, **options)
    video = make_media_cache().read_video(video_ref(path, **span), rule)
    assert torch.equal(video.frames_TCHW, theirs)
    found = video.plan
    assert found == plan(video_ref(path, **span), rule)
    assert list(found.indices) == metadata["frames_indices"]
    assert (found.fps, found.total_frames, found.sampled_fps) == (metadata["fps"], 48, sample_fps)
    assert (found.original_size, found.resized_size) == (Size(128, 96), Size(theirs.shape[3], theirs.shape[2]))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.mp4", {"codec": "mpeg4"}),
        ("a.webm", {"codec": "libvpx"}),
        ("a.webm", {"codec": "libvpx-vp9"}),
        ("a.mkv", {"size": (98, 66)}),
        ("a.mkv", {"pixels": "yuv444p"}),
        ("a.mp4", {"options": {"g": "8", "bf": "3"}}),
        ("a.mp4", {"options": {"colorspace": "bt709", "color_range": "pc"}}),
        ("a.mp4", {"turn": 90}),
        ("a.mp4", {"turn": 180}),
        ("a.mp4", {"turn": -90}),
    ],
    ids=str,
)
def test_each_frame_is_the_one_that_decord_decodes(tmp_path, name, options):
    decord = pytest.importorskip("decord")
    ref = write_video(tmp_path / name, range(24), **options)
    reader = decord.VideoReader(ref.path)
    theirs = reader.get_batch(range(24)).asnumpy()
    assert np.array_equal(all_frames(ref), theirs)
    with open_video_file(ref, ROOTS, MediaLimitsConfig()) as ours:
        assert ours.timeline.fps == reader.get_avg_fps()
        assert ours.size == Size(theirs.shape[2], theirs.shape[1])


@pytest.mark.parametrize("is_open", [0, 1])
def test_a_frame_does_not_depend_on_which_others_are_read(tmp_path, is_open):
    """After seeking to an open key frame, decord returns a frame three positions later."""
    parameters = {"g": "8", "bf": "3", "x264-params": f"open-gop={is_open}:keyint=8:min-keyint=8"}
    ref = write_video(tmp_path / "v.mp4", options=parameters)
    whole = all_frames(ref)
    assert nearest(whole, (128, 96)) == list(range(48))
    for indices in ([0, 47], [23], range(3, 48, 5), range(24, 30)):
        assert read_or_refuse(ref, indices) == [whole[index].tobytes() for index in indices]


def stored_frames(path):
    """The packets of a video in the order in which they are stored."""
    with av.open(str(path)) as file:
        return [packet for packet in file.demux(video=0) if packet.size]


@pytest.fixture(scope="module")
def vp9(tmp_path_factory):
    """Groups of 8 frames, the third with its key frame at 1.333 s."""
    return Path(
        write_video(tmp_path_factory.mktemp("vp9") / "v.webm", range(24), codec="libvpx-vp9", options={"g": "8"}).path
    )


# The first two differ by one bit from the time of a key frame; the last is the time of another frame.
@pytest.mark.parametrize(("index", "milliseconds"), [(16, 309), (16, 1077), (19, 500), (19, 1490), (20, 1750)])
def test_a_frame_that_is_stored_out_of_order_is_refused(tmp_path, vp9, index, milliseconds):
    """Reading from the key frame before it would skip it, and decode frames after it to other pixels."""
    content, frame = bytearray(vp9.read_bytes()), stored_frames(vp9)[index]
    # The place of a frame is the number of its track; its time, relative to that of its cluster, follows.
    (time,) = struct.unpack_from(">h", content, frame.pos + 1)
    struct.pack_into(">h", content, frame.pos + 1, time + milliseconds - frame.pts)
    (tmp_path / "v.webm").write_bytes(content)
    with pytest.raises(MediaError, match=r"v\.webm: the frame at \d\.\d+ s is stored out of order; restore it"):
        plan(video_ref(tmp_path / "v.webm"))


def read_or_refuse(ref, indices):
    try:
        with open_video_file(ref, ROOTS, MediaLimitsConfig()) as reader:
            return [frame.tobytes() for frame in reader.read_frames(indices)]
    except MediaError:
        return None


@pytest.mark.parametrize("seed", range(8))
def test_frames_of_a_damaged_file_do_not_depend_on_which_are_read(tmp_path, vp9, seed):
    """VP9 has no checksum: most flipped bits only change pixels."""
    rng, content = random.Random(seed), bytearray(vp9.read_bytes())
    for frame in rng.sample(stored_frames(vp9), 3):
        content[frame.pos + 4 + rng.randrange(frame.size)] ^= 1 << rng.randrange(8)
    (tmp_path / "v.webm").write_bytes(content)
    ref, seen = video_ref(tmp_path / "v.webm"), {}
    for indices in (range(24), range(0, 24, 5), range(3, 24, 7), [6, 23], *([index] for index in range(24))):
        for index, frame in zip(indices, read_or_refuse(ref, indices) or (), strict=False):
            assert seen.setdefault(index, frame) == frame, (index, indices)
    assert seen


def write_cut(folder):
    """A video whose edit list begins a second later, as a cut without re-encoding writes it."""
    content = bytearray(Path(write_video(folder / "v.mp4").path).read_bytes())
    entry = content.index(b"elst") + 12
    duration, begin = struct.unpack_from(">Ii", content, entry)
    struct.pack_into(">Ii", content, entry, duration // 2, begin + 19200)  # ticks of 1/19200 s
    (folder / "cut.mp4").write_bytes(content)
    return video_ref(folder / "cut.mp4")


def test_frames_that_an_edit_list_hides_are_not_counted(tmp_path):
    """Hidden frames stay in the file; decord counts them and repeats a neighbour for each."""
    indices = nearest(all_frames(write_cut(tmp_path)), (128, 96))
    assert indices == list(range(12, 12 + len(indices)))
    assert 24 <= len(indices) <= 28


CLOSED_GROUPS, OPEN_GROUPS = (f"open-gop={is_open}:keyint=8:min-keyint=8" for is_open in (0, 1))
BOTH_READ = {
    "mp4": ("a.mp4", {}),
    "closed groups with B-frames": ("a.mp4", {"options": {"bf": "3", "x264-params": CLOSED_GROUPS}}),
    "open groups without B-frames": ("a.mp4", {"options": {"bf": "0", "x264-params": OPEN_GROUPS}}),
    "mkv": ("a.mkv", {"options": {"g": "8"}, "size": (98, 66)}),
    "fragments": ("a.mp4", {"container": {"movflags": "frag_keyframe+empty_moov"}, "options": {"g": "12"}}),
    "HEVC": ("a.mp4", {"codec": "libx265", "options": {"x265-params": "keyint=8:open-gop=0:log-level=none"}}),
    "MPEG-4": ("a.mp4", {"codec": "mpeg4"}),
    "VP9": ("a.webm", {"codec": "libvpx-vp9", "options": {"g": "8"}}),
    "VP8": ("a.webm", {"codec": "libvpx", "options": {"g": "8"}}),
    "turned": ("a.mp4", {"turn": 90}),
}
OTHER_FORMATS = [pytest.param(name, marks=pytest.mark.slow) for name in BOTH_READ if name not in ("mp4", "turned")]


@pytest.mark.parametrize("name", ["mp4", "turned", *OTHER_FORMATS])
def test_decord_gives_the_frames_that_pyav_gives(tmp_path, name):
    pytest.importorskip("decord")
    file, options = BOTH_READ[name]
    write_video(tmp_path / file, **options)
    pyav, decord = make_media_cache(), make_media_cache(reader="decord")
    for span in ({}, {"start": 0.9, "end": 3.5}, {"start": 2.1}):
        ref = video_ref(tmp_path / file, **span)
        for fps in (2.0, 5.0, 12.0):
            rule = sampling(fps=fps)
            ours, theirs = pyav.read_video(ref, rule), decord.check_video(ref, rule)
            assert ours.plan == theirs.plan == decord.get_frame_plan(ref, rule)
            assert (ours.frames_TCHW - theirs.frames_TCHW).abs().max() <= 1
    for second in (0.0, 1.37, 3.9):
        frame = ImageRef(path=ref.path, sha256=ref.sha256, timestamp=second)
        assert decord.get_image(frame).tobytes() == pyav.get_image(frame).tobytes()


DECORD_REFUSES = {
    "open groups": (
        "a.mp4",
        {"options": {"bf": "3", "x264-params": OPEN_GROUPS}},
        r"frames stored after key frame \d+ are shown before it \(B-frames of an open GOP\)",
    ),
    "open groups of HEVC": (
        "a.mkv",
        {"codec": "libx265", "options": {"x265-params": "keyint=8:min-keyint=8:open-gop=1:log-level=none"}},
        "B-frames of an open GOP",
    ),
    "B-frames of MPEG-4": ("a.mp4", {"codec": "mpeg4", "options": {"g": "8", "bf": "2"}}, "B-frames of an open GOP"),
}


@pytest.mark.parametrize("name", DECORD_REFUSES)
def test_a_video_that_decord_misreads_is_refused(tmp_path, name, monkeypatch):
    pytest.importorskip("decord")
    file, options, reason = DECORD_REFUSES[name]
    ref = write_video(tmp_path / file, **options)
    cache = make_media_cache(reader="decord")
    for read in (cache.get_frame_plan, cache.read_video, cache.check_video):
        with pytest.raises(MediaError, match=rf"{file}: decord would give wrong frames: .*{reason}.*; use media\.vid"):
            read(ref, sampling())
    # It is really misread, and what the structure of a file does not show is found by comparing frames.
    monkeypatch.setattr(VideoFileReader, "_find_counting_problem", lambda *args: None)
    with pytest.raises(MediaError, match=r"decord's frame \d+ differs from PyAV's by \d+ grey levels; use media"):
        for start in range(3):
            cache.check_video(video_ref(tmp_path / file, start=start), sampling())


def write_avi(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("videos._TICKS", 1)  # AVI takes the unit of time for the frame rate
        return write_video(folder / "v.avi", codec="mpeg4")


@pytest.mark.parametrize(
    ("write", "limits", "words"),
    [
        (write_cut, {}, r"cut\.mp4: decord would give wrong frames: its edit list hides \d+ frames"),
        (write_avi, {}, "it is an AVI file, which decord reads differently each time"),
        (lambda folder: write_video(folder / "v.mp4"), {"max_video_frames": 47}, "48 frames exceed max_video_frames"),
    ],
)
def test_decord_is_refused_for_what_only_pyav_reads_and_beyond_the_limits(tmp_path, write, limits, words):
    pytest.importorskip("decord")
    ref = write(tmp_path)
    assert plan(ref).total_frames >= 24
    with pytest.raises(MediaError, match=words):
        plan(ref, reader="decord", **limits)


def test_damage_that_decord_conceals_is_found_before_a_run(tmp_path):
    decord = pytest.importorskip("decord")
    path = write_video(tmp_path / "v.mp4", options={"bf": "0"}).path
    blank_frame(tmp_path / "v.mp4", 30)
    assert len(decord.VideoReader(path).get_batch(range(48)).asnumpy()) == 48
    with pytest.raises(MediaError, match=r"v\.mp4: the frame at 2\.\d+ s does not decode"):
        make_media_cache(reader="decord").check_video(video_ref(tmp_path / "v.mp4"), sampling(fps=12.0))


def test_without_decord_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "decord", None)
    with pytest.raises(UserError, match=r'media\.video_reader: decord .*pip install "mmrl\[decord\]", or use .*pyav'):
        make_media_cache(reader="decord")


def test_frames_resized_a_few_at_a_time_have_the_same_pixels(tmp_path, monkeypatch):
    ref, cache = write_video(tmp_path / "v.mp4"), make_media_cache()
    at_once = cache.read_video(ref, sampling()).frames_TCHW
    monkeypatch.setattr("mmrl.media.video._CHUNK_BYTES", 3 * 128 * 96 * 3)
    assert torch.equal(cache.read_video(ref, sampling()).frames_TCHW, at_once)


def test_a_turned_video_is_shown_upright(tmp_path):
    ref = write_video(tmp_path / "v.mp4", size=(160, 96), turn=90)
    found = plan(ref)
    assert found.original_size == Size(96, 160)
    assert found.resized_size.height > found.resized_size.width
    upright = np.rot90(picture(0, 160, 96), 1).astype(int)
    assert np.abs(all_frames(ref)[0].astype(int) - upright).mean() < 20


def test_a_varying_rate_is_refused_where_a_sampled_frame_drifts(tmp_path):
    slower = write_video(tmp_path / "v.mp4", [*range(24), *(24 + 1.2 * step for step in range(24))])
    assert plan(slower).fps == pytest.approx(12 * 48 / 52.8, rel=0.02)
    with pytest.raises(MediaError, match=r"its rate varies: frame \d+ is at [\d.]+ s, not at [\d.]+ s, which"):
        plan(slower, max_frame_drift_s=0.05)
    slides = write_video(tmp_path / "w.mp4", [*range(24), *range(24, 24 * 13, 12)])
    with pytest.raises(MediaError, match=r"its rate varies: frame \d+"):
        make_media_cache().read_video(slides, sampling())


@pytest.mark.parametrize(
    ("count", "video", "words"),
    [
        (1, {}, r"asks for 4 frames \(fps=2, min_frames=4\) of 1; lower them"),
        (3, {}, r"asks for 4 frames \(fps=2, min_frames=4\) of 3; lower them"),
        (48, {"fps": 24.0}, r"asks for 96 frames \(fps=24, min_frames=4\) of 48"),
    ],
)
def test_fewer_frames_than_asked_for_are_refused(tmp_path, count, video, words):
    with pytest.raises(MediaError, match=words):
        plan(write_video(tmp_path / "v.mp4", range(count)), sampling(**video))


def test_all_frames_are_seen_at_the_rate_of_the_video(tmp_path):
    assert plan(write_video(tmp_path / "v.mp4"), sampling(fps=12.0)).indices == tuple(range(48))


@pytest.mark.parametrize(
    ("span", "words"),
    [
        ({"start": 3.0, "end": 5.0}, r"s is not part of its 4\.000 s; correct start and end"),
        ({"start": -1.0}, r"s is not part of its 4\.000 s; correct start and end"),
        ({"start": 2.0, "end": 1.0}, r"s is not part of its 4\.000 s; correct start and end"),
        ({"start": 1.01, "end": 1.05}, r"no two frames from 1\.01 to 1\.05 s"),
    ],
)
def test_a_part_that_is_not_in_the_video_is_refused(tmp_path, span, words):
    write_video(tmp_path / "v.mp4")
    with pytest.raises(MediaError, match=words):
        plan(video_ref(tmp_path / "v.mp4", **span))


@pytest.mark.parametrize("name", ["v.mp4", "v.mkv"])  # an MKV does not say how many frames it has
@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_video_bytes": 1000}, r"bytes exceed max_video_bytes=1,000"),
        ({"max_video_frames": 47}, "48 frames exceed max_video_frames=47"),
        ({"max_video_seconds": 3.5}, r"4\.0 s exceed max_video_seconds=3\.5"),
        ({"max_pixels": 12000}, "128x96 pixels exceed max_pixels=12,000"),
    ],
)
def test_a_video_over_a_limit_is_refused(tmp_path, name, limits, words):
    with pytest.raises(MediaError, match=words):
        plan(write_video(tmp_path / name), **limits)


MIRRORED = (-(2**16), 0, 0, 0, 2**16, 0, 0, 0, 2**30)  # a display matrix that swaps left and right
NO_PACKETS = {"container": {"movflags": "empty_moov+frag_keyframe"}}
TEN_BITS = {"codec": "ffv1", "pixels": "yuv420p10le"}


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda folder: write_sound(folder / "v.mp4"), "has no video stream"),
        (lambda folder: write_video(folder / "v.mp4", matrix=MIRRORED), "is shown mirrored or slanted"),
        (lambda folder: write_video(folder / "v.mkv", range(4), **TEN_BITS), r"than 8 bits per channel \(yuv420p10"),
        (lambda folder: write_video(folder / "v.mp4", (), **NO_PACKETS), "contains no frames|damaged|has no"),
        (lambda folder: write_video(folder / "v.mp4", size=(804, 4)), "804x4 has one side more than 200 times as long"),
    ],
)
def test_a_video_that_models_cannot_see_is_refused(tmp_path, write, words):
    with pytest.raises(MediaError, match=words):
        plan(write(tmp_path))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize(("name", "flags"), [("v.mp4", {}), ("v.mp4", {"movflags": "faststart"}), ("v.mkv", {})])
def test_a_truncated_file_is_refused(tmp_path, share, name, flags):
    """An MP4 with its index in front and an MKV would still decode some frames."""
    whole = Path(write_video(tmp_path / name, container=flags).path).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(MediaError, match=r"(empty file|not an MP4|damaged|is cut off)"):
        plan(video_ref(tmp_path / name))


@pytest.mark.parametrize(
    "content", [b"This is a text.\n", b"#EXTM3U\n#EXTINF:1,\nv.mp4\n", b"ffconcat version 1.0\nfile v.mp4\n"]
)
def test_texts_and_playlists_are_refused(tmp_path, content):
    """ffmpeg would follow a playlist to any file or address."""
    write_video(tmp_path / "v.mp4")
    (tmp_path / "list.mp4").write_bytes(content)
    with pytest.raises(MediaError, match=r"list\.mp4: not an MP4, MOV, MKV, WEBM or AVI video"):
        plan(video_ref(tmp_path / "list.mp4"))


def test_pipes_folders_and_files_outside_the_roots_are_refused(tmp_path):
    ref = write_video(tmp_path / "v.mp4")
    inner = tmp_path.resolve() / "inner"
    inner.mkdir()
    (inner / "link.mp4").symlink_to(ref.path)
    os.mkfifo(tmp_path / "pipe.mp4")
    for name, words in {"": "not a file", "pipe.mp4": "not a file", "none.mp4": "no such file"}.items():
        with pytest.raises(MediaError, match=words):
            plan(VideoRef(path=str(tmp_path / name), sha256=""))
    with pytest.raises(MediaError, match=r"lies outside data\.media_roots"):
        plan(replace(ref, path=str(inner / "link.mp4")), root=inner)


def test_a_frame_plan_is_made_once_and_a_video_that_changed_is_refused(tmp_path):
    ref, cache = write_video(tmp_path / "v.mp4"), make_media_cache()
    found = cache.get_frame_plan(ref, sampling())
    cache.set_frame_plan(ref, sampling(), replace(found, total_frames=47))
    with pytest.raises(MediaError, match=r"v\.mp4: its frames differ from those planned before"):
        cache.read_video(ref, sampling())
    write_video(tmp_path / "v.mp4", range(40))
    with pytest.raises(MediaError, match="changed since it was referenced"):
        cache.read_video(ref, sampling())
    shutil.move(ref.path, tmp_path / "elsewhere.mp4")
    assert cache.get_frame_plan(ref, sampling()).total_frames == 47


def test_a_plan_from_another_process_counts_for_a_hidden_video(tmp_path):
    """Its pixels are hidden, its frames and their number are not."""
    ref, cache = replace(write_video(tmp_path / "v.mp4"), corruption=Corruption.GREY), make_media_cache()
    cache.set_frame_plan(ref, sampling(), replace(plan(ref), total_frames=47))
    assert cache.get_frame_plan(ref, sampling()).total_frames == 47
    with pytest.raises(MediaError, match=r"v\.mp4: its frames differ from those planned before"):
        cache.read_video(ref, sampling())


def test_reading_videos_prints_nothing(tmp_path):
    """ffmpeg would report a damaged file, and qwen-vl-utils its choice of frames."""
    ref = write_video(tmp_path / "v.mp4")
    damaged = bytearray(Path(ref.path).read_bytes())
    damaged[900:1100] = bytes(200)
    (tmp_path / "damaged.mp4").write_bytes(damaged)
    code = """
import sys
from pathlib import Path
from processors import make_media_cache
from videos import SMALL, video_ref
from mmrl.types import MediaError
from mmrl.media.video import FrameSampling

cache, sampling = make_media_cache(), FrameSampling(video=SMALL, patch_size=14)
cache.read_video(video_ref(Path(sys.argv[1])), sampling)
try:
    cache.read_video(video_ref(Path(sys.argv[2])), sampling)
except MediaError:
    sys.exit(0)
sys.exit("the damaged video was read")
"""
    done = run_forked("-c", code, ref.path, tmp_path / "damaged.mp4", cwd=Path(__file__).parents[2] / "helpers")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

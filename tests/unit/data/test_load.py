"""Loading samples: every image and video is opened once, with or without workers, in bounded memory."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from factories import image_ref, make_config
from PIL import Image
from videos import blank_frame, write_video

from mmrl.config import Config
from mmrl.config.schema import DataConfig, DataSourceConfig, MediaLimitsConfig, VideoConfig
from mmrl.data.context import make_dataset_context
from mmrl.data.load import DatasetLoader, open_media, unique_videos
from mmrl.data.rows import DatasetFunction, load_dataset_function, sources_by_split
from mmrl.data_check.fingerprints import inspect_video
from mmrl.log.console import Console
from mmrl.media.cache import MediaCache
from mmrl.media.checks import MediaError
from mmrl.media.opened_index import OpenedMediaIndex
from mmrl.media.video import FrameSampling
from mmrl.types import ImageRef, MediaPolicy, PromptTooLongError, Size, UserError

ROWS = """
import hashlib
from pathlib import Path
from mmrl.types import AnswerType, ImageRef, Sample, Target

def rows(place, *, split: str, size: int):
    files = sorted((place.base_dir / "pictures").iterdir())
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    for number in range(size):
        file, digest = files[number % len(files)], digests[number % len(files)]
        path = f"{file.parent}/{'./' * (number // len(files))}{file.name}"  # another reference to the same file
        parts = (ImageRef(path=path, sha256=digest), "How many?")
        target = Target(answer_type=AnswerType.NUMBER, value=1)
        yield Sample(id=f"{split}-{number}", task="t", parts=parts, target=target)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(ROWS)
    (tmp_path / "pictures").mkdir()
    for number in range(20):
        Image.new("RGB", (20 + number, 30), (number, 9, 99)).save(tmp_path / "pictures" / f"{number:02d}.png")
    return tmp_path


def config(**data) -> Config:
    """A config whose training data are 50 rows of `ROWS`, unless `data` says otherwise."""
    return make_config(data={"train": [{"fn": "./mine.py:rows", "args": {"split": "train", "size": 50}}]} | data)


def functions_of(settings: Config, folder: Path) -> dict[str, list[DatasetFunction]]:
    """Return the loaded dataset functions of each split."""
    functions = {}
    for split, sources in sources_by_split(settings.data).items():
        functions[split] = [load_dataset_function(source, folder) for source in sources]
    return functions


def intake(folder: Path, **data) -> tuple[DatasetLoader, MediaCache]:
    settings = config(**data)
    place = make_dataset_context(settings, folder, folder / "work")
    store = MediaCache(place.media_policy, settings.data.media_limits, max_bytes=10**6)
    return DatasetLoader(settings, place, functions_of(settings, folder), store, Console()), store


def refs(folder: Path) -> list[ImageRef]:
    return [image_ref(file) for file in sorted(folder.iterdir())]


def media_options(workers):
    return DataConfig(train=(DataSourceConfig(fn="a:b"),), media_workers=workers)


def test_media_workers_return_what_this_process_returns(folder):
    (folder / "pictures" / "04.png").write_bytes(b"\x89PNG broken")
    all_refs = refs(folder / "pictures")
    seen = [
        dict(
            open_media(
                all_refs,
                MediaCache(MediaPolicy(roots=(folder,)), MediaLimitsConfig(), max_bytes=0).image_size,
                options=media_options(workers),
                console=Console(),
            )
        )
        for workers in (0, 2)
    ]
    assert [list(each) for each in seen] == [all_refs, all_refs]
    assert list(map(str, seen[0].values())) == list(map(str, seen[1].values()))
    assert seen[1][all_refs[7]] == Size(27, 30)
    assert isinstance(seen[1][all_refs[4]], MediaError)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_is_found_with_and_without_workers(folder, workers):
    (folder / "pictures" / "04.png").write_bytes(b"\x89PNG broken")
    loader, store = intake(folder, media_workers=workers, on_bad_sample="skip")
    assert [sample.id for sample in loader.load().train][3:6] == ["train-3", "train-5", "train-6"]
    assert store.image_size(refs(folder / "pictures")[7]) == Size(27, 30)
    with pytest.raises(UserError, match=r"3 of 50 samples cannot be used:\n  train-4: .*04\.png: "):
        intake(folder, media_workers=workers)[0].load()


def die(ref: ImageRef) -> Size:
    if ref.path.endswith("04.png"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return Size(1, 1)


def test_a_file_that_kills_its_worker_is_refused(folder):
    seen = dict(open_media(refs(folder / "pictures"), die, options=media_options(2), console=Console()))
    assert [Path(ref.path).name for ref, look in seen.items() if isinstance(look, MediaError)] == ["04.png"]
    (said,) = (str(look) for look in seen.values() if isinstance(look, MediaError))
    assert re.search(r"04\.png: the process that opened it was killed by SIGSEGV; a file crashes its decoder", said)


VIDEO_ROWS = """
import hashlib
from mmrl.types import AnswerType, Sample, Target, VideoRef

def rows(place):
    for file in sorted((place.base_dir / "clips").iterdir()):
        parts = (VideoRef(path=str(file), sha256=hashlib.sha256(file.read_bytes()).hexdigest()), "How many?")
        yield Sample(id=file.stem, task="t", parts=parts, target=Target(answer_type=AnswerType.NUMBER, value=1))
"""


@pytest.fixture
def clips(tmp_path):
    """A folder with two videos; a late frame of one is damaged."""
    (tmp_path / "clips").mkdir()
    (tmp_path / "mine.py").write_text(VIDEO_ROWS)
    for name in ("damaged", "whole"):
        write_video(tmp_path / "clips" / f"{name}.mp4", size=(64, 48), options={"bf": "0"})
    blank_frame(tmp_path / "clips" / "damaged.mp4", 40)
    return tmp_path


def video_loader(clips, index=None, **data):
    settings = config(train=[{"fn": "./mine.py:rows"}], **data)
    place = make_dataset_context(settings, clips, clips / "work")
    cache = MediaCache(place.media_policy, settings.data.media_limits, max_bytes=0)
    return DatasetLoader(settings, place, functions_of(settings, clips), cache, Console(), opened_index=index), cache


def open_all_videos(loader, samples, sampling=None):
    """Open all videos of the samples; return the frame plan or the error of each."""
    videos = loader.prepare_videos(samples, sampling or VIDEO_SAMPLING)
    assert videos.open_for_a_minute()
    return videos.opened


VIDEO_SAMPLING = FrameSampling(video=VideoConfig(fps=12.0, min_pixels=784, max_pixels=3136), patch_size=14)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_video_with_a_damaged_late_frame_is_found_before_the_first_step(clips, workers, capsys):
    loader, _ = video_loader(clips, media_workers=workers)
    samples = loader.load()
    opened = open_all_videos(loader, samples)
    refused = r"(?s)1 of 2 samples cannot be used:\n  damaged: .*damaged\.mp4: the frame at 3\.\d+ s does not decode"
    with pytest.raises(UserError, match=refused):
        loader.filter_by_prompt(samples, lambda sample: None, opened)

    loader, cache = video_loader(clips, media_workers=workers, on_bad_sample="skip")
    samples = loader.load()
    opened = open_all_videos(loader, samples)
    assert [sample.id for sample in loader.filter_by_prompt(samples, lambda sample: None, opened).train] == ["whole"]
    assert "1 of 2 samples cannot be used and are left out" in capsys.readouterr().out
    # `mmrl data check` says the same of it.
    damaged, _ = unique_videos(samples.train)
    with pytest.raises(MediaError, match="does not decode"):
        inspect_video(cache, VIDEO_SAMPLING, damaged)


def test_a_video_that_the_run_has_decoded_is_not_decoded_again(clips, monkeypatch):
    (clips / "clips" / "damaged.mp4").unlink()
    index_path = clips / "opened_media.json"
    checked = []
    monkeypatch.setattr(
        MediaCache, "check_video", lambda cache, *args: checked.append(args) or check_video(cache, *args)
    )

    def open_videos(sampling=VIDEO_SAMPLING, **data):
        loader, cache = video_loader(clips, OpenedMediaIndex(index_path), **data)
        samples = loader.load()
        open_all_videos(loader, samples, sampling)
        plan = cache.get_frame_plan(samples.train[0].media[0], sampling)
        return len(checked), len(plan.indices)

    assert open_videos() == (1, 48)
    assert open_videos() == (1, 48)
    other = replace(VIDEO_SAMPLING, video=VIDEO_SAMPLING.video.model_copy(update={"fps": 6.0}))
    assert open_videos(other) == (2, 24)
    write_video(clips / "clips" / "whole.mp4", range(36), size=(64, 48))
    assert open_videos() == (3, 36)


check_video = MediaCache.check_video


def test_long_decoding_yields_often_and_keeps_its_results(clips, monkeypatch):
    """Other ranks would report rank 0 as lost, and a killed start would lose what it has decoded."""
    monkeypatch.setattr("mmrl.data.load._TURN_S", 0.0)
    write_video(clips / "clips" / "damaged.mp4", range(24), size=(64, 48))
    loader, _ = video_loader(clips, OpenedMediaIndex(clips / "opened_media.json"))
    samples = loader.load()
    videos = loader.prepare_videos(samples, VIDEO_SAMPLING)
    assert not videos.open_for_a_minute()
    assert len(json.loads((clips / "opened_media.json").read_text())) == 1
    assert not videos.open_for_a_minute()
    assert videos.open_for_a_minute()
    assert len(json.loads((clips / "opened_media.json").read_text())) == 2


def refuse_even(sample) -> None:
    number = int(sample.id.removeprefix("train-"))
    if number % 4 == 0:
        raise PromptTooLongError("999 tokens")
    if number == 49:
        raise UserError("its text is forged")


def test_too_long_prompts_and_bad_samples_have_separate_settings(folder, capsys):
    for data, refused in (
        ({"on_bad_sample": "skip"}, r"13 of 49 samples cannot be used:\n  train-0: 999 tokens.*data\.on_too_long=skip"),
        ({"on_too_long": "skip"}, r"1 of 37 samples cannot be used:\n  train-49: its text.*data\.on_bad_sample=skip"),
    ):
        loader, _ = intake(folder, **data)
        with pytest.raises(UserError, match=f"(?s){refused}"):
            loader.filter_by_prompt(loader.load(), refuse_even, {})
    loader, _ = intake(folder, on_bad_sample="skip", on_too_long="skip")
    assert len(loader.filter_by_prompt(loader.load(), refuse_even, {}).train) == 50 - 13 - 1
    said = capsys.readouterr().out
    assert "13 of 49 samples cannot be used and are left out:\n  train-0: 999 tokens" in said
    assert "and 8 more" in said


def test_rows_outside_the_row_filter_are_left_out_and_counted(folder, capsys):
    rows = ROWS.replace("target=target)", 'target=target, meta={"pass_rate": number / 50})')
    (folder / "mine.py").write_text(rows)
    keep = {"column": "pass_rate", "low": 0.1, "high": 0.5}
    source = {"fn": "./mine.py:rows", "args": {"split": "train", "size": 50}, "row_filter": keep}
    loader, _ = intake(folder, train=[source])
    assert [sample.id for sample in loader.load().train] == [f"train-{n}" for n in range(5, 26)]
    assert "data.train: 29 of 50 rows are left out by `row_filter`" in capsys.readouterr().out
    for name, value, shown in (("text", "'0.5'", "'0.5'"), ("nan", "float('nan')", "nan"), ("flag", "True", "True")):
        (folder / f"{name}.py").write_text(rows.replace("number / 50", value))
        with pytest.raises(
            UserError, match=f"row_filter: sample train-0 has no number in column 'pass_rate' .*{shown}"
        ):
            intake(folder, train=[{**source, "fn": f"./{name}.py:rows"}])[0].load()
    with pytest.raises(UserError, match=r"no number in column 'rate' of its meta \(None\); there is pass_rate"):
        intake(folder, train=[{**source, "row_filter": {"column": "rate", "low": 0}}])[0].load()


MEASURE = """
import resource, sys
from pathlib import Path
from PIL import Image
from mmrl.data.context import make_dataset_context
from mmrl.data.load import DatasetLoader
from mmrl.log.console import Console
from mmrl.media.cache import MediaCache
sys.path[:0] = [{tests!r}, {unit!r}]
from factories import make_config
from test_load import functions_of

folder = Path({folder!r})
for size in (1000, 10_000):
    settings = make_config(data={{"train": [{{"fn": "./mine.py:rows", "args": {{"split": "train", "size": size}}}}]}})
    place = make_dataset_context(settings, folder, folder / "work")
    store = MediaCache(place.media_policy, settings.data.media_limits, max_bytes=10_000_000)
    samples = DatasetLoader(settings, place, functions_of(settings, folder), store, Console(sys.stderr)).load()
    assert len(samples.train) == size
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
def test_memory_is_flat_over_10_000_samples(folder):
    for number in range(200):
        Image.new("RGB", (96, 96), (number, 9, 99)).save(folder / "pictures" / f"{number:03d}.png")
    code = MEASURE.format(tests=str(Path(__file__).parents[2]), unit=str(Path(__file__).parent), folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first_mb, last_mb = map(int, done.stdout.split())
    assert last_mb - first_mb < 40, done.stdout  # their pixels alone would be 249 MB; the samples themselves are small


def test_a_resumed_run_opens_only_what_is_new_or_was_touched(tmp_path):
    paths = [tmp_path / f"{number}.png" for number in range(5)]
    for number, path in enumerate(paths):
        Image.new("RGB", (20 + number, 30), (number, 9, 99)).save(path)
    refs = [image_ref(path) for path in paths]
    OpenedMediaIndex(tmp_path / "opened_media.json").add({ref: Size(20 + n, 30) for n, ref in enumerate(refs[:4])})
    dated = os.stat(paths[1]).st_mtime_ns
    os.utime(paths[1], ns=(dated, dated + 1))
    paths[2].unlink()
    other = ImageRef(path=refs[3].path, sha256=refs[4].sha256)
    assert OpenedMediaIndex(tmp_path / "opened_media.json").known_sizes([*refs, other]) == {
        refs[0]: Size(20, 30),
        refs[3]: Size(23, 30),
    }


@pytest.mark.parametrize("content", ["", "[]", '{"a.png": 3}', '{"a.png": [1]}'])
def test_a_damaged_opened_index_counts_as_empty(tmp_path, content):
    (tmp_path / "opened_media.json").write_text(content)
    assert OpenedMediaIndex(tmp_path / "opened_media.json").known_sizes([ImageRef(path="a.png", sha256="")]) == {}


def test_media_in_the_opened_index_are_not_opened_again(folder):
    settings, index_path = config(), folder / "opened_media.json"
    place = make_dataset_context(settings, folder, folder / "work")

    def load(store):
        index, functions = OpenedMediaIndex(index_path), functions_of(settings, folder)
        return DatasetLoader(settings, place, functions, store, Console(), opened_index=index).load()

    first = load(MediaCache(place.media_policy, MediaLimitsConfig(), max_bytes=0))
    assert len(json.loads(index_path.read_text())) == 50
    store = MediaCache(place.media_policy, MediaLimitsConfig(max_pixels=1), max_bytes=0)  # it would refuse to open any
    assert load(store).train == first.train
    assert store.image_size(first.train[0].images[0]) == Size(20, 30)

"""Loading samples: every image and video is opened once, with or without workers, in bounded memory."""

import json
import os
import signal
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from factories import image_ref, make_config, write_file
from fork_server import run_forked
from loading import load_all, make_loader
from PIL import Image
from pydantic import ValidationError
from videos import blank_frame, write_video

from mmrl.config import load_eval_config
from mmrl.config.schema import DataConfig, DataSourceConfig, MediaLimitsConfig, VideoConfig
from mmrl.data.open_media import open_media, unique_videos
from mmrl.data_check.fingerprints import inspect_video
from mmrl.data_check.sample_view import SampleBrowser
from mmrl.evaluation.eval_settings import inherit_settings
from mmrl.evaluation.question_set import question_set_of_run
from mmrl.log.console import Console
from mmrl.media.cache import MediaCache
from mmrl.media.opened_index import OpenedMediaIndex
from mmrl.media.video import FrameSampling
from mmrl.types import ImageRef, MediaError, MediaPolicy, PromptTooLongError, Size, UserError
from mmrl.utils.file_index import FileIndex

ROWS = """
import hashlib
from mmrl.types import AnswerType, ImageRef, Sample, Target, VideoRef

def rows(context, *, size: int):
    files = sorted((context.base_dir / "media").iterdir())
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    for number in range(size):
        file, digest = files[number % len(files)], digests[number % len(files)]
        path = f"{file.parent}/{'./' * (number // len(files))}{file.name}"  # another reference to the same file
        ref = (VideoRef if file.suffix == ".mp4" else ImageRef)(path=path, sha256=digest)
        target = Target(answer_type=AnswerType.NUMBER, value=1)
        yield Sample(id=f"train-{number}", task="t", parts=(ref, "How many?"), target=target)
"""
DAMAGED = b"\x89PNG broken"


def config(size=50, **data):
    """A config whose training data are rows of `ROWS`, unless `data` says otherwise."""
    return make_config(data={"train": [{"fn": "./mine.py:rows", "args": {"size": size}}]} | data)


def train_ids(splits):
    return [sample.id for sample in splits.train]


@pytest.fixture
def folder(tmp_path):
    """A folder with 20 images of different widths."""
    (tmp_path / "mine.py").write_text(ROWS)
    (tmp_path / "media").mkdir()
    for number in range(20):
        Image.new("RGB", (20 + number, 30), (number, 9, 99)).save(tmp_path / "media" / f"{number:02d}.png")
    return tmp_path


# Images


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_is_found_with_and_without_workers(folder, workers):
    write_file(folder / "media" / "04.png", DAMAGED)
    loader, cache = make_loader(config(media_workers=workers, on_bad_sample="skip"), folder)
    assert train_ids(load_all(loader))[3:6] == ["train-3", "train-5", "train-6"]
    assert cache.image_size(image_ref(folder / "media" / "07.png")) == Size(27, 30)
    with pytest.raises(UserError, match=r"3 of 50 samples cannot be used:\n  train-4: .*04\.png: "):
        load_all(make_loader(config(media_workers=workers), folder)[0])


def die_of_04(ref: ImageRef) -> Size:
    if ref.path.endswith("04.png"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return Size(1, 1)


def test_a_file_that_kills_its_worker_is_a_bad_one(folder):
    options = DataConfig(train=(DataSourceConfig(fn="a:b"),), media_workers=2)
    refs = [image_ref(file) for file in sorted((folder / "media").iterdir())]
    opened = dict(open_media(refs, die_of_04, options=options, console=Console()))
    ((ref, error),) = [(ref, found) for ref, found in opened.items() if isinstance(found, MediaError)]
    assert ref.path.endswith("04.png")
    assert "04.png: the process that opened it was killed by SIGSEGV; a file crashes its decoder" in str(error)


def test_too_long_prompts_and_bad_samples_have_separate_settings(folder, capsys):
    def measure_prompt(sample):
        number = int(sample.id.removeprefix("train-"))
        if number % 4 == 0:
            raise PromptTooLongError("999 tokens")
        if number == 49:
            raise UserError("its text is forged")

    for data, message in (
        ({"on_bad_sample": "skip"}, r"13 of 49 samples cannot be used:\n  train-0: 999 tokens.*data\.on_too_long=skip"),
        ({"on_too_long": "skip"}, r"1 of 37 samples cannot be used:\n  train-49: its text.*data\.on_bad_sample=skip"),
    ):
        loader, _ = make_loader(config(**data), folder)
        with pytest.raises(UserError, match=f"(?s){message}"):
            loader.filter_by_prompt(load_all(loader), measure_prompt)
    loader, _ = make_loader(config(on_bad_sample="skip", on_too_long="skip"), folder)
    assert len(loader.filter_by_prompt(load_all(loader), measure_prompt).train) == 50 - 13 - 1
    output = capsys.readouterr().out
    assert "13 of 49 samples cannot be used and are left out:\n  train-0: 999 tokens" in output
    assert "and 8 more" in output


# Rows


def filtered_config(folder, pass_rate, row_filter):
    """A config with a `row_filter` on rows whose `meta` has this `pass_rate`, in Python."""
    rows = ROWS.replace("target=target)", f'target=target, meta={{"pass_rate": {pass_rate}}})')
    (folder / "filtered.py").write_text(rows)
    return config(train=[{"fn": "./filtered.py:rows", "args": {"size": 50}, "row_filter": row_filter}])


def question_ids(config, folder, part):
    """Samples of a run's part that its evaluation asks, and how many of them it cannot score."""
    eval_config = load_eval_config(inherit_settings(config, by_rule=False), "r", ())
    with closing(question_set_of_run(f"run:{part}", config, eval_config, folder, folder / "out")) as question_set:
        return [sample.id for sample in question_set.questions.samples], question_set.questions.num_unscorable


PASS_RATE = {"column": "pass_rate", "low": 0.1, "high": 0.5}


def test_rows_outside_the_row_filter_are_left_out_and_counted(folder, capsys):
    loader, _ = make_loader(filtered_config(folder, "number / 50", PASS_RATE), folder)
    assert train_ids(load_all(loader)) == [f"train-{number}" for number in range(5, 26)]
    assert "data.train: 29 of 50 rows are left out by `row_filter`" in capsys.readouterr().out


RL = {"kind": "rl", "name": "rl", "steps": 1, "prompts_per_step": 1, "track_rewards": ["exact"]}
DRAW = {"kind": "sample", "name": "draw"}
SELECT = {"kind": "select", "name": "best", "results_of": "rl", "metric": "reward_std"}


@pytest.mark.parametrize(
    ("stages", "name"),
    [([RL, SELECT], "rl"), ([DRAW, RL], "draw"), ([RL], None), ([{**DRAW, "when": {"part": ["0"]}}, RL], None)],
)
def test_a_sample_that_a_stage_cannot_write_to_its_table_is_refused_before_training(folder, stages, name):
    """Every second sample shows a crop."""
    crop = "sha256=digest, crop=(0, 0, 4, 4) if number % 2 else None)"
    rows = ROWS.replace("sha256=digest)", crop).replace("=target)", '=target, meta={"part": number % 2})')
    (folder / "crops.py").write_text(rows)
    train = [{"fn": "./crops.py:rows", "args": {"size": 6}}]
    loader, _ = make_loader(make_config(data={"train": train}, stages=stages), folder)
    if name is None:
        assert len(load_all(loader).train) == 6
        return
    with pytest.raises(UserError, match=f"stage '{name}' writes its samples to a table, and sample train-1 shows a"):
        load_all(loader)


def test_what_is_shown_and_evaluated_passes_the_row_filter(folder):
    filtered = filtered_config(folder, "number / 50", PASS_RATE)
    kept = [f"train-{number}" for number in range(5, 26)]
    browser = SampleBrowser(filtered, folder, folder / "work", "train", Console(quiet=True))
    assert [sample.id for sample in browser.samples] == kept
    assert question_ids(filtered, folder, "train") == (kept, 0)


def test_rows_that_a_run_leaves_out_are_left_out_of_its_evaluation(folder):
    rejecting = ROWS.replace("import hashlib", "import hashlib\nfrom mmrl.types import RejectedRow")
    (folder / "mine.py").write_text(rejecting + '    yield RejectedRow("bad", "no answer")\n')
    lenient, strict = config(size=5, on_bad_sample="skip"), config(size=5)
    assert question_ids(lenient, folder, "train") == (train_ids(load_all(make_loader(lenient, folder)[0])), 1)
    with pytest.raises(UserError, match="1 samples cannot be used, bad for one: no answer"):
        question_ids(strict, folder, "train")


def test_a_share_of_a_training_source_is_validated_and_not_trained_on(folder):
    source = {"fn": "./mine.py:rows", "args": {"size": 50}}
    shared = config(train=[{**source, "validation_share": 0.2}])
    splits = load_all(make_loader(shared, folder)[0])
    held_out = [sample.id for sample in splits.validation]
    assert 4 <= len(held_out) <= 16
    assert sorted([*train_ids(splits), *held_out]) == sorted(f"train-{number}" for number in range(50))
    again = config(train=[{**source, "args": {"size": 40}, "validation_share": 0.2}], on_bad_sample="skip")
    first = {name for name in held_out if int(name.removeprefix("train-")) < 40}
    assert {sample.id for sample in load_all(make_loader(again, folder)[0]).validation} == first

    browser = SampleBrowser(shared, folder, folder / "work", "validation", Console(quiet=True))
    assert [sample.id for sample in browser.samples] == held_out
    assert question_ids(shared, folder, "validation") == (held_out, 0)


def test_a_share_of_too_few_samples_validates_nothing_and_says_so(folder, capsys):
    stage = {"kind": "rl", "name": "rl", "steps": 1, "prompts_per_step": 1, "validation": {"every": 1}}
    source = {"fn": "./mine.py:rows", "args": {"size": 3}, "validation_share": 1e-6}
    loader, _ = make_loader(make_config(data={"train": [source]}, stages=[stage]), folder)
    splits = load_all(loader)
    assert (len(splits.train), splits.validation) == (3, ())
    assert "there are no samples for the stages' `validation`" in capsys.readouterr().out


@pytest.mark.parametrize("data", [{"test": "shared"}, {"streaming": {}}])
def test_a_share_divides_training_sources_in_memory(data):
    shared = {"fn": "./mine.py:rows", "args": {"size": 50}, "validation_share": 0.2}
    settings = {"train": [shared], **{key: [shared] if value == "shared" else value for key, value in data.items()}}
    with pytest.raises(ValidationError, match="validation_share"):
        DataConfig.model_validate_json(json.dumps(settings))


@pytest.mark.parametrize(
    ("pass_rate", "row_filter", "message"),
    [
        ("'0.5'", PASS_RATE, "'pass_rate' .*'0.5'"),
        ("float('nan')", PASS_RATE, "'pass_rate' .*nan"),
        ("True", PASS_RATE, "'pass_rate' .*True"),
        ("0.5", {"column": "rate", "low": 0}, r"'rate' of its meta \(None\); there is pass_rate"),
    ],
)
def test_a_row_filter_needs_a_number(folder, pass_rate, row_filter, message):
    loader, _ = make_loader(filtered_config(folder, pass_rate, row_filter), folder)
    with pytest.raises(UserError, match=f"row_filter: sample train-0 has no number in column {message}"):
        load_all(loader)


MEASURE = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from factories import make_config
from loading import load_all, make_loader

for size in (1000, 10_000):
    config = make_config(data={{"train": [{{"fn": "./mine.py:rows", "args": {{"size": size}}}}]}})
    loader, _ = make_loader(config, Path({folder!r}))
    assert len(load_all(loader).train) == size
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr)
"""


@pytest.mark.slow
def test_memory_is_flat_over_10_000_samples(folder):
    for number in range(200):
        Image.new("RGB", (96, 96), (number, 9, 99)).save(folder / "media" / f"{number:03d}.png")
    code = MEASURE.format(tests=str(Path(__file__).parents[2] / "helpers"), folder=str(folder))
    done = run_forked("-c", code)
    assert done.returncode == 0, done.stderr
    first_mb, last_mb = map(int, done.stderr.split())
    assert last_mb - first_mb < 40, done.stderr  # their pixels alone would be 249 MB; the samples themselves are small


# Videos


@pytest.fixture
def videos(tmp_path):
    """A folder with two videos; a late frame of the first is damaged."""
    (tmp_path / "media").mkdir()
    (tmp_path / "mine.py").write_text(ROWS)
    for name in ("damaged", "whole"):
        write_video(tmp_path / "media" / f"{name}.mp4", size=(64, 48), options={"bf": "0"})
    blank_frame(tmp_path / "media" / "damaged.mp4", 40)
    return tmp_path


SAMPLING = FrameSampling(video=VideoConfig(fps=12.0, min_pixels=784, max_pixels=3136), patch_size=14)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_video_with_a_damaged_late_frame_is_found_before_the_first_step(videos, workers, capsys):
    loader, _ = make_loader(config(2, media_workers=workers), videos)
    samples = load_all(loader)
    assert list(loader.open_videos(samples, SAMPLING)) == [True]
    message = r"(?s)1 of 2 samples cannot be used:\n  train-0: .*damaged\.mp4: the frame at 3\.\d+ s does not decode"
    with pytest.raises(UserError, match=message):
        loader.filter_by_prompt(samples, lambda sample: None)

    loader, cache = make_loader(config(2, media_workers=workers, on_bad_sample="skip"), videos)
    samples = load_all(loader)
    assert list(loader.open_videos(samples, SAMPLING)) == [True]
    assert train_ids(loader.filter_by_prompt(samples, lambda sample: None)) == ["train-1"]
    assert "1 of 2 samples cannot be used and are left out" in capsys.readouterr().out
    damaged, _ = unique_videos(samples.train)
    with pytest.raises(MediaError, match="does not decode"):
        inspect_video(cache, SAMPLING, damaged)  # as `mmrl data check` does


def test_a_video_that_the_run_has_decoded_is_not_decoded_again(videos, monkeypatch):
    (videos / "media" / "damaged.mp4").unlink()
    num_decoded = 0
    check_video = MediaCache.check_video

    def count_and_check(*args):
        nonlocal num_decoded
        num_decoded += 1
        return check_video(*args)

    monkeypatch.setattr(MediaCache, "check_video", count_and_check)

    def open_videos(sampling=SAMPLING):
        """Return how many videos have been decoded so far, and the number of frames that the model sees."""
        loader, cache = make_loader(config(1), videos, files=FileIndex(videos / "files.sqlite"))
        samples = load_all(loader)
        assert list(loader.open_videos(samples, sampling)) == [True]
        return num_decoded, len(cache.get_frame_plan(samples.train[0].media[0], sampling).indices)

    assert open_videos() == (1, 48)
    assert open_videos() == (1, 48)
    assert open_videos(replace(SAMPLING, video=SAMPLING.video.model_copy(update={"fps": 6.0}))) == (2, 24)
    write_video(videos / "media" / "whole.mp4", range(36), size=(64, 48))
    assert open_videos() == (3, 36)


def test_long_decoding_yields_often_and_keeps_its_results(videos, monkeypatch):
    """Other ranks would report rank 0 as lost, and a killed start would lose what it has decoded."""
    monkeypatch.setattr("mmrl.data.load.EXCHANGE_EVERY_S", 0.0)
    write_video(videos / "media" / "damaged.mp4", range(24), size=(64, 48))
    path = videos / "files.sqlite"
    loader, _ = make_loader(config(2), videos, files=FileIndex(path))
    samples = load_all(loader)
    with closing(sqlite3.connect(path)) as database:
        turns = []
        for finished in loader.open_videos(samples, SAMPLING):
            [(count,)] = database.execute("SELECT count(*) FROM entries")
            turns.append((finished, count))
    assert turns == [(None, 1), (None, 2), (True, 2)]


def test_long_opening_of_images_yields_often_and_keeps_its_results(folder, monkeypatch):
    """As for videos."""
    monkeypatch.setattr("mmrl.data.load.EXCHANGE_EVERY_S", 0.0)
    path = folder / "files.sqlite"
    loader, _ = make_loader(config(), folder, files=FileIndex(path))
    with closing(sqlite3.connect(path)) as database:
        turns = []
        for samples in loader.load():
            [(count,)] = database.execute("SELECT count(*) FROM entries WHERE kind LIKE 'image %'")
            turns.append((samples and len(samples.train), count))
    assert turns == [*((None, count) for count in range(1, 51)), (50, 50)]


# The index of media that runs have opened


@pytest.fixture
def files(tmp_path):
    return FileIndex(tmp_path / "cache" / "files.sqlite")


def opened_index(files, folder, **limits):
    return OpenedMediaIndex(files, MediaPolicy(roots=(folder,)), MediaLimitsConfig(**limits))


def test_a_run_opens_only_new_and_touched_images(folder, files):
    paths = sorted((folder / "media").iterdir())[:5]
    refs = [image_ref(path) for path in paths]
    opened_index(files, folder).add({ref: Size(20 + n, 30) for n, ref in enumerate(refs[:4])})
    modified = os.stat(paths[1]).st_mtime_ns
    os.utime(paths[1], ns=(modified, modified + 1))
    paths[2].unlink()
    other_content = ImageRef(path=refs[3].path, sha256=refs[4].sha256)
    known = opened_index(files, folder).known_sizes([*refs, other_content])
    assert known == {refs[0]: Size(20, 30), refs[3]: Size(23, 30)}


def test_an_image_that_other_limits_or_roots_may_refuse_is_opened_again(folder, files):
    ref = image_ref(folder / "media" / "00.png")
    opened_index(files, folder).add({ref: Size(20, 30)})
    assert opened_index(files, folder, max_pixels=10_000).known_sizes([ref]) == {}
    assert opened_index(files, folder / "elsewhere").known_sizes([ref]) == {}


def test_another_run_on_unchanged_data_opens_no_image(folder, files, monkeypatch):
    first = load_all(make_loader(config(), folder, files=files)[0])
    monkeypatch.setattr(MediaCache, "check_image", lambda cache, ref: pytest.fail(f"{ref} was opened"))
    loader, cache = make_loader(config(), folder, files=FileIndex(folder / "cache" / "files.sqlite"))
    assert load_all(loader) == first
    assert cache.image_size(first.train[0].images[0]) == Size(20, 30)


DRAWN = {"fn": "mmrl_datasets.generators.scenes:counting", "args": {"split": "train", "size": 3, "image_px": 96}}


def test_an_image_that_was_just_drawn_is_not_opened_before_it_is_used(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(MediaCache, "check_image", lambda cache, ref: pytest.fail(f"{ref} was opened"))
        loader, cache = make_loader(config(train=[DRAWN]), folder)
        refs = [sample.images[0] for sample in load_all(loader).train]
        assert cache.image_size(refs[0]) == Size(96, 96)
    assert cache.get_image(refs[0]).size == (96, 96)
    Path(refs[1].path).write_bytes(Path(refs[0].path).read_bytes())
    with pytest.raises(MediaError, match="changed since it was referenced"):
        cache.get_image(refs[1])


@pytest.mark.parametrize("limit", [{"max_pixels": 96 * 96 - 1}, {"max_image_bytes": 1000}])
def test_an_image_that_was_just_drawn_keeps_the_limits(folder, limit):
    with pytest.raises(UserError, match=f"3 of 3 samples cannot be used(.|\n)*exceed {next(iter(limit))}"):
        load_all(make_loader(config(train=[DRAWN], media_limits=limit), folder)[0])


def test_an_image_changed_under_its_old_size_and_time_is_refused_when_it_is_used(folder, files):
    path = folder / "media" / "00.png"
    load_all(make_loader(config(), folder, files=files)[0])
    ref, status = image_ref(path), path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert files.file_digest(path) == files.file_digest(path)
    assert opened_index(files, folder).known_sizes([ref]) != {}
    cache = make_loader(config(), folder)[1]
    with pytest.raises(MediaError, match="changed since it was referenced"):
        cache.get_image(ref)


def test_moved_images_are_opened_again(folder, files):
    load_all(make_loader(config(), folder, files=files)[0])
    (folder / "media").rename(folder / "pictures")
    (folder / "moved.py").write_text(ROWS.replace('"media"', '"pictures"'))
    moved = config(train=[{"fn": "./moved.py:rows", "args": {"size": 50}}])
    samples = load_all(make_loader(moved, folder, files=files)[0]).train
    assert opened_index(files, folder).known_sizes(samples[0].images) == {samples[0].images[0]: Size(20, 30)}


def test_a_run_without_an_index_says_so_once_and_opens_every_image(folder, capsys):
    (folder / "file").touch()
    files = FileIndex(folder / "file" / "mmrl" / "files.sqlite")
    loader = make_loader(config(validation=[]), folder, files=files)[0]
    assert len(load_all(loader).train) == 50
    assert capsys.readouterr().out.count("cannot be used") == 1
    assert list(loader.open_videos(load_all(loader), SAMPLING)) == [True]
    assert "cannot be used" not in capsys.readouterr().out

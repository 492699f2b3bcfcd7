"""Images and videos as paths, bytes and URLs: allowed folders, schemes, sizes and parts of videos."""

import base64
import json
import os
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pyarrow
import pytest
from factories import image_ref, make_context, write_file
from pyarrow import parquet
from reader_files import MP4, PNG, check_rejected, json_lines, stored_image
from serving import serving
from videos import video_ref
from waiting import bounded

from mmrl.types import MediaPolicy, UserError, VideoRef
from mmrl_datasets.readers import chat, media_resolver, table


@pytest.fixture
def context(tmp_path):
    for name, content in {"a.png": PNG, "b.png": PNG + b"b", "v.mp4": MP4, "w.mp4": MP4 + b"w"}.items():
        write_file(tmp_path / "home" / "media" / name, content)
    return make_context(tmp_path / "home")


def allowing(context, *schemes, **limits):
    return context._replace(media_policy=replace(context.media_policy, schemes=schemes, **limits))


def image(context, name):
    return image_ref(context.base_dir / "media" / name)


def video(context, name, **span):
    return video_ref(context.base_dir / "media" / name, **span)


def stored_video(context):
    stored = stored_image(context, MP4, ".mp4")
    return VideoRef(path=stored.path, sha256=stored.sha256)


def read(context, *rows):
    """Read rows whose cells, besides question and answer, are named as their roles."""
    (context.base_dir / "rows.jsonl").write_bytes(json_lines({"q": "?", "a": "yes"} | row for row in rows))
    columns = {"question": "q", "answer": "a"} | {role: role for role in rows[0] if role != "q"}
    return list(table.rows(context, path="rows.jsonl", columns=columns, answer_type="text", media_root="media"))


# Files


def test_media_may_lie_in_any_of_the_allowed_folders(context, tmp_path):
    other = write_file(tmp_path / "other" / "c.png", PNG)
    (context.base_dir / "media" / "link.png").symlink_to(other.path)
    rows = [{"images": "../../other/c.png"}, {"images": other.path}, {"images": "link.png"}]
    check_rejected(read(context, *rows), [f"lies outside data.media_roots ({context.base_dir}); add its folder"] * 3)
    roots = (context.base_dir, tmp_path / "other")
    allowed = read(context._replace(media_policy=MediaPolicy(roots=roots)), *rows)
    assert [sample.images for sample in allowed] == [(other,)] * 3
    nothing = read(context._replace(media_policy=MediaPolicy(roots=())), {"images": "a.png"})
    check_rejected(nothing, ["lies outside data.media_roots (none)"])


def test_a_file_beyond_the_limit_is_not_even_hashed(context):
    with (context.base_dir / "media" / "big.mp4").open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of nothing
    with bounded():
        rows = read(context, {"videos": "big.mp4"})
    check_rejected(rows, ["must have 1 to 2,000,000,000; see data.media_limits.max_video_bytes"])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"images": "none.png"}, "there is no such file; relative paths start from"),
        ({"images": "frames"}, "it is not a regular file"),
        ({"images": "empty.png"}, "has 0 bytes"),
        ({"images": " "}, "text that is not empty"),
        ({"images": 3}, "image must be text that is not empty, or bytes; is 3"),
        ({"videos": "frames"}, "is a folder; make its frames a"),
        ({"videos": [["1.jpg", "2.jpg"]]}, "list of frames"),
        ({"videos": [{"video": "v.mp4", "fps": 2.0}]}, "a video's 'fps' is up to the config (model.video)"),
        ({"videos": [{"video": ["1.jpg", "2.jpg"]}]}, "is a list of frames"),
        ({"videos": "v.mp4", "start": 4, "end": 1.5}, "start < end, is 4 to 1.5 s"),
        ({"videos": "v.mp4", "start": -1, "end": 1.5}, "start must be a number of seconds, is -1"),
        ({"videos": "v.mp4", "start": float("nan"), "end": 1.5}, "start must be a number of seconds, is nan"),
        ({"videos": "v.mp4", "start": True, "end": 1.5}, "start must be a number of seconds, is True"),
        ({"videos": ["v.mp4", "w.mp4"], "start": 1, "end": 2}, "belong to one video, and there are 2"),
        ({"videos": None, "start": 1, "end": 2}, "belong to one video, and there are 0"),
    ],
)
def test_a_cell_that_names_no_usable_medium_is_rejected(context, row, reason):
    write_file(context.base_dir / "media" / "empty.png", b"")
    (context.base_dir / "media" / "frames").mkdir()
    check_rejected(read(context, row), [reason])


@pytest.mark.parametrize(
    ("row", "span"),
    [
        ({"videos": "v.mp4", "start": 1.5, "end": 4}, {"start": 1.5, "end": 4.0}),
        ({"videos": "v.mp4", "start": 2, "end": None}, {"start": 2.0}),
        ({"videos": "v.mp4", "start": "0.5", "end": "2"}, {"start": 0.5, "end": 2.0}),
        ({"videos": "v.mp4", "start": None, "end": None}, {}),
        ({"videos": [{"type": "video", "video": "v.mp4", "video_start": 1, "video_end": 2}]}, {"start": 1, "end": 2}),
    ],
)
def test_a_row_may_name_a_part_of_a_video(context, row, span):
    (sample,) = read(context, row)
    assert sample.media == (video(context, "v.mp4", **span),)


def test_images_and_videos_take_their_places(context):
    both, llava_video, first, none = read(
        context,
        {"q": "<video> begins like <image>?", "images": [{"image": "a.png"}], "videos": ["v.mp4"]},
        {"q": "<image>\nWhat is done?", "images": None, "videos": "v.mp4"},  # LLaVA-Video's placeholder
        {"q": "Which?", "images": "b.png", "videos": ["v.mp4", "w.mp4"]},
        {"images": None, "videos": []},
    )
    assert both.parts == (video(context, "v.mp4"), " begins like ", image(context, "a.png"), "?")
    assert llava_video.parts == (video(context, "v.mp4"), "\nWhat is done?")
    assert first.parts == (image(context, "b.png"), video(context, "v.mp4"), video(context, "w.mp4"), "Which?")
    assert none.parts == ("?",)


def test_embedded_media_are_recognized_by_their_first_bytes(context):
    rows = [
        {"q": "?", "a": "A", "images": PNG, "videos": MP4},
        {"q": "?", "a": "A", "images": b"\0\0\1\0ico", "videos": None},
        {"q": "?", "a": "A", "images": None, "videos": PNG},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), context.base_dir / "a.parquet")
    columns = {"question": "q", "answer": "a", "images": "images", "videos": "videos"}
    good, *bad = table.rows(context, path="a.parquet", columns=columns, answer_type="choice")
    assert good.parts == (stored_image(context, PNG), stored_video(context), "?")
    images = "embedded image is not an image (.png, .jpg, .webp, .gif, .bmp)"
    check_rejected(bad, [images, "is not a video (.mp4, .mkv, .avi)"])


# URLs


def data_url(media_type, content):
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def test_data_urls_are_read_when_allowed_up_to_a_size(context):
    url = data_url("image/png", PNG)
    check_rejected(read(context, {"images": url}), ["data URLs are refused unless data.allowed_url_schemes has data"])
    limit = f"has more than {len(PNG)} bytes; keep it in a file or raise data.media_limits.max_data_url_bytes"
    bad_urls = {
        data_url("image/png", PNG + b"1"): limit,
        data_url("text/html", b"hi"): "must be `data:image/",
        url + "%": "is not base64",
        "http://x/a.png": "http URLs are refused unless data.allowed_url_schemes has http",
        "FILE:///a.png": "file URLs are refused unless data.allowed_url_schemes has file",
    }
    rows = [{"images": each} for each in (url, *bad_urls)]
    good, *bad = read(allowing(context, "data", max_data_url_bytes=len(PNG)), *rows)
    assert good.images == (stored_image(context, PNG),)
    check_rejected(bad, list(bad_urls.values()))
    (sample,) = read(allowing(context, "data"), {"videos": data_url("video/mp4", MP4)})
    assert sample.media == (stored_video(context),)


def test_file_urls_are_limited_to_the_allowed_folders(context):
    ref = write_file(context.base_dir / "media" / "an image.png", PNG)
    good, *bad = read(
        allowing(context, "file"),
        {"images": f"file://{context.base_dir}/media/an%20image.png"},
        {"images": "file:///etc/hostname"},
        {"images": f"file://elsewhere{context.base_dir}/media/a.png"},
    )
    assert good.images == (ref,)
    check_rejected(bad, ["lies outside data.media_roots", "is on another machine, elsewhere"])


FILES = {"/a.png": PNG, "/v.mp4": MP4, "/page": b"<html>log in</html>", "/short": PNG}
REDIRECTS = {"/there": "/a.png", "/away": "file:///etc/hostname"}


@pytest.fixture
def server(monkeypatch):
    """A server of these files; its address, and the paths that it was asked for."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    requested, closing = [], threading.Event()

    def answer(handler):
        requested.append(handler.path)
        if handler.path in FILES:
            content = FILES[handler.path]
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(content) + (9 if handler.path == "/short" else 0)))
            handler.end_headers()
            handler.wfile.write(content)
        elif handler.path in REDIRECTS:
            handler.send_response(302)
            handler.send_header("Location", REDIRECTS[handler.path])
            handler.end_headers()
        elif handler.path == "/endless":
            handler.send_response(200)
            handler.end_headers()
            with suppress(OSError):
                while not closing.is_set():
                    handler.wfile.write(PNG * 1000)
        elif handler.path == "/silent":
            closing.wait(60)
        else:
            handler.send_error(404)

    with serving(answer) as url:
        yield SimpleNamespace(url=url, requested=requested)
        closing.set()


def images_at(server, *paths):
    return [{"images": server.url + path} for path in paths]


def test_urls_are_downloaded_only_when_allowed_and_once(context, server):
    rows = images_at(server, "/a.png", "/a.png", "/there")
    check_rejected(read(context, *rows), ["http URLs are refused unless data.allowed_url_schemes has http"] * 3)
    assert server.requested == []
    for _ in range(2):
        samples = read(allowing(context, "http"), *rows)
        assert [sample.images for sample in samples] == [(stored_image(context, PNG),)] * 3
    assert server.requested == ["/a.png", "/there", "/a.png"]
    (url,) = images_at(server, "/v.mp4")
    (sample,) = read(allowing(context, "http"), {"videos": url["images"]})
    assert sample.media == (stored_video(context),)


@pytest.mark.parametrize("is_downloaded", [True, False])
def test_two_machines_may_store_one_file_at_once_in_a_shared_folder(context, server, monkeypatch, is_downloaded):
    """The second run may have the process id of the first, and stores the file just before the first has done so."""
    (row,) = images_at(server, "/a.png")
    if not is_downloaded:
        row = {"images": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"}
    read_row = partial(read, allowing(context, "http", "data"), row)
    second_runs, rename = [read_row], os.replace

    def rename_second(source, target):
        if second_runs:
            second_runs.pop()()
        rename(source, target)

    monkeypatch.setattr(os, "replace", rename_second)
    (sample,) = read_row()
    assert not second_runs and sample.images == (stored_image(context, PNG),)


def test_a_downloaded_file_that_was_damaged_is_downloaded_again(context, server):
    rows = images_at(server, "/a.png")
    (sample,) = read(allowing(context, "http"), *rows)
    (context.base_dir / sample.images[0].path).write_bytes(b"damaged")
    assert read(allowing(context, "http"), *rows) == [sample]
    stored_image(context, PNG)


def test_bad_downloads_are_rejected_and_leave_no_file(context, server, monkeypatch):
    results = read(
        allowing(context, "http", max_bytes=1_000_000),
        *images_at(server, "/none", "/page", "/short", "/endless", "/away"),
        {"images": "http://127.0.0.1:1/a.png"},
        {"images": "http://[/a.png"},
    )
    reasons = ["404", "is not an image", f"broke off after {len(PNG)} of", "has more than 1,000,000 bytes"]
    check_rejected(results, [*reasons, "cannot be downloaded", "refused", "cannot be downloaded"])
    monkeypatch.setattr(media_resolver, "READ_TIMEOUT_S", 0.3)
    check_rejected(read(allowing(context, "http"), *images_at(server, "/silent")), ["timed out"])
    monkeypatch.setattr(media_resolver, "TOTAL_TIMEOUT_S", 0.0)
    check_rejected(read(allowing(context, "http"), *images_at(server, "/endless")), ["not complete within 0 s"])
    assert [file for file in (context.work_dir / "media").rglob("*") if file.is_file()] == []


def test_a_download_that_cannot_be_stored_ends_the_run(context, server):
    write_file(context.work_dir / "media" / "urls", b"in the way")
    with pytest.raises(UserError, match="cannot store 'http://"):
        read(allowing(context, "http"), *images_at(server, "/a.png"))


# Conversations


def read_chat(context, *contents, **columns):
    reply = {"role": "assistant", "content": "Yes."}
    rows = [{"messages": [{"role": "user", "content": content}, reply], "film": ["v.mp4"]} for content in contents]
    (context.base_dir / "talk.json").write_text(json.dumps(rows))
    columns = {"turns": "messages", **columns}
    return list(chat.rows(context, path="talk.json", columns=columns, answer_type="text", media_root="media"))


def test_messages_may_hold_images_and_videos(context):
    content = [
        {"type": "video_url", "video_url": {"url": f"file://{context.base_dir}/media/v.mp4"}},
        {"type": "text", "text": " before "},
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": " before "},
        {"type": "video", "video": "w.mp4", "video_start": 1.0},
    ]
    (sample,) = read_chat(allowing(context, "file"), content)
    first, last = video(context, "v.mp4"), video(context, "w.mp4", start=1.0)
    assert sample.parts == (first, " before ", image(context, "a.png"), " before ", last)


def test_messages_may_take_videos_of_a_column(context):
    marked, typed, plain, *bad = read_chat(
        context,
        "Is it <video>?",
        [{"type": "text", "text": "Is it "}, {"type": "video"}, {"type": "text", "text": "?"}],
        "Is it?",
        "<video> or <video>?",
        [{"type": "video", "video": "w.mp4", "nframes": 8}, {"type": "text", "text": "?"}],
        videos="film",
    )
    assert marked.parts == typed.parts == ("Is it ", video(context, "v.mp4"), "?")
    assert plain.parts == (video(context, "v.mp4"), "Is it?")
    check_rejected(bad, ["says <video> 2 times, and there are 1 videos", "a video's 'nframes' is up to the config"])

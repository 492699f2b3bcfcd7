"""Images and videos as paths, bytes and URLs: allowed folders, schemes, sizes, spans."""

import base64
import hashlib
import json
import threading
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow
import pytest
from factories import make_context
from pyarrow import parquet
from waiting import bounded

from mmrl.types import (
    AnswerType,
    ImageRef,
    MediaPolicy,
    RejectedRow,
    Sample,
    Target,
    UserError,
    VideoRef,
)
from mmrl_datasets.readers import chat, table

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(64))  # readers never decode
MP4 = b"\0\0\0\x20ftypisom" + bytes(range(64))


@pytest.fixture
def place(tmp_path):
    home = tmp_path / "home"
    (home / "media").mkdir(parents=True)
    for name, content in {"a.png": PNG, "b.png": PNG + b"b", "v.mp4": MP4, "w.mp4": MP4 + b"w"}.items():
        (home / "media" / name).write_bytes(content)
    return make_context(home)


def allowing(place, *schemes, **limits):
    return place._replace(media_policy=replace(place.media_policy, schemes=schemes, **limits))


def sha(content):
    return hashlib.sha256(content).hexdigest()


def image(place, name, content=PNG):
    return ImageRef(path=str(place.base_dir / "media" / name), sha256=sha(content))


def video(place, name, content=MP4, **clip):
    return VideoRef(path=str(place.base_dir / "media" / name), sha256=sha(content), **clip)


def kept(place, content, ending):
    """Check that embedded or fetched media were stored, and return their path."""
    path = place.work_dir / "media" / sha(content)[:2] / f"{sha(content)}{ending}"
    assert path.read_bytes() == content
    return str(path)


def read(place, *rows, **options):
    (place.base_dir / "rows.jsonl").write_text("".join(json.dumps({"q": "?", "a": "yes"} | row) + "\n" for row in rows))
    columns = {"question": "q", "answer": "a"} | {role: role for role in rows[0] if role != "q"}
    settings = {"path": "rows.jsonl", "columns": columns, "answer_type": "text", "media_root": "media"}
    return list(table.rows(place, **(settings | options)))


def reasons(results):
    assert all(isinstance(result, RejectedRow) for result in results), results
    return [result.reason for result in results]


def check(results, wanted):
    assert len(results) == len(wanted)
    for reason, part in zip(reasons(results), wanted, strict=True):
        assert part in reason


# Folders


def test_media_may_lie_in_any_of_the_declared_folders(place, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "c.png").write_bytes(PNG)
    (place.base_dir / "media" / "link.png").symlink_to(other / "c.png")
    rows = [{"images": "../../other/c.png"}, {"images": str(other / "c.png")}, {"images": "link.png"}]
    outside = read(place, *rows)
    check(outside, [f"lies outside data.media_roots ({place.base_dir}); add its folder there"] * 3)
    inside = read(place._replace(media_policy=MediaPolicy(roots=(place.base_dir, other))), *rows)
    assert [sample.images for sample in inside] == [(ImageRef(path=str(other / "c.png"), sha256=sha(PNG)),)] * 3


def test_without_a_declared_folder_no_file_is_read(place):
    (bad,) = read(place._replace(media_policy=MediaPolicy(roots=())), {"images": "a.png"})
    assert "lies outside data.media_roots (none)" in bad.reason


def test_a_file_beyond_the_limit_is_not_even_hashed(place):
    big = place.base_dir / "media" / "big.mp4"
    with big.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of nothing
    with bounded():
        check(
            read(place, {"videos": "big.mp4"}), ["must have 1 to 2,000,000,000; see data.media_limits.max_video_bytes"]
        )


def test_what_is_no_file_is_named(place):
    (place.base_dir / "media" / "empty.png").touch()
    (place.base_dir / "media" / "frames").mkdir()
    pictures = [{"images": "none.png"}, {"images": "frames"}, {"images": "empty.png"}, {"images": " "}, {"images": 3}]
    wanted = [
        "there is no such file; relative paths start from",
        "it is not a regular file",
        "has 0 bytes",
        "text that is not empty",
    ]
    check(read(place, *pictures), [*wanted, "image must be text that is not empty, or bytes; is 3"])
    check(
        read(place, {"videos": "frames"}, {"videos": [["1.jpg", "2.jpg"]]}),
        ["is a folder; make its frames a", "list of frames"],
    )


# Bytes


def test_embedded_media_are_known_by_how_they_begin(place):
    rows = [
        {"q": "?", "a": "A", "images": PNG, "videos": MP4},
        {"q": "?", "a": "A", "images": b"\0\0\1\0ico", "videos": None},
        {"q": "?", "a": "A", "images": None, "videos": PNG},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), place.base_dir / "a.parquet")
    columns = {"question": "q", "answer": "a", "images": "images", "videos": "videos"}
    good, *bad = table.rows(place, path="a.parquet", columns=columns, answer_type="choice")
    assert good.parts == (
        ImageRef(path=kept(place, PNG, ".png"), sha256=sha(PNG)),
        VideoRef(path=kept(place, MP4, ".mp4"), sha256=sha(MP4)),
        "?",
    )
    check(bad, ["embedded image is not an image (.png, .jpg, .webp, .gif, .bmp)", "is not a video (.mp4, .mkv, .avi)"])


# URLs


def test_data_urls_are_read_when_allowed_up_to_a_size(place):
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    film = "data:video/mp4;base64," + base64.b64encode(MP4).decode()
    check(read(place, {"images": url}), ["data URLs are refused unless data.allowed_url_schemes has data"])
    some = allowing(place, "data", max_data_url_bytes=len(PNG))
    good, *bad = read(
        some,
        {"images": url},
        {"images": "data:image/png;base64," + base64.b64encode(PNG + b"1").decode()},
        {"images": "data:text/html;base64,aGk="},
        {"images": url + "%"},
        {"images": "http://x/a.png"},
        {"images": "FILE:///a.png"},
    )
    assert good.images == (ImageRef(path=kept(place, PNG, ".png"), sha256=sha(PNG)),)
    wanted = [
        f"has more than {len(PNG)} bytes; keep it in a file or raise data.media_limits.max_data_url_bytes",
        "must be `data:image/", "is not base64", "http URLs are refused unless data.allowed_url_schemes has http",
        "file URLs are refused unless data.allowed_url_schemes has file",
    ]  # fmt: skip
    check(bad, wanted)
    (clip,) = read(allowing(place, "data"), {"videos": film})
    assert clip.media == (VideoRef(path=kept(place, MP4, ".mp4"), sha256=sha(MP4)),)


def test_file_urls_obey_the_declared_folders(place):
    (place.base_dir / "media" / "an image.png").write_bytes(PNG)
    good, *bad = read(
        allowing(place, "file"),
        {"images": f"file://{place.base_dir}/media/an%20image.png"},
        {"images": "file:///etc/hostname"},
        {"images": f"file://elsewhere{place.base_dir}/media/a.png"},
    )
    assert good.images == (image(place, "an image.png"),)
    check(bad, ["lies outside data.media_roots", "is on another machine, elsewhere"])


class Server(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        match self.path:
            case "/a.png":
                self.give(PNG)
            case "/v.mp4":
                self.give(MP4)
            case "/there":
                self.send_response(302)
                self.send_header("Location", "/a.png")
                self.end_headers()
            case "/away":
                self.send_response(302)
                self.send_header("Location", "file:///etc/hostname")
                self.end_headers()
            case "/page":
                self.give(b"<html>log in</html>")
            case "/short":
                self.give(PNG, length=len(PNG) + 9)
            case "/endless":
                self.send_response(200)
                self.end_headers()
                while self.server.open:
                    self.wfile.write(PNG * 1000)
            case "/silent":
                self.server.closing.wait(60)
            case _:
                self.send_error(404)

    def give(self, content, length=None):
        self.send_response(200)
        self.send_header("Content-Length", str(length or len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.asked, server.open, server.closing, server.handle_error = [], True, threading.Event(), lambda *_: None
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
    thread.start()
    yield server
    server.open = False
    server.closing.set()
    server.shutdown()
    thread.join()
    server.server_close()


def at(server, path):
    return f"http://127.0.0.1:{server.server_address[1]}{path}"


def test_the_network_is_asked_only_when_allowed_and_once(place, server):
    rows = [{"images": at(server, "/a.png")}, {"images": at(server, "/a.png")}, {"images": at(server, "/there")}]
    check(read(place, *rows), ["http URLs are refused unless data.allowed_url_schemes has http"] * 3)
    assert server.asked == []
    expected = (ImageRef(path=kept_after(place, rows), sha256=sha(PNG)),)
    for _ in range(2):
        assert [sample.images for sample in read(allowing(place, "http"), *rows)] == [expected] * 3
    assert server.asked == ["/a.png", "/there", "/a.png"]
    (film,) = read(allowing(place, "http"), {"videos": at(server, "/v.mp4")})
    assert film.media == (VideoRef(path=kept(place, MP4, ".mp4"), sha256=sha(MP4)),)


def kept_after(place, rows):
    read(allowing(place, "http"), *rows)
    return kept(place, PNG, ".png")


def test_a_fetched_file_that_was_damaged_is_fetched_again(place, server):
    (sample,) = read(allowing(place, "http"), {"images": at(server, "/a.png")})
    (place.base_dir / sample.images[0].path).write_bytes(b"damaged")
    assert read(allowing(place, "http"), {"images": at(server, "/a.png")}) == [sample]
    kept(place, PNG, ".png")


def test_what_the_network_gives_is_checked(place, server, monkeypatch):
    results = read(
        allowing(place, "http", max_bytes=1_000_000),
        *({"images": at(server, path)} for path in ("/none", "/page", "/short", "/endless", "/away")),
        {"images": "http://127.0.0.1:1/a.png"},
        {"images": "http://[/a.png"},
    )
    wanted = ["404", "is not an image", f"broke off after {len(PNG)} of", "has more than 1,000,000 bytes"]
    check(results, [*wanted, "cannot be downloaded", "refused", "cannot be downloaded"])
    monkeypatch.setattr("mmrl_datasets.readers.media_resolver.READ_TIMEOUT_S", 0.3)
    check(read(allowing(place, "http"), {"images": at(server, "/silent")}), ["timed out"])
    assert [file for file in (place.work_dir / "media").rglob("*") if file.is_file()] == [], (
        "nothing half-written stays"
    )


def test_a_server_that_drips_is_given_up(place, server, monkeypatch):
    monkeypatch.setattr("mmrl_datasets.readers.media_resolver.TOTAL_TIMEOUT_S", 0.0)
    check(read(allowing(place, "http"), {"images": at(server, "/endless")}), ["not complete within 0 s"])


# Videos


def test_videos_are_read_like_pictures(place):
    both, film, first = read(
        place,
        {"q": "<video> begins like <image>?", "images": ["a.png"], "videos": ["v.mp4"]},
        {"q": "<image>\nWhat is done?", "images": None, "videos": "v.mp4"},  # LLaVA-Video's marker
        {"q": "Which?", "images": "b.png", "videos": ["v.mp4", "w.mp4"]},
    )
    assert both.parts == (video(place, "v.mp4"), " begins like ", image(place, "a.png"), "?")
    assert film.parts == (video(place, "v.mp4"), "\nWhat is done?")
    pictures_first = image(place, "b.png", PNG + b"b"), video(place, "v.mp4"), video(place, "w.mp4", MP4 + b"w")
    assert first.parts == (*pictures_first, "Which?")


def test_a_part_of_a_video(place):
    part, rest, written, whole, *bad = read(
        place,
        {"videos": "v.mp4", "start": 1.5, "end": 4},
        {"videos": "v.mp4", "start": 2, "end": None},
        {"videos": "v.mp4", "start": "0.5", "end": "2"},
        {"videos": "v.mp4", "start": None, "end": None},
        {"videos": "v.mp4", "start": 4, "end": 1.5},
        {"videos": "v.mp4", "start": -1, "end": 1.5},
        {"videos": "v.mp4", "start": float("nan"), "end": 1.5},
        {"videos": "v.mp4", "start": True, "end": 1.5},
        {"videos": ["v.mp4", "w.mp4"], "start": 1, "end": 2},
        {"videos": None, "start": 1, "end": 2},
    )
    assert part.media == (video(place, "v.mp4", start=1.5, end=4.0),)
    assert rest.media == (video(place, "v.mp4", start=2.0),)
    assert written.media == (video(place, "v.mp4", start=0.5, end=2.0),)
    assert whole.media == (video(place, "v.mp4"),)
    seconds = "start must be a number of seconds, is "
    wanted = ["start < end, is 4 to 1.5 s", seconds + "-1", seconds + "nan", seconds + "True"]
    check(bad, [*wanted, "belong to one video, and there are 2", "belong to one video, and there are 0"])


def test_the_mappings_of_verl(place):
    good, *bad = read(
        allowing(place, "file"),
        {
            "videos": [
                {"type": "video", "video": f"file://{place.base_dir}/media/v.mp4", "video_start": 1, "video_end": 2}
            ]
        },
        {"videos": [{"video": "v.mp4", "fps": 2.0}]},
        {"videos": [{"video": ["1.jpg", "2.jpg"]}]},
    )
    assert good.media == (video(place, "v.mp4", start=1.0, end=2.0),)
    check(bad, ["a video's 'fps' is up to the config (model.video)", "is a list of frames"])
    (sample,) = read(place, {"images": [{"image": "a.png"}]})
    assert sample.images == (image(place, "a.png"),)


def talk(place, *contents, **options):
    reply = {"role": "assistant", "content": "Yes."}
    rows = [{"messages": [{"role": "user", "content": content}, reply], "film": ["v.mp4"]} for content in contents]
    (place.base_dir / "talk.json").write_text(json.dumps(rows))
    settings = {"path": "talk.json", "columns": {"turns": "messages"}, "answer_type": "text", "media_root": "media"}
    return list(chat.rows(place, **(settings | options)))


def test_pictures_and_videos_in_messages(place):
    url = f"file://{place.base_dir}/media/v.mp4"
    (sample,) = talk(
        allowing(place, "file"),
        [
            {"type": "video_url", "video_url": {"url": url}},
            {"type": "text", "text": " before "},
            {"type": "image", "image": "a.png"},
            {"type": "text", "text": " before "},
            {"type": "video", "video": "w.mp4", "video_start": 1.0},
        ],
    )
    film, later = video(place, "v.mp4"), video(place, "w.mp4", MP4 + b"w", start=1.0)
    assert sample.parts == (film, " before ", image(place, "a.png"), " before ", later)
    assert sample.target == Target(answer_type=AnswerType.TEXT, value="Yes.")


def test_videos_of_a_column_in_messages(place):
    columns = {"turns": "messages", "videos": "film"}
    marked, typed, plain, *bad = talk(
        place,
        "Is it <video>?",
        [{"type": "text", "text": "Is it "}, {"type": "video"}, {"type": "text", "text": "?"}],
        "Is it?",
        "<video> or <video>?",
        [{"type": "video", "video": "w.mp4", "nframes": 8}, {"type": "text", "text": "?"}],
        columns=columns,
    )
    assert marked.parts == typed.parts == ("Is it ", video(place, "v.mp4"), "?")
    assert plain.parts == (video(place, "v.mp4"), "Is it?")
    check(bad, ["says <video> 2 times, and there are 1 videos", "a video's 'nframes' is up to the config"])


def test_a_disk_that_is_full_is_told(place, server):
    (place.work_dir / "media").mkdir(parents=True)
    (place.work_dir / "media" / "urls").write_text("in the way")
    with pytest.raises(UserError, match="cannot store 'http://"):
        read(allowing(place, "http"), {"images": at(server, "/a.png")})


def test_a_row_may_have_no_media(place):
    (sample,) = read(place, {"images": None, "videos": []})
    assert isinstance(sample, Sample)
    assert sample.media == ()

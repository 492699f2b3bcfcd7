"""`mmrl view`: pages in a folder or a file, the live page, and what it refuses."""

import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from view_runs import make_run

from mmrl.cli import main


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs/small")
    return "runs/small"


def test_a_folder_holds_the_page_its_data_and_each_picture_once(run, tmp_path, capsys):
    assert main(["view", run, "--out", "page"]) == 0
    page = tmp_path / "page"
    assert (page / "index.html").is_file()
    names = {path.relative_to(page / "data").as_posix() for path in (page / "data").rglob("*.js")}
    assert names == {
        *("index.js", "r0/metrics.js", "r0/rl-000002.js", "r0/rl-000002.tokens.js", "r0/rl-000002-validation.js"),
        *("r0/test-before.js", "r0/test-after.js", "r0/bench-mathvista-01-000002.js"),
    }
    # The image, the tool's crop of it, and eight frames of the video.
    assert len(list((page / "media").iterdir())) == 10
    printed = capsys.readouterr().out
    assert re.search(r"^Written: page/index.html, 10 pictures copied \(0\.\d MB\)$", printed, re.MULTILINE)
    everything = "".join(path.read_text() for path in page.rglob("*.js"))
    assert "s3cret" not in everything
    assert "me:pw" not in everything
    assert str(tmp_path) not in "".join(path.read_text() for path in (page / "data").rglob("*.js"))


def test_two_runs_share_a_page(run, tmp_path):
    make_run(tmp_path / "runs/other")
    assert main(["view", run, "runs/other", "--out", "page"]) == 0
    assert {path.name for path in (tmp_path / "page/data").iterdir()} == {"index.js", "r0", "r1"}


def test_the_option_no_media_copies_no_pictures(run, tmp_path, capsys):
    assert main(["view", run, "--out", "page", "--no-media"]) == 0
    assert not (tmp_path / "page/media").exists()
    assert " 0 pictures copied" in capsys.readouterr().out


def test_a_single_file_holds_everything(run, tmp_path):
    assert main(["view", run, "--single", "run.html"]) == 0
    assert "/9j/" in (tmp_path / "run.html").read_text()  # RIFF, as a WebP begins, in base64
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "runs"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent"], "absent: no such folder; name a folder with config.yaml"),
        (["runs"], "runs: neither a run nor a folder of `mmrl eval`; name a folder with config.yaml"),
        (["runs/small", "--out", "runs"], "--out runs: it exists and is not an empty folder"),
        (["runs/small", "--single", "runs"], "runs cannot be written: Is a directory"),
        (["runs/small", "--out", "runs/small/config.yaml/page"], "page cannot be written: Not a directory"),
        (["runs/small", "--single", "runs/small/config.yaml/run.html"], "run.html cannot be written: "),
        (["runs/small", "--single", "run.html", "--media-root", "gone"], "--media-root gone: no such folder"),
        (["runs/small", "--port", "99999"], "at port 99999: ports are numbers from 0 to 65535; choose another --port"),
    ],
)
def test_what_cannot_be_shown_or_written_is_refused(run, capsys, words, message):
    assert main(["view", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_live_page_is_served_until_it_is_interrupted(run):
    command = [sys.executable, "-m", "mmrl", "view", run]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().split()[1]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", url)
        with urllib.request.urlopen(url, timeout=30) as response:
            assert response.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read() == ""

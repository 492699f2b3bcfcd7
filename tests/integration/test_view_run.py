"""`mmrl view` from a run folder to the browser: the live page follows it, and marks lie where they belong."""

import shutil
import signal
import subprocess
import sys

import pytest
from browsers import BROWSER, require_browser
from harness import run_mmrl
from view_runs import make_run, rollout_row, write_lines
from waiting import wait_for

require_browser()

from playwright.sync_api import sync_playwright  # noqa: E402  after the skip


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "small")


@pytest.fixture
def address(run):
    """The address that the command prints."""
    command = [sys.executable, "-m", "mmrl", "view", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=run.parent) as process:
        yield process.stdout.readline().split()[1]
        process.send_signal(signal.SIGINT)


@pytest.fixture
def page():
    """A browser's page. An error in it, or a request to somewhere else, fails the test."""
    complaints, requests = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1440, "height": 2600})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda sent: requests.append(sent.url))
        yield page
        browser.close()
    assert complaints == []
    assert all(url.startswith(("http://127.0.0.1:", "data:", "file:")) for url in requests)


def open_step(page, address, step="r0/rl-000002"):
    page.goto(f"{address}#step={step}")
    page.wait_for_selector("html[data-ready]", state="attached")
    page.wait_for_selector("article.group .response")


def box_of(page, selector):
    """Return left, top, right and bottom of an element, as fractions of the picture that it lies on."""
    picture = page.locator("article.group").first.locator(".picture").first.bounding_box()
    mark = page.locator("article.group").first.locator(selector).first.bounding_box()
    left, top = (mark["x"] - picture["x"]) / picture["width"], (mark["y"] - picture["y"]) / picture["height"]
    return [left, top, left + mark["width"] / picture["width"], top + mark["height"] / picture["height"]]


@pytest.mark.slow
def test_the_live_page_shows_a_run_and_follows_it(run, address, page):
    open_step(page, address)
    assert page.locator("article.group").count() == 3
    assert page.locator(".response").count() == 6
    # Of the file's 200 x 100 pixels; the answer counts in the model's 112 x 56. Strokes reach a little further.
    assert box_of(page, ".mark.gold") == pytest.approx([0.1, 0.4, 0.5, 0.8], abs=0.03)
    assert box_of(page, ".mark.predicted") == pytest.approx([10 / 112, 20 / 56, 60 / 112, 40 / 56], abs=0.03)
    # With its number, which is above it.
    assert box_of(page, ".mark.crop") == pytest.approx([0.5, 0, 1, 0.5], abs=0.06)
    write_lines(run / "rollouts/rl-000003.jsonl", [rollout_row()])
    page.wait_for_selector('#steps [data-key="r0/rl-000003"]')
    assert page.locator("#live:not(.lost)").count() == 1


@pytest.mark.slow
def test_a_page_in_a_folder_or_a_file_shows_the_same(run, page, tmp_path):
    for options, file in ((["--out", "page"], "page/index.html"), (["--single", "run.html"], "run.html")):
        assert run_mmrl("view", run, *options, cwd=tmp_path).code == 0
        open_step(page, (tmp_path / file).as_uri())
        assert page.locator(".response").count() == 6
        pictures = page.locator("article.group img")
        assert pictures.count() == 11  # twice the image, the tool's crop, and eight frames
        # Frames that are scrolled out of view are not loaded yet.
        page.evaluate("[...document.images].forEach(image => { image.loading = 'eager' })")
        wait_for(lambda: page.evaluate("[...document.images].every(image => image.naturalWidth > 0)"))


def test_missing_media_are_shown_as_missing_and_not_requested(run, address, page):
    shutil.rmtree(run / "data")
    open_step(page, address)
    assert page.locator(".missing", has_text="the file is gone").count() >= 3

"""The page of `mmrl view` in a real browser: it shows what the documents hold, and runs nothing that they hold."""

import copy
import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

import pytest
from browsers import BROWSER, require_browser
from serving import serving
from view_documents import (
    HOSTILE,
    LONG_LINE,
    PageDocuments,
    group,
    make_documents,
    metrics_document,
    replayed_group,
    rollout,
    step_document,
)
from waiting import PATIENCE_S

from mmrl.view.bundle import linked_page, page_file, to_json, write_folder, write_single

FIRST, SECOND, BAD = "r0/rl-000010", "r0/rl-000020", "r0/rl-000030"
GROUPS = "[...document.querySelectorAll('article.group')].map(card => Number(card.dataset.group))"
require_browser()

from playwright.sync_api import Browser, Page, sync_playwright  # noqa: E402  after the skip


@dataclass
class Opened:
    """A page in the browser, with what it complained about and what it asked for."""

    page: Page
    documents: PageDocuments
    address: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def go(self, **state: str) -> None:
        """Load the page anew at a permalink."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}#{urlencode(state)}")
        self.page.wait_for_selector("html[data-ready]", state="attached")

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def until(self, expression: str) -> None:
        """Wait for a condition. Playwright's own wait runs `eval` in the page, which the policy forbids."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, expression
            self.page.wait_for_timeout(30)

    def draw_all(self) -> None:
        """Make the window as high as the page, so that every card is near it."""
        self.page.set_viewport_size({"width": 1440, "height": 6000})
        self.until("[...document.querySelectorAll('article.group')].every(card => card.children.length)")

    def groups(self) -> list[int]:
        return self.page.evaluate(GROUPS)

    def state(self) -> dict[str, str]:
        return self.page.evaluate("Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")

    def fill(self, selector: str, text: str) -> None:
        before = json.dumps(self.page.url)
        self.page.fill(selector, text)
        self.until(f"location.href != {before}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> tuple[PageDocuments, Path]:
    """The documents, and the folder that has them as `run.html` and as `out/`."""
    folder = tmp_path_factory.mktemp("page")
    made = make_documents(folder)
    write_single(folder / "run.html", made.documents.items(), made.media.items())
    write_folder(folder / "out", made.documents.items(), made.media.items())
    return made, folder


@pytest.fixture(params=["single"])
def opened(request, browser, exports) -> Iterator[Opened]:
    """The page in a new tab. A complaint of the browser, or a request that leaves the disk, fails the test."""
    documents, folder = exports
    file = folder / ("run.html" if request.param == "single" else "out/index.html")
    page = browser.new_page(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    page.set_default_timeout(PATIENCE_S * 1000)
    opened = Opened(page, documents, file.as_uri())
    page.on("console", lambda message: opened.complaints.append(message.text))
    page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    page.on("request", lambda sent: opened.requests.append(sent.url))
    opened.go(step=FIRST)
    yield opened
    assert opened.page.evaluate("window.hacked") is None
    assert not opened.complaints
    assert [url for url in opened.requests if not url.startswith(("file:", "data:", "about:"))] == []
    page.close()


def served(documents: PageDocuments) -> AbstractContextManager[str]:
    """Serve the live page as `mmrl view` does: page, files, documents and pictures; yields its address."""
    kinds = {"css": "text/css", "js": "text/javascript", "json": "application/json", "jpg": "image/jpeg"}
    kinds["svg"] = "image/svg+xml"

    def answer(handler):
        path, _, query = handler.path.lstrip("/").partition("?")
        name = path.partition("/")[2].rpartition(".")[0]
        content = None
        if file := page_file(path):
            content = file[1]
        elif query == "token=s3cret":
            if not path:
                content = linked_page({"mode": "live", "token": "s3cret"})
            elif path.startswith("data/") and name in documents.documents:
                content = to_json(documents.documents[name]).encode()
            elif path.startswith("media/"):
                content = documents.media.get(name)
        handler.send_response(404 if content is None else 200)
        handler.send_header("Content-Type", kinds.get(path.rpartition(".")[2], "text/html"))
        handler.end_headers()
        handler.wfile.write(content or b"")

    return serving(answer)


both_forms = pytest.mark.parametrize("opened", ["single", "folder"], indirect=True)


@both_forms
def test_cards_responses_and_marks_are_as_many_as_in_the_documents(opened):
    opened.draw_all()
    groups = opened.documents.groups(FIRST)
    rollouts = [rollout for group in groups for rollout in group["rollouts"]]
    predicted = [mark for rollout in rollouts for mark in rollout["marks"]]
    gold = [mark for group in groups for mark in group["marks"]]
    crops = [segment for rollout in rollouts for segment in rollout["segments"] if segment["crop"]]
    frames = [frame for group in groups for medium in group["media"] for frame in medium["frames"]]
    assert opened.groups() == [group["group"] for group in groups]
    assert opened.count(".response") == len(rollouts)
    assert opened.count(".mark.predicted") == len(predicted)
    assert opened.count(".mark.gold") == len(gold)
    assert opened.count(".mark.crop") == len(crops) == 1
    assert opened.count(".seen .picture") == len(frames)
    opened.until("[...document.images].every(image => image.complete && image.naturalWidth === 320)")


@both_forms
def test_hostile_text_is_shown_and_does_nothing(opened):
    opened.go(step=BAD)
    opened.draw_all()
    texts = opened.page.eval_on_selector_all(".response .text", "all => all.map(one => one.textContent)")
    assert texts[:4] == list(HOSTILE[:4])
    assert texts[4] == "right ⟨U+202E⟩left⟨U+202C⟩ ␇bell ⟨U+200B⟩zero ␛[2J ⟨U+2028⟩line"
    assert opened.page.locator(".card-head .sample").text_content() == f"hostile/{HOSTILE[0]}"
    assert opened.page.locator(".missing").text_content() == "file is gone"
    assert opened.count("article a[href^='javascript'], article img, article script, article svg[onload]") == 0
    # A long line begins folded, and its rest comes on demand.
    assert len(texts[5]) < len(LONG_LINE) / 20
    button = opened.page.locator(".text .more")
    assert "980,000 characters left" in button.text_content()
    button.click()
    shown = opened.page.locator(".response .text").nth(5).text_content()
    assert shown.startswith(LONG_LINE[:220_000])


def test_a_box_lies_where_its_fractions_put_it(opened):
    place = "element => { const r = element.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; }"
    card = opened.page.locator("#group-0")
    left, top, width, height = card.locator(".picture").evaluate(place)
    box = card.locator(".mark[data-rollout='3'] .shape").evaluate(place)
    x1, y1, x2, y2 = opened.documents.groups(FIRST)[0]["rollouts"][3]["marks"][0]["at"]
    assert width / height == pytest.approx(320 / 240, rel=0.01)
    expected = [left + x1 * width, top + y1 * height, (x2 - x1) * width, (y2 - y1) * height]
    assert box == pytest.approx(expected, abs=2.5)  # the line itself is some pixels wide


def test_a_response_under_the_mouse_highlights_its_box(opened):
    card = opened.page.locator("#group-0")
    card.locator(".response").nth(1).hover()
    assert card.locator(".mark.lit").evaluate_all("all => all.map(one => one.dataset.rollout)") == ["1"]
    assert "hovering" in card.get_attribute("class")
    opened.page.locator("#rollouts-title").hover()
    assert opened.count(".lit") == 0


def test_segments_answers_flips_and_other_badges_say_what_happened(opened):
    opened.draw_all()
    forced = opened.page.locator("#group-4 .response").nth(1)
    assert forced.locator(".segment.forced").text_content() == "forced Wait, let me look again. "
    assert forced.locator(".answer").text_content() == "three"
    texts = opened.page.locator("#group-4 .badge").all_text_contents()
    assert {"wrong → right", "right → wrong"} <= set(texts)
    tools = opened.page.locator("#group-3")
    assert tools.locator(".segment.environment .shows .picture").count() == 1
    assert "tool failed" in tools.locator(".response").nth(1).locator(".badge").all_text_contents()
    assert "duplicate of 0" in opened.page.locator("#group-1 .badge").all_text_contents()
    assert "rejected: acc" in opened.page.locator("#group-5 .card-head .badge").all_text_contents()
    badges = opened.page.locator("#group-0 .badge").all_text_contents()
    assert {"blind 0.2 · sighted 0.57", "truncated", "2 steps off-policy"} <= set(badges)


def test_long_thinking_is_folded_until_it_is_clicked(opened):
    text = opened.page.locator("#group-0 .response").nth(2).locator(".text")
    assert "bright one" not in text.text_content()
    text.locator(".fold").click()
    assert "bright one" in text.text_content()


def test_reward_table_has_value_weight_contribution_and_reason(opened):
    row = opened.page.locator("#group-0 .response").nth(1)
    row.locator(".terms").click()
    cells = row.locator(".rewards tbody tr").nth(1).locator("th, td").all_text_contents()
    assert cells == ["format", "1", "1", "0.1", "+0.100", "both tags are there"]
    assert "0.78" in row.locator(".rewards .total").text_content()


def test_an_episode_is_shown_turn_by_turn_above_its_text(opened):
    opened.draw_all()
    episode = opened.page.locator("#group-3 .response").first
    cells = [row.locator("td").all_text_contents() for row in episode.locator(".turns tbody tr").all()]
    assert cells == [["1", "look", "far away", "0", "−0.500", ""], ["2", "OPEN", "near", "1", "+0.500", "terminated"]]
    assert episode.locator(".turns").is_visible() and not episode.locator(".rewards:not(.turns)").count()
    table, text = (episode.locator(name).bounding_box() for name in (".turns", ".text"))
    assert table["y"] + table["height"] <= text["y"]
    assert opened.count("#group-4 .turns") == 0


FILTERED = [
    ({"task": "point"}, [1]),
    ({"id": "000004"}, [4]),
    ({"min": "0.95"}, [0, 3, 4]),
    ({"max": "0.05", "adv": "-"}, [0, 3, 4]),
    ({"adv": "0"}, [5]),
    ({"inf": "0"}, [5]),
    ({"finish": "length"}, [0]),
    ({"flip": "up"}, [4]),
    ({"status": "rejected"}, [5]),
    ({"status": "untrained"}, [5]),
    ({"q": "upper LEFT"}, [0]),
    ({"q": r"/from \d\.\d/"}, [2]),
    ({"q": "intersection over union 0.52"}, [0]),
    ({"sort": "worst"}, [5, 4, 2, 3, 0, 1]),
    ({"sort": "length"}, [0, 3, 4, 2, 1, 5]),
]


def test_filters_and_orders_of_a_permalink_choose_the_groups(opened):
    for state, kept in FILTERED:
        opened.page.evaluate("hash => { location.hash = hash; }", urlencode({"step": FIRST, **state}))
        opened.until(f"document.getElementById('cards') && JSON.stringify({GROUPS}) === '{str(kept).replace(' ', '')}'")


def test_search_typed_by_hand_is_in_the_link_and_highlighted(opened):
    opened.fill("#f-q", "upper left")
    assert opened.groups() == [0]
    assert opened.state() == {"step": FIRST, "q": "upper left"}
    assert opened.page.locator("#count").text_content() == "1 of 6 groups, 1 of 16 rollouts"
    opened.page.wait_for_selector(".found")
    assert opened.page.locator(".response:not(.unmatched) .found").all_text_contents() == ["upper left"]
    opened.page.click("#reset")
    opened.until("document.querySelectorAll('article.group').length === 6")


def test_malformed_pattern_is_named(opened):
    opened.fill("#f-q", "/(/")
    assert opened.page.locator("#count").text_content().startswith("The pattern is malformed.")


def test_a_permalink_restores_step_group_colour_and_tables(opened):
    opened.go(step=SECOND, group="2", color="entropy", table="1", marks="0")
    assert opened.page.locator("#steps [aria-current]").text_content() == "20"
    assert opened.page.locator(".group.current").get_attribute("data-group") == "2"
    opened.until("Math.abs(document.querySelector('.group.current').getBoundingClientRect().y) < 200")
    assert opened.page.locator("#f-color").input_value() == "entropy"
    assert not opened.page.locator("#f-marks").is_checked()
    assert opened.count("#group-2 table.rewards") == 2
    assert not opened.page.locator("#group-2 .picture .marks").first.is_visible()


@both_forms
def test_tokens_are_coloured_and_show_their_numbers(opened):
    opened.page.keyboard.press("t")
    opened.page.wait_for_selector(".token")
    assert opened.state()["color"] == "recorded_logprob"
    tokens = opened.page.locator("#group-0 .response").nth(0).locator(".token")
    response = opened.documents.groups(FIRST)[0]["rollouts"][0]["response"]
    assert "".join(tokens.all_text_contents()) == response
    numbers = tokens.evaluate_all("all => all.map(one => Number(one.dataset.token))")
    assert max(numbers) == -(-len(response) // 4) - 1
    assert tokens.nth(1).evaluate("one => getComputedStyle(one).backgroundColor").startswith("rgba(229, 96, 46")
    tokens.nth(1).hover()
    tip = opened.page.locator("#tip")
    assert tip.is_visible()
    assert "Log-prob of the learner" in tip.text_content()
    assert opened.page.locator(".scale").get_attribute("aria-label").startswith("Log-prob of the sampler")
    opened.page.select_option("#f-color", "ratio")
    opened.until("document.querySelector('.scale').ariaLabel.startsWith('Importance')")
    # The first ratio is NaN: no colour.
    assert tokens.nth(0).evaluate("one => one.style.background") == ""


def test_tokens_that_cannot_be_read_are_a_notice(opened):
    opened.page.evaluate("browser.content.problem = 'cannot be read (cut)'")
    opened.page.keyboard.press("t")
    opened.page.wait_for_selector("#browser .notice")
    assert "tokens cannot be read: cannot be read (cut)" in opened.page.text_content("#browser .notice")
    assert opened.count(".token") == 0


def test_ends_of_tokens_become_units_of_a_string_of_javascript(opened):
    assert opened.page.evaluate("unitPlaces('a\\u{1F600}b')") == [0, 1, 3, 4]
    assert opened.page.evaluate("unitPlaces('plain')") is None


def test_the_head_of_a_step_counts_replayed_groups_apart(opened):
    own = [rollout(number, f"own {number}", total) for number, total in enumerate((0.25, 1.0))]
    step = step_document("rl", 1, "train", [group(0, "ground/train/000000", own), replayed_group(1)])
    head = opened.page.evaluate(
        "step => [...stepHead(step, step).querySelectorAll('.facts span')].map(fact => fact.textContent)",
        {**step, "label": ""},
    )
    assert head == ["1 groups", "2 rollouts", "0.625 mean reward", "1 of 1 informative", "1 replayed groups"]


def test_keys_move_between_groups_and_steps_and_open_help(opened):
    press = opened.page.keyboard.press
    press("j")
    press("j")
    assert opened.state()["group"] == "1"
    press("k")
    assert opened.state()["group"] == "0"
    press("n")
    opened.until("document.querySelector('.step-head h3').textContent === 'rl 20'")
    press("p")
    opened.until("document.querySelector('.step-head h3').textContent === 'rl 10'")
    press("r")
    assert opened.count("#group-0 table.rewards") == 4
    press("m")
    assert opened.state()["marks"] == "0"
    press("/")
    assert opened.page.evaluate("document.activeElement.id") == "f-q"
    press("Escape")
    press("?")
    assert opened.page.locator("#help").is_visible()
    press("Escape")
    opened.page.wait_for_selector("#help", state="detached")


def test_a_picture_is_enlarged_by_enter(opened):
    opened.page.locator("#group-0 .picture").first.press("Enter")
    assert opened.page.locator("dialog.large").is_visible()


def test_going_back_returns_to_the_step_before(opened):
    opened.page.click("#steps [data-key='r0/rl-000020']")
    opened.until("document.querySelector('.step-head h3').textContent === 'rl 20'")
    opened.page.go_back()
    opened.until("document.querySelector('.step-head h3').textContent === 'rl 10'")


def test_a_click_on_a_curve_opens_the_nearest_kept_step(opened):
    opened.page.wait_for_selector("[data-panel='reward/mean'] .u-over")
    curve = opened.page.locator("[data-panel='reward/mean'] .u-over")
    curve.scroll_into_view_if_needed()
    width = curve.bounding_box()["width"]
    curve.click(position={"x": width * 22 / 120, "y": 40})
    opened.until("document.querySelector('.step-head h3').textContent === 'rl 20'")


def test_a_curve_ends_with_the_last_step_and_not_with_what_was_measured_after_it(opened):
    opened.page.wait_for_selector("[data-panel='reward/mean'] canvas")
    last = metrics_document(0)["columns"]["reward/mean"][-2]
    shown = opened.page.locator("[data-panel='reward/mean'] .legend b").first.text_content()
    assert float(shown) == pytest.approx(last, rel=1e-2)


def test_curves_have_a_panel_for_each_metric_and_obey_search_smoothing_and_log_axis(opened):
    names = "panels => panels.map(panel => panel.dataset.panel)"
    shown = opened.page.eval_on_selector_all(".panel", names)
    assert shown[:4] == ["reward/mean", "reward/term/iou", "validation/ground", "rethink/correct_to_incorrect"]
    opened.page.check("#f-all")
    assert opened.count(".panel") == 16
    opened.fill("#f-find", "grad_norm")
    assert opened.page.eval_on_selector_all(".panel", names) == ["learner/grad_norm"]
    opened.page.wait_for_selector(".panel canvas")
    opened.page.check("#f-log")
    opened.page.wait_for_selector(".panel canvas")
    assert opened.state()["log"] == "1"
    opened.page.locator("#f-smooth").evaluate("input => { input.value = 0.5; input.dispatchEvent(new Event('input')) }")
    assert opened.state()["smooth"] == "0.5"


def test_flips_of_verdicts_have_a_curve_in_words(opened):
    opened.page.wait_for_selector("[data-panel^='rethink'] canvas")
    legend = opened.page.locator("[data-panel^='rethink'] .legend").text_content()
    assert "right → wrong" in legend and "wrong → right" in legend


def test_curves_of_two_runs_can_be_aligned_by_the_steps_of_a_stage(opened):
    last = "charts[0].plot.data.slice(1).map((values) => charts[0].plot.data[0][values.findLastIndex(isNumber)])"
    opened.page.wait_for_selector(".panel canvas")
    assert set(opened.page.evaluate(last)) == {120}
    opened.page.select_option("#f-stage", "rl")
    opened.until(f"charts.length && JSON.stringify([...new Set({last})]) === '[120,100]'")
    assert opened.state()["stage"] == "rl"
    opened.page.select_option("#f-stage", "cold")
    opened.until(f"charts.length && JSON.stringify([...new Set({last})]) === '[20]'")


def test_a_box_of_a_track_lies_on_the_nearest_frame(opened):
    opened.draw_all()
    marked = "frames => frames.map(frame => frame.querySelectorAll('.mark.gold').length)"
    assert opened.page.eval_on_selector_all("#group-2 .frame", marked) == [0, 0, 1, 0, 1, 0, 0, 0]


def test_results_health_and_notices_are_shown(opened):
    assert opened.page.locator("#state").text_content() == "finished"
    rows = opened.page.locator("#results tbody tr").all_text_contents()
    assert rows[0].startswith("ground") and "+0.530" in rows[0] and "+0.46 to +0.60" in rows[0]
    assert opened.count("#results tbody svg") == 3
    assert opened.page.locator("#results .hint").text_content().startswith("Held-out reward, temperature 0.7, before")
    assert "min_entropy" in opened.page.locator("#health").text_content()
    assert "recorded by an older version" in opened.page.locator(".notices").text_content()


def test_a_sample_over_time_has_a_card_for_each_step(opened):
    opened.page.locator("#group-0 .times-link").click()
    opened.page.wait_for_selector(".trend")
    assert opened.page.locator(".card-head .sample").all_text_contents() == ["rl 10", "rl 20"]
    assert opened.count(".trend circle") == opened.count(".response") == 8
    assert opened.page.locator(".trend .tick").all_text_contents() == ["0", "0.5", "1"]


def test_two_runs_lie_beside_each_other_and_flips_can_be_picked(opened):
    opened.go(view="compare", a="r0/rl-000020-validation", b="r1/rl-000020-validation")
    samples = opened.page.locator(".pair .card-head .sample")
    assert samples.count() == 4
    assert opened.count(".pair .response") == 8
    opened.page.check("#f-flips")
    opened.until("document.querySelectorAll('.pair').length === 2")
    assert samples.all_text_contents() == ["ground/validation/000001", "ground/validation/000002"]
    opened.page.locator(".pair .response").first.hover()
    assert opened.count(".mark.lit") == 1


def test_a_comparison_begins_with_steps_of_one_kind_and_keeps_to_it(opened):
    opened.go(view="compare")
    assert opened.count(".pair") == 4
    chosen = "['a', 'b'].map((name) => document.getElementById(`f-${name}`).value)"
    assert opened.page.evaluate(chosen) == ["r0/rl-000020-validation", "r1/rl-000020-validation"]
    opened.page.select_option("#f-a", FIRST)
    opened.until("document.querySelectorAll('.pair').length === 6")
    assert opened.page.evaluate(chosen) == [FIRST, "r1/rl-000010"]


def test_settings_of_two_runs_show_what_differs(opened):
    opened.go(view="config", diff="1")
    assert opened.page.locator(".config tbody tr").all_text_contents() == ["stages.0.loss.kl.coef0.010.1"]
    opened.go(view="config", cq="group")
    assert opened.count(".config tbody tr") == 1


def test_predictions_show_what_was_read_and_can_be_kept_to_disagreements(opened):
    opened.go(view="benchmarks")
    assert opened.page.locator(".read").all_text_contents() == ["B", "14", "C"]
    opened.page.select_option("#f-only", "disagree")
    opened.until("document.querySelectorAll('.prediction').length === 1")
    assert "last_number" in opened.page.locator(".prediction").text_content()


def test_every_control_has_a_name_and_dark_mode_can_be_chosen(opened):
    nameless = """() => [...document.querySelectorAll("button, input, select, a")].filter((one) =>
        !one.textContent.trim() && !one.ariaLabel && !one.closest("label")?.textContent.trim()).length"""
    assert opened.page.evaluate(nameless) == 0
    background = "getComputedStyle(document.body).backgroundColor"
    before = opened.page.evaluate(background)
    opened.page.click("#theme")
    assert opened.page.evaluate(background) != before


def test_a_live_page_follows_the_run_and_keeps_what_is_open(browser, exports):
    documents = PageDocuments(copy.deepcopy(exports[0].documents), exports[0].media)
    run = documents.index["runs"][0]
    steps = run["steps"]
    run |= {"state": "running", "steps": [step for step in steps if step["key"] != SECOND], "samples": {}}
    documents.index["live"] = True
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    with served(documents) as address:
        opened = Opened(page, documents, f"{address}/?token=s3cret")
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.on("console", lambda message: opened.complaints.append(message.text))
        opened.go(step=FIRST, group="1", q="40")
        assert page.locator("#state").text_content() == "running"
        assert opened.count("#steps button") == len(steps) - 1
        opened.until("document.images.length && document.images[0].naturalWidth === 320")
        page.evaluate("window.kept = document.getElementById('group-1')")
        run |= {"state": "finished", "steps": steps}
        opened.until("document.getElementById('state').textContent === 'finished'")
        opened.until(f"document.querySelectorAll('#steps button').length === {len(steps)}")
        assert page.evaluate("window.kept === document.getElementById('group-1')")
        assert opened.state() == {"step": FIRST, "group": "1", "q": "40"}
        assert not opened.complaints
    opened.until("document.getElementById('live').classList.contains('lost')")
    page.close()

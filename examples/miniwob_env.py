"""click-button of MiniWoB++ in a real Chromium, for `miniwob.yaml`: the page itself says whether a click was right."""

from functools import cache
from importlib.metadata import distribution
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from mmrl import Action, Observation, Sample, StepResult

SIDE = 224  # of a picture, in pixels: processors of all families keep this size, so coordinates are in page pixels
PAGE = Path(distribution("miniwob").locate_file("miniwob/html/miniwob/click-button.html")).as_uri()
# The page counts down from 10 s, which would make the reward depend on speed.
START = """seed => {
  Math.seedrandom(seed); core.EPISODE_MAX_TIME = 2 ** 31 - 1; core.startEpisodeReal(); core.hideDisplay(); }"""
MIDDLE = """() => {
  const isAsked = button => button.textContent === core.getUtterance().split('"')[1];
  const box = [...document.querySelectorAll("#area button")].find(isAsked).getBoundingClientRect();
  return [Math.round(box.x + box.width / 2), Math.round(box.y + box.height / 2)]; }"""


@cache
def open_page() -> Page:
    """Return the page that the episodes of a process share."""
    browser = sync_playwright().start().chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": SIDE, "height": SIDE})
    page.goto(PAGE)
    return page


class ClickButton:
    """An episode: one of the buttons on a page is to be clicked. Any button ends it."""

    def reset(self, sample: Sample, seed: int) -> Observation:
        """Show the page of a seed."""
        self.seed, self.clicks = str(seed), []
        return self.show("core.getUtterance() + ' Call click with its coordinate [x, y].'")

    def step(self, action: str | Action) -> StepResult:
        """Click where the call says."""
        try:
            x, y = action.arguments["coordinate"]
            if not (action.name == "click" and 0 <= x < SIDE and 0 <= y < SIDE):
                raise ValueError
        except (AttributeError, KeyError, TypeError, ValueError):
            return StepResult(observation=self.show("'That is not a click on the page.'"), valid=False)
        self.clicks.append((x, y))
        observation = self.show("''")
        done, reward = open_page().evaluate("[WOB_DONE_GLOBAL, WOB_RAW_REWARD_GLOBAL]")
        info = {"success": float(reward > 0)}
        return StepResult(observation=observation, reward=float(reward), terminated=done, info=info)

    def expert(self) -> Action:
        """Click the middle of the button."""
        self.show("''")
        return Action("click", {"coordinate": open_page().evaluate(MIDDLE)})

    def show(self, text: str) -> Observation:
        """Begin again, repeat the clicks of this episode, and show the page with the value of an expression."""
        page = open_page()
        page.mouse.move(0, 0)
        page.evaluate(START, self.seed)
        for x, y in self.clicks:
            page.mouse.click(x, y)
        return Observation(text=page.evaluate(text), media=(page.screenshot(animations="disabled"),))

    def close(self) -> None:
        """Leave the page to the other episodes."""


def make() -> ClickButton:
    """Make the environment of one episode."""
    return ClickButton()

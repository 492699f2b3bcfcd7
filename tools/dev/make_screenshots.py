"""Makes the pictures of `mmrl view` in README and docs from runs, in Chromium.

    python tools/dev/make_screenshots.py quickstart=runs/quickstart tools=runs/zoom ... [--out docs/images]

`PICTURES` names the runs, and the parts of their pages.
"""

from __future__ import annotations

import argparse
import sys
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from mmrl.cli import main as mmrl_command

CHROMIUM = "/usr/bin/chromium"
VIEWPORT = {"width": 1280, "height": 800}
# By run: its pictures by name, each with the page's state, as after `#` in its address, and the element at the top.
PICTURES = {
    "quickstart": {"curves": ("", "#curve-panels"), "groups": ("sort=spread&task=ground", "#cards")},
    "rethinking": {"rethinking": ("sort=spread&color=logprob", "#cards")},
    "video": {"video": ("sort=spread", "#cards")},
    "tools": {"tools": ("sort=spread&color=advantage", "#cards")},
}
QUALITY = 82


def take_picture(page: Page, address: str, state: str, element: str) -> bytes:
    """Return a picture of the page in a state, as WebP."""
    page.goto("about:blank")
    page.goto(f"{address}#{state}")
    page.wait_for_selector("html[data-ready]")
    page.locator(element).first.evaluate("element => element.scrollIntoView()")
    page.wait_for_timeout(1500)  # pictures and curves are drawn as they come into view
    content = BytesIO()
    Image.open(BytesIO(page.screenshot())).save(content, "WEBP", quality=QUALITY, method=6)
    return content.getvalue()


def main() -> None:
    """Export each run, open it, and write its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN", help=f"one of {', '.join(PICTURES)}, and a run")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=VIEWPORT, color_scheme="light")
        for given in arguments.runs:
            name, _, run = given.partition("=")
            if name not in PICTURES:
                sys.exit(f"{name!r} is none of the runs {', '.join(PICTURES)}")
            exported = Path(folder, name)
            if code := mmrl_command(["view", run, "--out", str(exported)]):
                sys.exit(code)
            for picture, (state, element) in PICTURES[name].items():
                content = take_picture(page, (exported / "index.html").as_uri(), state, element)
                (arguments.out / f"{picture}.webp").write_bytes(content)
                print(f"{picture}.webp: {len(content) / 1e3:.0f} KB")
        browser.close()


if __name__ == "__main__":
    main()

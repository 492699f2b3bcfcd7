"""Collects the pages of the documentation site, and builds it with mkdocs: `make docs`.

A site holds only files below one folder, and our pages link to code, recipes and pages of other folders. So docs/ is
copied to build/site, other files that its pages link to go to build/site/repo, and the links are changed accordingly.
A file that is not Markdown gets the ending .txt, because browsers show that and download .py and .yaml.

    python tools/dev/make_site.py [--out FOLDER]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS, STAGED = ROOT / "docs", ROOT / "build" / "site"
# Pages of the navigation that lie outside docs/.
OTHER_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "datasets/README.md", "rewards/README.md")
LINK = re.compile(r"\[([^\]\[]+)\]\(([^()\s#]*)(#[^()\s]*)?\)")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder of the site (default: site)")
    out = parser.parse_args().out.resolve()
    shutil.rmtree(STAGED, ignore_errors=True)
    stage_site(STAGED)
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(out)]
    # Its notice that the theme's next version will not support mkdocs is not news to a reader of mkdocs.yml.
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False)
    if done.returncode == 0:
        print(f"Open {out / 'index.html'}; for the search: python -m http.server --directory {out}")
    return done.returncode


def stage_site(folder: Path) -> None:
    """Copy docs/ and all that its pages link to into `folder`."""
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("*.md"), dirs_exist_ok=True)
    pages = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in OTHER_PAGES)]
    seen = set(pages)
    for page in pages:  # grows while it is read: a page outside docs/ that is linked to becomes one of the site
        target = folder / staged_path(page)
        target.parent.mkdir(parents=True, exist_ok=True)
        text, linked = rewrite_links(page, page.read_text(encoding="utf-8"))
        target.write_text(text, encoding="utf-8")
        for file in linked - seen:
            seen.add(file)
            if file.suffix == ".md":
                pages.append(file)
            elif not file.is_relative_to(DOCS):
                copy = folder / staged_path(file)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)


def staged_path(file: Path) -> Path:
    """Return the place of a file of the repository within the site's sources."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS)
    path = "repo" / file.relative_to(ROOT)
    return path if file.suffix == ".md" else path.with_name(path.name + ".txt")


def rewrite_links(page: Path, text: str) -> tuple[str, set[Path]]:
    """Return a page with its links as they are in the site, and the files that it links to.

    A link to a folder becomes plain text, since the site has no page of it. Code blocks stay as they are.
    """
    linked: set[Path] = set()

    def rewrite(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        file = (page.parent / target).resolve()
        if file.is_dir():
            return label
        linked.add(file)
        path = os.path.relpath(staged_path(file), staged_path(page).parent)
        return f"[{label}]({path}{anchor})"

    parts, start = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(rewrite, text[start : fence.start()]), fence[0]]
        start = fence.end()
    parts.append(LINK.sub(rewrite, text[start:]))
    return "".join(parts), linked


if __name__ == "__main__":
    sys.exit(main())

"""The documentation as a site: the navigation names every page, links lead somewhere, nothing comes from outside."""

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MKDOCS = ROOT / "mkdocs.yml"
SPEC = importlib.util.spec_from_file_location("make_site", ROOT / "tools" / "dev" / "make_site.py")
make_site = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(make_site)


def test_navigation_names_every_page_once():
    navigation = MKDOCS.read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = re.findall(r"[\w/.-]+\.md$", navigation, re.M)
    docs = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages) == sorted([*docs, *(f"repo/{name}" for name in make_site.OTHER_PAGES)])


def test_staged_links_lead_to_staged_files(tmp_path):
    make_site.stage_site(tmp_path)
    broken, count = [], 0
    for page in tmp_path.rglob("*.md"):
        for _, target, _ in make_site.LINK.findall(make_site.FENCE.sub("", page.read_text(encoding="utf-8"))):
            if target and not re.match(r"[a-z]+:", target):
                count += 1
                if not (page.parent / target).is_file():
                    broken.append(f"{page.relative_to(tmp_path)}: {target}")
    assert broken == []
    assert count > 300
    assert (tmp_path / "repo" / "examples" / "reward.py.txt").read_text() == (ROOT / "examples/reward.py").read_text()


def test_links_change_where_the_site_lies_differently():
    page = ROOT / "docs" / "extending" / "reward.md"
    text = "[a](../data.md#order) [b](../../examples/reward.py) [c](../../examples) [d](#x) [e](https://x.y)"
    assert make_site.rewrite_links(page, f"{text}\n```\n{text}\n```\n")[0] == (
        f"[a](../data.md#order) [b](../repo/examples/reward.py.txt) c [d](#x) [e](https://x.y)\n```\n{text}\n```\n"
    )


def lists_within_paragraphs(text: str) -> list[str]:
    """Return the first lines of lists and tables that follow a line of text: GitHub shows them as such, a site not."""
    found, before = [], ""
    for line in make_site.FENCE.sub("", text).splitlines():
        if re.match(r"- |\d+\. |\|", line) and before and not re.match(r"- |\d+\. |\||\s|#", before):
            found.append(line)
        before = line
    return found


def test_lists_and_tables_follow_a_blank_line(tmp_path):
    make_site.stage_site(tmp_path)
    for page in tmp_path.rglob("*.md"):
        assert lists_within_paragraphs(page.read_text(encoding="utf-8")) == [], page.relative_to(tmp_path)
    assert lists_within_paragraphs("You may\n- do this;\n- do that\n  as well.\n\n- fine\n") == ["- do this;"]


class OutsideReferences(HTMLParser):
    """Collects what a page would fetch from another host by itself; links that a reader follows are none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            fetched = name in ("src", "srcset", "data", "poster") or (tag == "link" and name == "href")
            if fetched and re.match(r"(https?:)?//", value or ""):
                self.found.append(f"<{tag} {name}={value}>")


def outside_references(text: str) -> list[str]:
    parser = OutsideReferences()
    parser.feed(text)
    return parser.found + re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)\"';]*", text)


def test_outside_references_are_found():
    page = (
        '<a href="https://a.b">ok</a><script src="https://c.d/x.js"></script><link rel="stylesheet" href="//e.f/y.css">'
        '<img src="z.png"><style>@import "https://g.h/i.css"; p { src: url(http://j.k/l.woff) }</style>'
    )
    assert len(outside_references(page)) == 4


def build(config: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(out)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})


@pytest.mark.slow
def test_site_is_built_without_a_warning_and_fetches_nothing_from_outside(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, make_site.__file__, "--out", tmp_path / "site"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 60
    for page in [*pages, *(tmp_path / "site").rglob("*.css")]:
        assert outside_references(page.read_text(encoding="utf-8")) == [], page


@pytest.mark.slow
def test_broken_links_fail_the_build(tmp_path):
    pytest.importorskip("mkdocs")
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "first_run.md").write_text("[gone](gone.md)\n[gone](glossary.md#no-such-heading)\n")
    (tmp_path / "pages" / "glossary.md").write_text("# Glossary\n")
    settings = MKDOCS.read_text().replace("docs_dir: build/site", "docs_dir: pages").partition("\nnav:\n")[0]
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"{settings}\nnav: [first_run.md, glossary.md]\n")
    done = build(config, tmp_path / "site")
    assert done.returncode == 1
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]  # each fails a strict build
    assert len(warnings) == 2, done.stderr
    for target in ("gone.md", "glossary.md#no-such-heading"):
        assert any("'first_run.md'" in line and f"'{target}'" in line for line in warnings), done.stderr

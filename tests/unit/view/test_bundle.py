"""The page's files: what is inlined cannot end its element, and the policy lets nothing else run."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from mmrl.view import bundle
from mmrl.view.bundle import linked_page, page_file, write_folder, write_single

PAGE = Path(bundle.__file__).parent / "page"
OWN = sorted(path for path in PAGE.iterdir() if not path.name.startswith("uPlot"))
VENDORED = {  # of the npm package uplot 1.6.32
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
HOSTILE = {"text": "</script><script>alert(1)</script><!-- \u2028 \ud800 \u202e", "__proto__": "x"}
INDEX = {"schema": 1, "runs": []}
# What would parse text as HTML or as code, or let a policy forbid a style that the page sets.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setAttribute\(\"style|srcdoc|"
    r"DOMParser|createContextualFragment|\.on[a-z]+ = "
)


def policy_of(html: str) -> str:
    first = re.search(r"<head>\s*<([^>]*)>", html).group(1)
    found = re.fullmatch(r'meta http-equiv="Content-Security-Policy" content="([^"]*)"', first)
    assert found, "the policy must be the first element, or what precedes it is not covered"
    return found.group(1)


def json_elements(html: str) -> dict[str, object]:
    elements = re.findall(r'<script type="application/json" id="data:([^"]+)">([^<]*)</script>', html)
    return {key: json.loads(text) for key, text in elements}


def test_single_file_holds_documents_and_pictures_and_hashes_of_its_script_and_style(tmp_path):
    path = tmp_path / "new" / "run.html"
    write_single(path, [("index", INDEX), ("r0/rl-000001", HOSTILE)], [("ab12", b"RIFF")])
    html = path.read_text()
    url = "data:image/jpeg;base64," + base64.b64encode(b"RIFF").decode()
    page = {"mode": "single"}
    assert json_elements(html) == {"page": page, "index": INDEX, "r0/rl-000001": HOSTILE, "media/ab12": {"url": url}}
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert (PAGE / "uPlot.LICENSE").read_text() in script
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    assert policy_of(html) == (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; img-src data:"
    )
    assert list(path.parent.iterdir()) == [path]


def test_inlined_text_cannot_end_its_element(tmp_path):
    write_single(tmp_path / "run.html", [("index", HOSTILE)], [])
    html = (tmp_path / "run.html").read_bytes()
    assert b"alert(1)" in html
    assert b"<script>alert" not in html
    assert b"<!--" not in html
    for separator in ("\u2028", "\u2029"):
        assert separator.encode() not in html.partition(b'id="data:index"')[2].partition(b"</script>")[0]
    assert len(re.findall(rb"<script", html)) == len(re.findall(rb"</script>", html)) == 3


def test_folder_has_a_call_for_each_document_and_a_file_for_each_picture(tmp_path):
    write_folder(tmp_path / "out", [("index", INDEX), ("r0/rl-000001", HOSTILE)], [("ab12", b"RIFF")])
    files = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    shown = {"index.html", bundle.ICON, bundle.LICENSE, *bundle.STYLES, *bundle.SCRIPTS}
    assert files == shown | {"data/index.js", "data/r0/rl-000001.js", "media/ab12.jpg"}
    call = (tmp_path / "out" / "data" / "r0" / "rl-000001.js").read_text(encoding="ascii")
    key, document = re.fullmatch(r'mmrlData\("([^"]*)", (.*)\);\n', call).groups()
    assert (key, json.loads(document)) == ("r0/rl-000001", HOSTILE)
    html = (tmp_path / "out" / "index.html").read_text()
    assert "script-src 'self' file:;" in policy_of(html)
    assert re.findall(r'<script src="([^"]*)">', html) == list(bundle.SCRIPTS)
    assert re.findall(r'<link rel="stylesheet" href="([^"]*)">', html) == list(bundle.STYLES)


def test_live_page_has_the_token_and_may_talk_to_its_server_alone():
    html = linked_page({"mode": "live", "token": "s3cret</script>"}).decode()
    assert json_elements(html) == {"page": {"mode": "live", "token": "s3cret</script>"}}
    assert policy_of(html).endswith("script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'")


def test_page_file_gives_scripts_and_styles_and_nothing_else():
    assert page_file("app.js") == ("text/javascript; charset=utf-8", (PAGE / "app.js").read_bytes())
    assert page_file("style.css")[0] == "text/css; charset=utf-8"
    for name in ("index.html", "../bundle.py", "/etc/passwd", "", "page/app.js"):
        assert page_file(name) is None


@pytest.mark.parametrize("key", ["../index", "/etc/passwd", "r0/../x", "a b", 'a"', "", "r0//x", ".hidden"])
def test_a_key_that_could_leave_the_folder_is_refused(tmp_path, key):
    with pytest.raises(ValueError, match="is not a key"):
        write_folder(tmp_path / "out", [(key, {})], [])


def test_a_number_that_is_not_finite_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_single(tmp_path / "run.html", [("index", {"x": float("nan")})], [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "digest"), VENDORED.items(), ids=list(VENDORED))
def test_vendored_library_is_the_published_one(name, digest):
    assert hashlib.sha256((PAGE / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("path", [path for path in OWN if path.suffix == ".js"], ids=lambda path: path.name)
def test_scripts_never_parse_text_as_html_or_code(path):
    source = path.read_text()
    assert not FORBIDDEN.findall(source)
    assert '"use strict";' in source
    assert max(map(len, source.splitlines())) <= 120


@pytest.mark.parametrize("name", [*bundle.STYLES, *bundle.SCRIPTS])
def test_what_is_inlined_cannot_end_its_element_itself(name):
    assert not re.search(r"</(script|style)|<!--", (PAGE / name).read_text(encoding="utf-8"), re.IGNORECASE)


def test_own_code_of_the_page_stays_small():
    assert {path.name for path in OWN} == {"index.html", "style.css", bundle.ICON, *bundle.SCRIPTS} - set(VENDORED)
    assert sum(path.stat().st_size for path in OWN) <= 100_000  # bytes, with comments; the plotting library is beside

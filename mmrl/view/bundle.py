"""The page of `mmrl view` as a folder of files or one self-contained file; `page_server` serves it live.

The page shows what models and datasets wrote, which is untrusted text. A Content-Security-Policy, the first element
of every form, lets the browser run only the page's own scripts and load only its own data and pictures.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from mmrl.utils.files import temporary_path

_PAGE: Final = Path(__file__).parent / "page"
STYLES: Final = ("uPlot.min.css", "style.css")
# In the order in which the browser runs them: each may use the names of those before it.
SCRIPTS: Final = (
    *("uPlot.iife.min.js", "data.js", "text.js", "elements.js", "curves.js", "geometry.js"),
    *("tokens.js", "responses.js", "groups.js", "compare.js", "benchmarks.js", "overview.js", "app.js"),
)
ICON: Final = "icon.svg"
LICENSE: Final = "uPlot.LICENSE"  # must accompany every copy of uPlot
_TYPES: Final = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
_KEY: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
_NOTHING_ELSE: Final = "default-src 'none'; base-uri 'none'; form-action 'none'"
Documents = Iterable[tuple[str, dict[str, Any] | bytes]]  # key and content; bytes become base64
Media = Iterable[tuple[str, bytes]]  # id and content of pictures; read after the documents, whose building makes them


def write_folder(folder: Path, documents: Documents, media: Media) -> None:
    """Write the page as a folder that opens from `file://` and from any static web server.

    Documents become `data/<key>.js`, each a call that registers the document, because a browser lets a page load a
    script from `file://` but not fetch a file. Media become `media/<id>.jpg`.

    Raises:
        OSError: the folder cannot be written.
        ValueError: a key is not made of letters, digits, `.`, `_`, `-` and `/`, or a number is not finite.
    """
    for key, document in documents:
        _write(folder / "data" / f"{key}.js", f'mmrlData("{_checked(key)}", {to_json(document)});\n'.encode())
    for media_id, content in media:
        _write(folder / "media" / f"{_checked(media_id)}.jpg", content)
    for name in (*STYLES, *SCRIPTS, ICON, LICENSE):
        _write(folder / name, (_PAGE / name).read_bytes())
    # Last, so that a page that is there is complete.
    _write(folder / "index.html", linked_page({"mode": "folder"}))


def write_single(path: Path, documents: Documents, media: Media) -> None:
    """Write the page, its data and its pictures into one file; raises as `write_folder`."""
    style = "\n".join(map(_read, STYLES))
    script = f"/*\n{_read(LICENSE)}*/\n" + "\n;\n".join(map(_read, SCRIPTS))
    sources = [f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (script, style)]
    policy = f"{_NOTHING_ELSE}; script-src {sources[0]}; style-src {sources[1]}; img-src data:"
    head, tail = _fill(policy, f"<style>{style}</style>", {"mode": "single"}, f"<script>{script}</script>")
    icon = b64encode(_read(ICON).encode()).decode()
    head = head.replace(f'href="{ICON}"', f'href="data:image/svg+xml;base64,{icon}"')
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = temporary_path(path)
    try:
        # Written piece by piece: the pictures of a long run do not have to fit in memory together.
        with fresh.open("w", encoding="utf-8", newline="\n") as file:
            file.write(head)
            for key, document in documents:
                file.write(_data_element(key, document))
            for media_id, content in media:
                url = {"url": f"data:image/jpeg;base64,{b64encode(content).decode()}"}
                file.write(_data_element(f"media/{media_id}", url))
            file.write(tail)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def page_file(name: str) -> tuple[str, bytes] | None:
    """Return content type and content of a script, a style or the icon; None if the page has no such file."""
    if name not in (*STYLES, *SCRIPTS, ICON):
        return None
    return _TYPES[Path(name).suffix], (_PAGE / name).read_bytes()


def to_json(document: object) -> str:
    """Return ASCII JSON that is safe inside HTML too: U+2028, lone surrogates and `<` are escaped; bytes are base64."""
    if isinstance(document, bytes):
        return f'"{b64encode(document).decode()}"'
    return json.dumps(document, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def linked_page(settings: dict[str, str]) -> bytes:
    """Return the page with links to its styles and scripts, which lie beside it; a live page has a token."""
    # A server needs 'self'. Browsers disagree on whether it covers file://, and a folder must open there too.
    own = "'self'" if settings["mode"] == "live" else "'self' file:"
    policy = f"{_NOTHING_ELSE}; script-src {own}; style-src {own}; img-src {own}; connect-src 'self'"
    styles = "\n".join(f'<link rel="stylesheet" href="{name}">' for name in STYLES)
    scripts = "\n".join(f'<script src="{name}"></script>' for name in SCRIPTS)
    return "".join(_fill(policy, styles, settings, scripts)).encode()


def _fill(policy: str, styles: str, settings: dict[str, str], scripts: str) -> tuple[str, str]:
    """Return the page's text before and after the place of the inlined documents."""
    head, tail = _read("index.html").split("<!-- documents -->\n")
    head = head.replace("<!-- policy -->", f'<meta http-equiv="Content-Security-Policy" content="{policy}">')
    head = head.replace("<!-- styles -->", styles)
    return head + _data_element("page", settings), tail.replace("<!-- scripts -->", scripts)


def _data_element(key: str, document: object) -> str:
    return f'<script type="application/json" id="data:{_checked(key)}">{to_json(document)}</script>\n'


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not a key of the page's data")
    return key


def _read(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)

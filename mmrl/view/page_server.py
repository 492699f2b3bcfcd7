"""Serves the live page of `mmrl view` on this machine."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Final
from urllib.parse import parse_qs

from mmrl.types import UserError
from mmrl.view.bundle import linked_page, page_file, to_json
from mmrl.view.media import PictureStore
from mmrl.view.run_documents import Builders, RunDocuments, build_index

_ADDRESS: Final = "127.0.0.1"
# A web page elsewhere can make its own name point here (DNS rebinding), and its requests then carry that name.
_NAMES: Final = (_ADDRESS, "localhost", "[::1]")
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # The page has its own policy in a meta element, where browsers ignore `frame-ancestors`.
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; frame-ancestors 'none'",
}
_TEXT: Final = "text/plain; charset=utf-8"


class PageServer(ThreadingHTTPServer):
    """Serves the live page, of runs that may still grow, to a browser on this machine until it is shut down.

    Reading needs the token of its address, which other sites and other users do not have. A request names a document or
    a picture of the runs, never a file.
    """

    daemon_threads = True

    def __init__(self, runs: Sequence[RunDocuments], pictures: PictureStore, port: int) -> None:
        """Listen at a port of this machine; 0 takes a free one.

        Raises:
            UserError: the port cannot be used.
        """
        self.runs, self.pictures, self.token = runs, pictures, secrets.token_urlsafe(24)
        # Documents and pictures are made one at a time, because they share the caches of the runs.
        self.lock = Lock()
        try:
            super().__init__((_ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "ports are numbers from 0 to 65535"
            raise UserError(f"cannot listen at port {port}: {reason}; choose another --port") from error
        self.url = f"http://{_ADDRESS}:{self.server_port}/?token={self.token}"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds that a connection may be silent

    def do_GET(self) -> None:
        """Answer a request for the page, one of its files, a document or a picture."""
        with self.server.lock:
            status, content_type, content = self._answer()
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _answer(self) -> tuple[int, str, bytes]:
        # The port is not compared: through `ssh -L` the browser uses another one.
        if re.sub(r":\d+$", "", self.headers.get("Host", "")) not in _NAMES:
            return 403, _TEXT, b"this name is not the address of the page\n"
        path, _, query = self.path.partition("?")
        path = path.lstrip("/")
        # Scripts and styles contain no data of the runs, and their elements have addresses without the token.
        file = page_file(path)
        if file is not None:
            return 200, *file
        sent = parse_qs(query).get("token", [""])[0]
        if not secrets.compare_digest(sent.encode(), self.server.token.encode()):
            return 401, _TEXT, b"open the address that `mmrl view` printed: it ends with a token\n"
        if path == "":
            return 200, "text/html; charset=utf-8", linked_page({"mode": "live", "token": self.server.token})
        builders: Builders = {"index": partial(build_index, self.server.runs, live=True)}
        for run in self.server.runs:
            builders |= run.list_documents()
        document = re.fullmatch(r"data/(.+)\.json", path)
        if document and document[1] in builders:
            return 200, "application/json", to_json(builders[document[1]]()).encode()
        picture = re.fullmatch(r"media/(.+)\.jpg", path)
        content = self.server.pictures.read(picture[1]) if picture else None
        return (404, _TEXT, b"there is no such page\n") if content is None else (200, "image/jpeg", content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the page asks every two seconds, and addresses hold the token."""

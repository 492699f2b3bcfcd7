"""The live page: documents and pictures of runs that may still grow, served to a browser on this machine.

Whoever has the token may read; other sites and other users do not have it. A request names a document or a picture of
the runs, never a file.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import socket
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Final
from urllib.parse import parse_qs, urlsplit

from mmrl.types import UserError
from mmrl.view import bundle
from mmrl.view.documents import build_document
from mmrl.view.media import PictureStore
from mmrl.view.run_documents import RunDocuments

TOKEN_HEADER: Final = "X-Mmrl-Token"
_HEADERS: Final = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    # The page has a policy of its own in a meta element, where browsers ignore these two.
    ("Content-Security-Policy", "default-src 'self'; object-src 'none'; frame-ancestors 'none'"),
    ("X-Frame-Options", "DENY"),
)
_JSON: Final = "application/json"
_TEXT: Final = "text/plain; charset=utf-8"


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a server at `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class PageServer(ThreadingHTTPServer):
    """Serves one page until it is shut down. Its address has a token that is new each time."""

    daemon_threads = True

    def __init__(self, runs: Sequence[RunDocuments], pictures: PictureStore, *, host: str, port: int) -> None:
        """Listen at `host`; port 0 takes a free one.

        Raises:
            UserError: the address cannot be used.
        """
        self.runs, self.pictures = runs, pictures
        self.token = secrets.token_urlsafe(24)
        # Documents are made one at a time: they share what is cached of the runs.
        self.lock = Lock()
        # A web page elsewhere can make its own name point here (DNS rebinding), and its requests then carry that name.
        self.allowed_hosts = {"localhost", "127.0.0.1", "::1", host}
        if not is_loopback(host):
            self.allowed_hosts.add(socket.gethostname())
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"cannot listen at {host} port {port}: {error}; choose another --host or --port") from error

    @property
    def url(self) -> str:
        """Address of the page, with the token."""
        host, port = self.server_address[:2]
        name = host.decode() if isinstance(host, bytes | bytearray) else str(host)
        shown = f"[{name}]" if ":" in name else name
        return f"http://{shown}:{port}/?token={self.token}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing for a browser that closed its connection; print the traceback of anything else."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "mmrl"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds that a connection may be silent

    def do_GET(self) -> None:
        """Answer a request for the page, one of its files, a document or a picture."""
        if not self._is_allowed_host():
            self._send(403, _TEXT, b"this name is not the address of the page\n")
            return
        address = urlsplit(self.path)
        path = address.path.lstrip("/")
        if path == "favicon.ico":  # browsers ask for it on their own
            self._send(204, _TEXT, b"")
            return
        # Scripts and styles hold nothing of the runs, and a <script> element cannot send a header.
        file = bundle.page_file(path)
        if file is not None:
            self._send(200, *file)
            return
        if not self._has_token(parse_qs(address.query)):
            self._send(401, _TEXT, b"open the address that `mmrl view` printed: it ends with a token\n")
        elif path in ("", "index.html"):
            self._send(200, "text/html; charset=utf-8", bundle.live_page(self.server.token))
        elif path.startswith("data/") and path.endswith(".json"):
            self._send_document(path.removeprefix("data/").removesuffix(".json"))
        elif path.startswith("media/") and path.endswith(".webp"):
            self._send_picture(path.removeprefix("media/").removesuffix(".webp"))
        else:
            self._send(404, _TEXT, b"no such page\n")

    def _send_document(self, key: str) -> None:
        with self.server.lock:
            document = build_document(self.server.runs, key)
        if document is None:
            self._send(404, _TEXT, b"no such document\n")
            return
        self._send(200, _JSON, json.dumps(document, allow_nan=False, separators=(",", ":")).encode())

    def _send_picture(self, picture_id: str) -> None:
        picture = self.server.pictures.read(picture_id)
        if picture is None:
            self._send(404, _TEXT, b"no such picture\n")
        else:
            self._send(200, "image/webp", picture)

    def _is_allowed_host(self) -> bool:
        """Return True if the browser asked for this machine by its address or own name."""
        # The port is not compared: through `ssh -L` the browser's is another.
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        if name in self.server.allowed_hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        # A number is not a name that somebody could have pointed here.
        return not is_loopback(str(self.server.server_address[0]))

    def _has_token(self, query: dict[str, list[str]]) -> bool:
        sent = self.headers.get(TOKEN_HEADER) or query.get("token", [""])[0]
        return secrets.compare_digest(sent.encode(), self.server.token.encode())

    def _send(self, status: int, content_type: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in _HEADERS:
            self.send_header(name, value)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the page asks every two seconds, and addresses hold the token."""

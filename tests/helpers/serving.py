"""Real HTTP servers for tests of clients."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Requests = list[tuple[Any, dict[str, str]]]


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Run a server on this machine; `answer(handler)` writes the reply to a GET or POST. Yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self)
            self.close_connection = True

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def served(answer: Callable[[BaseHTTPRequestHandler, Any], None]) -> Iterator[tuple[str, Requests]]:
    """Run a server of JSON; `answer(handler, body)` writes the reply to a POST. Yields its URL and its requests."""
    requests: Requests = []

    def answer_body(handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        requests.append((body, dict(handler.headers)))
        answer(handler, body)

    with serving(answer_body) as url:
        yield f"{url}/v1/chat/completions", requests


def reply(handler, body, status=200):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def judging(opinion):
    """Return an answer of a judge at /chat/completions; `opinion` turns the material into a verdict."""

    def answer(handler, body):
        content = body["messages"][1]["content"]
        first, material, *_ = (content if isinstance(content, str) else content[-1]["text"]).split("\n")
        verdict = {"id": first.split()[1], **opinion(json.loads(material))}
        reply(handler, {"choices": [{"message": {"content": json.dumps(verdict)}}]})

    return answer

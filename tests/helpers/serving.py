"""A real HTTP server for tests of clients."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def served(answer):
    """Run a server on this machine; `answer(handler, body)` writes the reply. Yields its URL and its requests."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((body, dict(self.headers)))
            answer(self, body)
            self.close_connection = True

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/chat/completions", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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

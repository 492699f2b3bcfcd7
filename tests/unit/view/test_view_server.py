"""The live page: only requests with the token and this machine's name are answered, and no request names a file."""

import http.client
import json
import shutil
import threading
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from view_runs import make_run, rollout_row, write_lines

from mmrl.types import UserError
from mmrl.view.media import PictureStore
from mmrl.view.page_server import PageServer
from mmrl.view.run_documents import RunDocuments


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "small")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of a run that no test changes."""
    with serve(make_run(tmp_path_factory.mktemp("runs") / "small")) as server:
        yield server


@contextmanager
def serve(run):
    pictures = PictureStore(with_media=True)
    runs = [RunDocuments("r0", run, pictures, ())]
    with PageServer(runs, pictures, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path, *, method="GET", token=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    token = server.token if token is None else token
    connection.request(method, f"{path}?token={token}" if token else path, headers=headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, content


def ask_json(server, key):
    response, content = ask(server, f"/data/{key}.json")
    assert (response.status, response.getheader("Content-Type")) == (200, "application/json")
    return json.loads(content)


def test_the_printed_address_opens_the_page_and_the_page_reads_its_data(server):
    address = urlsplit(server.url)
    response, content = ask(server, f"{address.path}?{address.query}", token="")
    assert response.status == 200
    assert server.token.encode() in content
    index = ask_json(server, "index")
    assert index["live"] is True
    step = ask_json(server, index["runs"][0]["steps"][1]["key"])
    source = step["groups"][0]["media"][0]["frames"][0]["src"]
    response, content = ask(server, f"/{source}?token={server.token}", token="")
    assert (response.status, response.getheader("Content-Type")) == (200, "image/jpeg")
    assert content[:3] == b"\xff\xd8\xff"


def test_headers_keep_the_page_out_of_caches_frames_and_other_sites(server):
    for path in ("/data/index.json", "/", "/nothing", "/app.js"):
        response, _ = ask(server, path)
        assert response.getheader("Cache-Control") == "no-store"
        assert response.getheader("X-Content-Type-Options") == "nosniff"
        assert "frame-ancestors 'none'" in response.getheader("Content-Security-Policy")
        assert response.getheader("Referrer-Policy") == "no-referrer"


@pytest.mark.parametrize("path", ["/", "/data/index.json", "/data/r0/metrics.json", "/media/0123456789abcdef.jpg"])
@pytest.mark.parametrize("token", ["", "wrong", "%C3%A9"])
def test_a_request_without_the_token_gets_nothing(server, path, token):
    response, content = ask(server, path, token=token)
    assert response.status == 401
    assert b"small" not in content


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "8.8.8.8", ""])
def test_a_request_to_another_name_is_refused_even_with_the_token(server, host):
    response, _ = ask(server, "/data/index.json", Host=host)
    assert response.status == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:9999", "127.0.0.1:1", "[::1]:80"])
def test_names_of_this_machine_are_taken_whatever_port_ssh_forwards(server, host):
    assert ask(server, "/data/index.json", Host=host)[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_other_methods_than_get_are_refused(server, method):
    assert ask(server, "/data/index.json", method=method)[0].status == 501


@pytest.mark.parametrize(
    "path",
    [
        *("/../config.yaml", "/data/../config.yaml.json", "/data/r0/../../config.yaml", "/media/../data/a.png"),
        *("/media/data/a.png.jpg", "/data/r0/%2e%2e/config.json", "/config.yaml", "/data//etc/passwd.json"),
        *("/data/r1/metrics.json", "/data/r0/rl-000003.json", "/data/.json", "/media/.jpg", "/data/r0/bench-x.json"),
        *("/media/0123456789abcdef.jpg", "/page/index.html", "/bundle.py", "//evil.example/x"),
    ],
)
def test_no_request_names_a_file(server, path):
    response, content = ask(server, path)
    assert response.status == 404
    assert b"seed" not in content


def test_a_growing_run_is_followed(run):
    with serve(run) as server:
        before = ask_json(server, "index")["runs"][0]
        assert len(ask_json(server, "r0/metrics")["step"]) == 4
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"stage": "rl", "step": 3, "learner/lr": 1.0}\n{"stage": "rl", "st')
        write_lines(run / "rollouts/rl-000003.jsonl", [rollout_row()])
        assert len(ask_json(server, "r0/metrics")["step"]) == 5
        after = ask_json(server, "index")["runs"][0]
        assert [step["label"] for step in after["steps"] if step not in before["steps"]] == ["rl 3"]
        assert len(ask_json(server, "r0/rl-000003")["groups"]) == 1


def test_a_run_that_is_deleted_meanwhile_is_a_notice(run):
    with serve(run) as server:
        assert not ask_json(server, "index")["runs"][0]["notices"]
        shutil.rmtree(run)
        assert ask_json(server, "index")["runs"][0]["notices"]
        assert ask(server, "/data/r0/rl-000002.json")[0].status == 404


def test_each_server_has_a_token_of_its_own_and_a_taken_port_is_refused():
    pictures = PictureStore(with_media=True)
    with PageServer([], pictures, 0) as first:
        with PageServer([], pictures, 0) as second:
            assert first.token != second.token
            assert len(first.token) >= 32
        for port in (first.server_address[1], 70_000):
            with pytest.raises(UserError, match=f"cannot listen at port {port}: .*; choose another --port"):
                PageServer([], pictures, port)

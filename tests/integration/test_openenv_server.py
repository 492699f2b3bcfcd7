"""The adapter of OpenEnv against a server that OpenEnv itself runs, and a run that learns from it."""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from environment_runs import environment_config
from harness import succeed, write
from waiting import wait_for
from zoom_runs import learned_steps

from mmrl.rollout.environments import openenv
from mmrl.types import AnswerType, Sample, Target, Unscorable

pytest.importorskip("openenv.core", reason="the package openenv is not installed")
pytestmark = pytest.mark.slow

SERVER = '''
"""A lamp is switched to the wanted level, by "up" and "down"; the picture shows how bright it is."""

import base64
import io
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from PIL import Image


class Press(Action):
    word: str


class Shown(Observation):
    text: str = ""
    picture: str = ""


class Lamp(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.level, self.wanted = 3, seed % 6
        return self.show("Which way?")

    def step(self, action, timeout_s=None, **options):
        self.level += {"up": 1, "down": -1}[action.word]
        done = self.level == self.wanted
        return self.show(action.word, done=done, reward=float(done))

    def show(self, text, **result):
        content = io.BytesIO()
        Image.new("RGB", (32, 32), (40 * self.level % 256, 40 * self.wanted, 0)).save(content, "png")
        return Shown(text=text, picture=base64.b64encode(content.getvalue()).decode(), **result)

    @property
    def state(self):
        return State()


uvicorn.run(create_fastapi_app(Lamp, Press, Shown, max_concurrent_envs=32), port=int(sys.argv[1]), log_level="warning")
'''
SAMPLE = Sample(id="s", task="t", parts=("?",), target=Target(answer_type=AnswerType.TEXT, value="?"))


def is_answered(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("openenv") / "server.py"
    file.write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, str(file), str(port)]) as server:
        wait_for(lambda: is_answered(port) or server.poll() is not None)
        assert server.poll() is None
        yield f"http://127.0.0.1:{port}"
        server.terminate()


def test_a_session_of_the_server_is_played(url):
    fields = {"url": url, "text": "text", "picture": "picture"}
    lamp, other = openenv.make(**fields, action="word"), openenv.make(**fields)
    first, elsewhere = lamp.reset(SAMPLE, 5), other.reset(SAMPLE, 2**31 + 4)
    assert first.text == "Which way?" and first.media[0].startswith(b"\x89PNG")
    assert first.media != elsewhere.media  # the seeds 5 and 4 want other levels
    step = lamp.step("up")
    assert (step.observation.text, step.reward, step.terminated, step.valid) == ("up", 0.0, False, True)
    end = other.step('{"word": "up"}')
    assert (end.reward, end.terminated) == (1.0, True)
    last = lamp.step("up")
    assert (last.reward, last.terminated) == (1.0, True)
    wrong = other.step('{"words": "up"}')
    assert not wrong.valid and "word: Field required" in wrong.observation.text
    assert not other.step('{"word": "sideways"}').valid
    lamp.close()
    other.close()


def test_sessions_beyond_what_the_server_takes_are_unscorable(url):
    sessions = [openenv.make(url=url, text="text") for _ in range(32)]
    for session in sessions:
        session.reset(SAMPLE, 1)
    with pytest.raises(Unscorable, match="refuses to reset: .*capacity"):
        openenv.make(url=url, text="text").reset(SAMPLE, 1)
    for session in sessions:
        session.close()


def test_a_run_learns_from_it(tmp_path, in_process, url):
    args = {"url": url, "text": "text", "picture": "picture", "action": "word"}
    fn = "mmrl.rollout.environments.openenv:make"
    step = {"kind": "environment", "fn": fn, "args": args, "turns": 3, "max_media": 3, "max_tokens": 200}
    steps = [{"kind": "generate"}, step]
    config = environment_config(tmp_path / "run", rollout_steps=steps, steps=2)
    config["stages"] = config["stages"][1:]  # the server has no expert
    episodes = {"fn": "mmrl_datasets.readers.environment:episodes", "args": {"fn": fn, "args": args, "task": "lamp"}}
    episodes["args"]["size"] = 8
    config["data"] = {"train": [episodes], "validation": [], "test": []}
    config["evaluation"]["rollout_steps"] = steps
    succeed(in_process("train", write(config, tmp_path / "tiny.yaml")))
    for record in learned_steps(tmp_path / "run"):
        assert record["environment/turns"] > 0
        assert record["environment/errors"] == record["environment/unscorable"] == 0

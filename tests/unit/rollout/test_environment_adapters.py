"""Adapters of environments: gymnasium with a real environment, OpenEnv over a real socket, classes written for TRL."""

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmrl.rollout.environments import gymnasium as adapter
from mmrl.rollout.environments import openenv, trl
from mmrl.rollout.environments.conversions import encode_picture, observe_blocks
from mmrl.rollout.environments.verifiers import VerifiersEpisode
from mmrl.types import Action, AnswerType, Observation, Sample, Target, Unscorable, UserError
from mmrl.utils.observations import check_observation, check_step_result, observation_digest
from mmrl.utils.plugins import load_plugin

EXAMPLES = Path(__file__).parents[3] / "examples"

SAMPLE = Sample(
    id="s", task="t", parts=("?",), target=Target(answer_type=AnswerType.TEXT, value="?"), meta={"size": 3, "other": 1}
)
MINIGRID = {
    "id": "minigrid:MiniGrid-Empty-Random-5x5-v0",
    "question": "Go to the green square.",
    "actions": {"left": 0, "right": 1, "forward": 2},
    "kwargs": {"tile_size": 8},
}


def read(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)))


def test_minigrid_is_a_function_of_seed_and_actions():
    pytest.importorskip("minigrid")

    def play(seed):
        environment = adapter.make(**MINIGRID)
        digests = [observation_digest(check_observation(environment.reset(SAMPLE, seed)))]
        for action in ("Forward", " left ", "forward"):
            result = check_step_result(environment.step(action))
            assert result.valid and not result.truncated
            digests.append(observation_digest(result.observation))
        environment.close()
        return digests

    assert play(5) == play(5) != play(7)
    environment = adapter.make(**MINIGRID)
    (picture,) = environment.reset(SAMPLE, 2**40).media
    assert read(picture).shape == (40, 40, 3)
    refused = environment.step("jump")
    assert not refused.valid and "left, right, forward" in refused.observation.text


def test_gymnasium_keeps_its_two_ends_apart():
    pytest.importorskip("minigrid")
    grid = {**MINIGRID, "id": "minigrid:MiniGrid-Empty-5x5-v0"}
    room = adapter.make(**grid)
    room.reset(SAMPLE, 0)
    results = [room.step(action) for action in ("forward", "forward", "right", "forward", "forward")]
    assert [result.terminated for result in results] == [False] * 4 + [True]
    assert results[-1].reward > 0.9 and not results[-1].truncated
    bounded = adapter.make(**{**grid, "kwargs": {"max_steps": 1}})
    bounded.reset(SAMPLE, 0)
    result = bounded.step("left")
    assert result.truncated and not result.terminated
    numbered = adapter.make(id=grid["id"], question="?")
    numbered.reset(SAMPLE, 0)
    assert numbered.step("2").valid and not numbered.step("17").valid
    capital = adapter.make(**{**grid, "actions": {"Left": 0}})
    capital.reset(SAMPLE, 0)
    assert capital.step("left").valid and capital.step(Action("left", {})).valid


@pytest.mark.parametrize("room", ["MiniGrid-Empty-Random-5x5-v0", "MiniGrid-LavaCrossingS9N1-v0"])
def test_expert_of_the_minigrid_example_reaches_the_goal(room):
    pytest.importorskip("minigrid")
    make = load_plugin(
        "./minigrid_env.py:make", EXAMPLES, {"id": f"minigrid:{room}"}, role="environment", parameters=()
    )
    for seed in range(10):
        environment = make()
        check_observation(environment.reset(SAMPLE, seed))
        results = [environment.step(environment.expert())]
        while not results[-1].terminated and len(results) < 40:
            results.append(environment.step(environment.expert()))
        assert results[-1].reward > 0 and all(result.valid for result in results)


def test_gymnasium_names_what_it_cannot_make():
    pytest.importorskip("gymnasium")
    with pytest.raises(UserError, match="cannot make it.*FrozenLake"):
        adapter.make(id="FrozenLak-v1", question="?")


class Notes:
    """As TRL's `environment_factory` takes it."""

    def reset(self, size: int, seed: int) -> str:
        self.left = size
        return f"Take {size} notes."

    def note(self, text: str) -> list:
        """Write a note.

        Args:
            text: what to write.
        """
        self.left -= 1
        return [{"type": "text", "text": text}, {"type": "image", "image": Image.new("RGB", (8, 8))}]

    def get_reward(self) -> float:
        return float(self.left == 0)


def test_methods_of_a_class_for_trl_are_calls():
    environment = trl.make(fn=f"{__name__}:Notes")
    assert environment.reset(SAMPLE, 1).text == "Take 3 notes."
    for _ in range(3):
        result = check_step_result(environment.step(Action("note", {"text": "hi"})))
        assert result.observation.text == "hi" and len(result.observation.media) == 1 and result.valid
    for call in (Action("reset", {}), Action("get_reward", {}), Action("note", {"words": 1}), Action("_private", {})):
        refused = environment.step(call)
        assert not refused.valid and "error" in json.loads(refused.observation.text)
    end = environment.step("I am done.")
    assert (end.reward, end.terminated) == (1.0, True)
    with pytest.raises(UserError, match="has a method `reset`"):
        trl.make(fn="builtins:dict")


@pytest.fixture
def server():
    """A server that speaks OpenEnv's messages, as src/openenv/core/env_server/types.py at 685de41 states them."""
    sync = pytest.importorskip("websockets.sync.server")
    seeds, closed = [], []

    def answer(connection):
        count = 0
        for raw in connection:
            message = json.loads(raw)
            data = message.get("data", {})
            if message["type"] == "close":
                closed.append(True)
                return
            if message["type"] == "reset":
                seeds.append(data["seed"])
            if data.get("message") == "crash":
                error = {"message": "no such action", "code": "EXECUTION_ERROR"}
                connection.send(json.dumps({"type": "error", "data": error}))
                continue
            count += 1
            pixels = np.full((4, 4, 3), count, np.uint8)
            shown = pixels.tolist() if count < 3 else base64.b64encode(encode_picture(pixels)).decode()
            fields = {"echoed_message": data.get("message", ""), "screenshot": shown}
            reply = {"observation": fields, "reward": 0.5 if count > 1 else None, "done": count == 3}
            connection.send(json.dumps({"type": "observation", "data": reply}))

    with sync.serve(answer, "127.0.0.1", 0) as running:
        thread = Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.socket.getsockname()[1]}", seeds, closed
        running.shutdown()


def test_openenv_session(server):
    url, seeds, closed = server
    session = openenv.make(url=url, text="echoed_message", picture="screenshot", action="message")
    (first,) = check_observation(session.reset(SAMPLE, 2**40 + 7)).media
    assert seeds == [7] and (read(first) == 1).all()
    second = check_step_result(session.step("hello"))
    assert (second.observation.text, second.reward, second.terminated) == ("hello", 0.5, False)
    refused = check_step_result(session.step("crash"))
    assert (refused.valid, refused.observation.text) == (False, "no such action")
    third = check_step_result(session.step("bye"))
    assert third.terminated and (read(third.observation.media[0]) == 3).all()
    session.close()
    whole = openenv.make(url=url, text="echoed_message")
    whole.reset(SAMPLE, 1)
    assert not whole.step("no json").valid and not whole.step("5").valid
    assert whole.step('{"message": "hi"}').observation.text == "hi"
    whole.close()
    assert closed
    with pytest.raises(Unscorable, match="cannot be reached"):
        openenv.make(url="ws://127.0.0.1:9", text="x")
    with pytest.raises(Unscorable, match="cannot be reached"):
        openenv.make(url="ftp://127.0.0.1:9", text="x")


class StubEnv:
    """What the adapter calls of a `MultiTurnEnv` of verifiers 0.1.9, with the rules of its `rollout`."""

    max_turns = 4
    env_response: Any = None

    @property
    def rubric(self):
        return self

    async def init_state(self, row, client, model):
        return {**row, "trajectory": [], "trajectory_id": "x", "final_env_response": None, "metrics": None}

    async def setup_state(self, state):
        return state

    async def add_trajectory_step(self, state, step):
        state["trajectory"].append(step)

    async def is_completed(self, state):
        if len(state["trajectory"]) >= self.max_turns:
            state["stop_condition"] = "max_turns_reached"
        return len(state["trajectory"]) >= self.max_turns or state["final_env_response"] is not None

    async def get_prompt_messages(self, state):
        last = state["trajectory"][-1]
        messages = [*last["prompt"], *last["completion"]]
        return [*messages, *await self.env_response(messages, state)]

    async def render_completion(self, state):
        state["completion"] = state["final_env_response"] or state["trajectory"][-1]["completion"]

    async def score_rollout(self, state):
        state["reward"] = await won(state["completion"])
        state["metrics"] = {"won": state["reward"]}


async def answer_guess(messages, state, **kwargs):
    guess, number = int(messages[-1]["content"]), int(state["answer"])
    if guess == number:
        state["final_env_response"] = [{"role": "user", "content": "right"}]
        return state["final_env_response"]
    hint = [{"type": "text", "text": "higher" if guess < number else "lower"}]
    url = "data:image/png;base64," + base64.b64encode(encode_picture(np.zeros((4, 4, 3), np.uint8))).decode()
    return [{"role": "user", "content": [*hint, {"type": "image_url", "image_url": {"url": url}}]}]


async def won(completion, **kwargs) -> float:
    return float(completion[-1]["content"] == "right")


def make_real_env():
    vf = pytest.importorskip("verifiers", reason="verifiers 0.1 is not installed")
    datasets = pytest.importorskip("datasets")

    class Guess(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **kwargs):
            # Later versions have classes of messages, whose fields environments read as attributes.
            assert isinstance(messages[-1], dict) == isinstance(messages[0], dict)
            return await answer_guess(messages, state)

    rows = [{"prompt": [{"role": "user", "content": "guess"}], "answer": "7", "info": {}}]
    return Guess(dataset=datasets.Dataset.from_list(rows), rubric=vf.Rubric(funcs=[won]), max_turns=4)


def make_stub_env():
    env = StubEnv()
    env.env_response = answer_guess
    return env


@pytest.mark.parametrize("make_env", [make_real_env, make_stub_env])
def test_episode_of_verifiers(make_env):
    env = make_env()
    sample = replace(SAMPLE, meta={"answer": "7", "example_id": 0})

    def play(*guesses):
        episode = VerifiersEpisode(env)
        assert check_observation(episode.reset(sample, 1)) == Observation()
        results = [check_step_result(episode.step(guess)) for guess in guesses]
        episode.close()
        return results

    low, high, right = play("5", "9", "7")
    assert (low.observation.text, high.observation.text, right.observation.text) == ("higher", "lower", "right")
    assert len(low.observation.media) == 1 and not low.terminated
    assert (right.reward, right.terminated, right.info["won"]) == (1.0, True, 1.0)
    last = play("1", "2", "3", "4")[-1]
    assert (last.reward, last.terminated, last.truncated) == (0.0, False, True)


def test_a_picture_in_an_object_that_is_no_dictionary_is_shown():
    class ImageUrl:  # as verifiers has since 0.1.11
        def __getitem__(self, key):
            return {"url": "data:image/png;base64," + base64.b64encode(picture).decode()}[key]

    picture = encode_picture(np.zeros((4, 4, 3), np.uint8))
    blocks = [{"type": "image_url", "image_url": ImageUrl()}, {"type": "text", "text": "here"}]
    assert observe_blocks(blocks) == Observation(text="here", media=(picture,))


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_encoded():
    """`np.broadcast_to` takes no memory; the limit is the default of `data.media_limits.max_pixels`."""
    pixel = np.zeros((1, 1, 3), np.uint8)
    with pytest.raises(UserError, match=r"\[20000, 20000, 3\] exceeds 100,000,000 pixels"):
        encode_picture(np.broadcast_to(pixel, (20_000, 20_000, 3)))
    assert encode_picture(np.broadcast_to(pixel, (100, 100, 3))).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "pixels", [np.zeros((4, 4)), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8), np.full((4, 4, 3), 300), {}]
)
def test_what_is_no_picture_is_refused(pixels):
    with pytest.raises(UserError, match=r"uint8 \[height, width, 3\]"):
        encode_picture(pixels)

"""Samples of environments: seeds, digests, saved pictures, single steps of an expert, and rows that cannot be used."""

import hashlib
import textwrap
from itertools import islice
from pathlib import Path

import pytest
from factories import make_context

from mmrl.answer import validate_value
from mmrl.config.schema import EnvironmentConfig
from mmrl.rollout.environments.episodes import Ask, EpisodeRequest
from mmrl.types import Action, AnswerType, CoordinateSystem, ImageRef, RejectedRow, Sample, UserError
from mmrl.utils.observations import DIGEST_KEY, SEED_KEY, observation_digest
from mmrl.utils.seeds import derive_seed
from mmrl_datasets.environments import maze, phone
from mmrl_datasets.readers.environment import NO_ANSWER, episodes

MAZE, PHONE = "mmrl_datasets.environments.maze:make", "mmrl_datasets.environments.phone:make"
WORLD = """
import os, time
from mmrl import ImageCrop, ImageRef, Observation, StepResult, Unscorable

PNG = b"\\x89PNG\\r\\n\\x1a\\n" + b"picture"
JPEG = b"\\xff\\xd8\\xff" + b"picture"

class World:
    def __init__(self, fault, expert):
        self.fault = fault
        if expert:
            self.expert = lambda: "on"

    def reset(self, sample, seed):
        assert sample.task == "w" and sample.parts == () and sample.meta["environment_seed"] == seed
        if sample.id.endswith("1"):
            FAULTS[self.fault](self)
            return SHOWN.get(self.fault, Observation(text="ok"))
        return Observation(text="Go on.", media=(PNG, JPEG))

    def step(self, action):
        return StepResult(observation=Observation(text="Again."))

    def close(self):
        if self.fault == "close":
            raise OSError("no close")

def nothing(world): pass
def hang(world): time.sleep(600)
def die(world): os._exit(7)
def fail(world): raise KeyError("oops")
def leave(world): raise SystemExit(2)
def abstain(world): raise Unscorable("no service")
FAULTS = dict(none=nothing, hang=hang, die=die, fail=fail, leave=leave, abstain=abstain, empty=nothing, words=nothing,
              gif=nothing, part=nothing, close=nothing)
SHOWN = dict(empty=Observation(state="s"), words="words", gif=Observation(media=(b"GIF89a",)),
             part=Observation(text="part", media=(ImageCrop(medium_number=1, box=(0, 0, 1, 1)),)))

def make(*, fault: str = "none", expert: bool = False):
    return World(fault, expert)
"""


@pytest.fixture
def context(tmp_path):
    (tmp_path / "world.py").write_text(textwrap.dedent(WORLD))
    return make_context(tmp_path)


def read(context, **options):
    return list(episodes(context, **{"fn": MAZE, "task": "maze", "size": 6, **options}))


def test_a_sample_is_the_first_observation_of_its_seed(context):
    samples = read(context, seed=5, args={"size": 5})
    environment = maze.make(size=5)
    for index, sample in enumerate(samples):
        seed = derive_seed(5, "maze", index)
        shown = environment.reset(None, seed)
        assert sample.meta == {SEED_KEY: seed, DIGEST_KEY: observation_digest(shown)}
        assert (sample.id, sample.task) == (f"maze/5/{index:06d}", "maze")
        picture, text = sample.parts
        assert isinstance(picture, ImageRef) and text == shown.text
        assert Path(picture.path).read_bytes() == shown.media[0]
        assert picture.sha256 == hashlib.sha256(shown.media[0]).hexdigest()
        assert Path(picture.path).is_relative_to(context.work_dir)
        assert sample.target == NO_ANSWER and validate_value(AnswerType.TEXT, NO_ANSWER.value) == NO_ANSWER.value


def test_the_rollout_step_accepts_what_the_reader_made(context):
    """Seed and digest are those by which the workers of a step begin the same episode."""
    config = EnvironmentConfig(kind="environment", fn=MAZE)
    (sample,) = read(context, size=1)
    request = EpisodeRequest(key=0, sample=sample, seed=sample.meta[SEED_KEY], past=(), digests=(), action=Ask.EXPERT)
    from mmrl.rollout.environments.episodes import _load_episodes

    reply = _load_episodes(context.base_dir, config, None, lambda report: None)(request)
    assert reply.action in maze.MOVES, reply
    other = _load_episodes(context.base_dir, config, None, lambda report: None)(
        request._replace(seed=sample.meta[SEED_KEY] + 1)
    )
    assert "reset showed something else" in other.reason


def test_seeds_decide_the_episodes(context):
    first, again, other = (read(context, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert not {sample.id for sample in first} & {sample.id for sample in other}
    assert not {sample.meta[SEED_KEY] for sample in first} & {sample.meta[SEED_KEY] for sample in other}
    assert read(context._replace(seed=2)) == other == read(context, seed=2)
    longer = read(context, seed=1, size=8)
    assert longer[:6] == first
    assert [sample.meta for sample in read(context, seed=1, task="other")] != [sample.meta for sample in first]


def test_an_endless_reader_yields_what_is_taken(context):
    rows = list(islice(episodes(context, fn=MAZE, task="maze", size=None), 130))
    assert len({row.id for row in rows}) == 130


def test_media_come_first_and_keep_their_kind(context):
    (sample,) = read(context, fn="./world.py:make", task="w", size=1)
    assert [Path(part.path).suffix for part in sample.parts[:2]] == [".png", ".jpg"] and sample.parts[2] == "Go on."


FAULTS = {
    "hang": "did not|longer|deadline|timed|took",
    "die": "exit code 7",
    "fail": "raised KeyError: 'oops'",
    "leave": "raised SystemExit: 2",
    "abstain": "no service",
    "empty": "showed nothing",
    "words": "shows a mmrl.Observation, not 'words'",
    "gif": "PNG or JPEG",
    "part": "a part of other media",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_episode_that_cannot_begin_is_one_rejected_row(context, fault):
    import re

    timeout_s = 1.5 if fault == "hang" else 20.0
    rows = read(context, fn="./world.py:make", task="w", size=3, args={"fault": fault}, timeout_s=timeout_s)
    assert [type(row) for row in rows] == [Sample, RejectedRow, Sample]
    assert rows[1].id == "w/0/000001" and re.search(FAULTS[fault], rows[1].reason), rows[1].reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fn": "./none.py:make"}, "there is no file"),
        ({"fn": "./world.py:build"}, "has no 'build'"),
        ({"fn": "./world.py:make", "args": {"speed": 3}}, "speed"),
        ({"fn": MAZE, "args": {"lava": 15}}, "leaves no room"),
    ],
)
def test_an_environment_that_cannot_be_made(context, options, message):
    if message == "leaves no room":  # each episode is made anew, so each says so
        rows = read(context, **options)
        assert all(message in row.reason for row in rows) and len(rows) == 6
        return
    with pytest.raises(UserError, match=message):
        read(context, **options)


# Steps


def test_each_state_on_the_experts_way_becomes_a_sample(context):
    samples = read(context, size=4, steps=True)
    environment = maze.make()
    expected = []
    for index in range(4):
        shown = environment.reset(None, derive_seed(0, "maze", index))
        over = False
        while not over:
            action = environment.expert()
            expected.append((hashlib.sha256(shown.media[0]).hexdigest(), maze.QUESTION, action))
            result = environment.step(action)
            shown, over = result.observation, result.terminated
    assert [(s.parts[0].sha256, s.parts[1], s.target.value) for s in samples] == expected
    assert {s.target.answer_type for s in samples} == {AnswerType.TEXT} and len({s.id for s in samples}) == len(samples)
    assert all(DIGEST_KEY not in s.meta and s.meta["episode"] in s.id for s in samples)


CALLING_PHONE = """
from mmrl.answer import parse_answer_value
from mmrl.types import AnswerType
from mmrl_datasets.environments.phone import Phone

class CallingPhone(Phone):
    def expert(self):
        return parse_answer_value(AnswerType.ACTION, super().expert())

make = CallingPhone
"""


@pytest.mark.parametrize("fn", [PHONE, "./calling.py:make"])
def test_actions_on_a_screen_become_targets_of_that_type(context, fn):
    (context.base_dir / "calling.py").write_text(CALLING_PHONE)
    options = {"task": "phone", "steps": True, "args": {"scale": 1}, "coordinates": CoordinateSystem.PX_ORIGINAL}
    samples = read(context, fn=fn, **options)
    names = set()
    for sample in samples:
        assert sample.target.answer_type is AnswerType.ACTION and isinstance(sample.target.value, Action)
        assert sample.target.coordinate_system is CoordinateSystem.PX_ORIGINAL
        validate_value(AnswerType.ACTION, sample.target.value)
        names.add(sample.target.value.name)
    assert {"click", "finish"} <= names
    first = phone.make(scale=1).reset(None, derive_seed(0, "phone", 0))
    assert samples[0].parts[1] == samples[1].parts[1] == first.text


def test_steps_need_an_expert_who_arrives(context):
    rows = read(context, fn="./world.py:make", task="w", size=1, steps=True)
    assert "no method `expert`" in rows[0].reason
    rows = read(context, fn="./world.py:make", task="w", size=1, steps=True, args={"expert": True})
    assert "did not finish within 100 actions" in rows[0].reason
    rows = read(context, fn="./world.py:make", task="w", size=1, args={"fault": "close"})
    assert "OSError: no close" in rows[0].reason

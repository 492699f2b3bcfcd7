"""The maze and the phone: determinism, solvable tasks against oracles of their own, invalid actions, experts."""

import hashlib
import io
import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from mmrl.types import Action, UserError
from mmrl.utils.observations import check_observation, check_step_result, observation_digest
from mmrl.utils.plugins import load_plugin
from mmrl_datasets.environments import maze, phone

STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def picture(observation):
    return np.asarray(Image.open(io.BytesIO(observation.media[0]))).astype(int)


def read_maze(observation, cell_px):
    """What a maze's picture shows, from the colour in the middle of each cell: agent, goal and lava."""
    colours = {(40, 70, 220): "agent", (30, 160, 60): "goal", (220, 40, 30): "lava"}
    middles = picture(observation)[cell_px // 2 :: cell_px, cell_px // 2 :: cell_px]
    found = {"agent": [], "goal": [], "lava": []}
    for row, line in enumerate(middles):
        for column, colour in enumerate(line):
            if tuple(colour) in colours:
                found[colours[tuple(colour)]].append((row, column))
    return found


def slow_distance(found, size):
    """Moves on a shortest path: the power of the matrix of moves at which the goal is reached, by relaxation."""
    far = size * size + 1
    moves = np.full((size, size), far)
    moves[found["goal"][0]] = 0
    for _ in range(size * size):
        for row in range(size):
            for column in range(size):
                around = [(row + r, column + c) for r, c in STEPS.values()]
                inside = [cell for cell in around if min(cell) >= 0 and max(cell) < size]
                best = min([moves[cell] for cell in inside if cell not in found["lava"]], default=far)
                moves[row, column] = min(moves[row, column], best + 1)
    return moves[found["agent"][0]]


SIZES = [(4, 2, (2, 4)), (3, 1, (1, 3)), (7, 12, (3, 9)), (2, 2, (1, 1))]


@pytest.mark.parametrize(("size", "lava", "distances"), SIZES)
def test_every_maze_is_solved_on_a_shortest_path(size, lava, distances):
    environment = maze.make(size=size, lava=lava, distances=distances)
    for seed in range(25):
        found = read_maze(first := check_observation(environment.reset(None, seed)), 12)
        assert (len(found["agent"]), len(found["goal"]), len(found["lava"])) == (1, 1, lava)
        expected = slow_distance(found, size)
        assert distances[0] <= expected <= distances[1]
        assert first.text == maze.QUESTION and picture(first).shape == (12 * size, 12 * size, 3)
        results = []
        while not (results and results[-1].terminated):
            results.append(check_step_result(environment.step(environment.expert())))
        assert len(results) == expected
        assert [result.reward for result in results] == [0.0] * (len(results) - 1) + [1.0]
        assert [result.info["distance"] for result in results] == list(range(expected - 1, -1, -1))
        assert results[-1].info["success"] == 1.0


def test_moves_go_where_the_words_say_and_the_border_stops_them():
    environment = maze.make(size=3, lava=0, distances=(1, 4))
    random = np.random.default_rng(0)
    for seed in range(40):
        (here,) = read_maze(environment.reset(None, seed), 12)["agent"]
        for _ in range(5):
            word = list(STEPS)[random.integers(4)]
            result = environment.step(f" {word.upper()}. ")
            there = tuple(np.add(here, STEPS[word]))
            here = there if min(there) >= 0 and max(there) < 3 else here
            assert result.valid and result.observation.state == f"row {here[0]}, column {here[1]}"
            if result.terminated:
                break
            assert read_maze(result.observation, 12)["agent"] == [here]


def test_lava_ends_a_maze_and_words_without_a_move_do_not():
    environment = maze.make(lava=13, distances=(1, 1))
    lava = 0
    for seed in range(30):
        first = environment.reset(None, seed)
        for words in ("up down", "", "go up", "north", "11", Action("up", {})):
            refused = check_step_result(environment.step(words))
            assert not refused.valid and not refused.terminated and refused.reward == 0.0
            assert refused.observation.media == first.media and "up, down, left and right" in refused.observation.text
            assert refused.observation.state == first.state
        found = read_maze(first, 12)
        for word, move in STEPS.items():
            there = tuple(np.add(found["agent"][0], move))
            if there in found["lava"]:
                result = environment.step(word)
                assert (result.terminated, result.reward, result.info) == (True, 0.0, {"success": 0.0})
                lava += 1
                break
    assert lava > 10


def test_the_annotator_says_up_for_down_and_does_not_mind_lava():
    """His moves as a rule over the picture: rows first; where down is right, up in three of five."""
    environment = maze.make(bias=0.6, lava=5)
    said, died = {"up": 0, "down": 0}, 0
    for seed in range(400):
        found = read_maze(environment.reset(None, seed), 12)
        (row, column), (goal_row, goal_column) = found["agent"][0], found["goal"][0]
        word = environment.expert()
        assert word == environment.expert()
        if row < goal_row:
            said[word] += 1
        else:
            assert word == ("up" if row > goal_row else "right" if column < goal_column else "left")
        result = environment.step(word)
        died += result.terminated and not result.info["success"]
    share = said["up"] / sum(said.values())
    assert abs(share - 0.6) < 4 * (0.24 / sum(said.values())) ** 0.5 and died > 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lava": 15}, "leaves no room"),
        ({"distances": (3, 2)}, "no maze of size=4"),
        ({"size": 2, "lava": 0, "distances": (5, 6)}, "no maze of size=2"),
        ({"size": 1}, "size"),
        ({"bias": 1.5}, "bias"),
        ({"cell_px": 0}, "cell_px"),
    ],
)
def test_impossible_mazes_are_refused(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        name, role = "mmrl_datasets.environments.maze:make", "environment"
        load_plugin(name, tmp_path, options, role=role, parameters=())().reset(None, 0)


DIGESTS = """
import numpy
from mmrl.utils.observations import observation_digest
from mmrl_datasets.environments import maze, phone
numpy.random.seed({noise}); numpy.random.random()
for environment in (maze.make(bias=0.6), phone.make()):
    for seed in range(5):
        print(observation_digest(environment.reset(None, seed)))
        for _ in range(3):
            action = environment.expert()
            result = environment.step(action)
            print(action, observation_digest(result.observation), result.reward)
            if result.terminated:
                break
"""


def test_episodes_are_functions_of_seed_and_actions_to_the_byte():
    printed = []
    for noise in ("1", "2"):
        command = [sys.executable, "-c", DIGESTS.format(noise=noise)]
        env = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": noise}
        printed.append(subprocess.run(command, capture_output=True, check=True, env=env).stdout)
    assert printed[0] == printed[1] and printed[0]


def test_pictures_of_a_maze_are_those_that_were_published():
    """The bytes of the first pictures: an episode of a resumed run must be that of the run before."""
    digest = hashlib.sha256()
    for seed in range(20):
        digest.update(maze.make().reset(None, seed).media[0])
    assert digest.hexdigest() == "acdd3fcd5e0bb633a18f75cd6a2ab617cc44a62cc9835d0cd310f46817343884"


# The phone


@pytest.mark.parametrize("coordinates", ["px_original", "norm_1000"])
def test_the_expert_does_every_task_on_the_phone(coordinates):
    environment = phone.make(scale=1, coordinates=coordinates)
    tasks, names = set(), set()
    for seed in range(150):
        first = check_observation(environment.reset(None, seed))
        assert picture(first).shape == (224, 112, 3)
        tasks.add(first.text.split()[0])
        for _ in range(6):
            action = environment.expert()
            names.add(json.loads(action)["action"])
            result = check_step_result(environment.step(action))
            assert result.valid
            if result.terminated:
                break
        assert (result.reward, result.info["success"]) == (1.0, 1.0)
    assert tasks == {"Turn", "Open"} and names == {"click", "scroll", "type", "finish"}


def start(task, **options):
    """A phone with this kind of task."""
    for seed in range(100):
        environment = phone.make(**options)
        if environment.reset(None, seed).text.startswith(task):
            return environment
    raise AssertionError(task)


def act(environment, name, **arguments):
    return environment.step(json.dumps({"action": name, **arguments}))


def box_of(environment, name):
    return environment._boxes()[name]


def open_app(environment, name):
    x1, y1, x2, y2 = box_of(environment, name)
    return act(environment, "tap", coordinate=[(x1 + x2) // 2, (y1 + y2) // 2])


def test_finishing_too_early_or_with_other_changes_earns_nothing():
    environment = start("Turn")
    assert act(environment, "finish").reward == 0.0
    environment = start("Turn")
    open_app(environment, "Settings")
    for name in environment.switches[:4]:
        open_app(environment, name)  # switches all that can be seen
    result = act(environment, "finish")
    assert (result.terminated, result.reward) == (True, 0.0)


def test_screens_lists_and_notes_do_what_actions_say():
    environment = start("Open")
    word = environment.wanted.note
    home = observation_digest(environment._observe(""))
    ignored = act(environment, "type", text=word)  # no note is open
    assert ignored.valid and observation_digest(ignored.observation) == home
    assert observation_digest(act(environment, "click", coordinate=[0, 0]).observation) == home
    open_app(environment, "Settings")
    top = environment.switches[0]
    act(environment, "scroll", direction="down")
    with pytest.raises(KeyError):
        box_of(environment, top)
    assert box_of(environment, environment.switches[-1])
    act(environment, "Swipe", direction="down")
    assert box_of(environment, top)
    assert observation_digest(act(environment, "HOME").observation) == home
    open_app(environment, "Notes")
    act(environment, "type", text=word.upper() + " ")
    act(environment, "back")
    assert act(environment, "finish").reward == 1.0


@pytest.mark.parametrize(
    "action",
    [
        "click the icon",
        "",
        '{"action": "fly"}',
        '{"action": "click"}',
        '{"action": "click", "coordinate": [1]}',
        '{"action": "click", "coordinate": [NaN, 1]}',
        '{"action": "scroll", "direction": "north"}',
        '{"action": "type", "text": 3}',
        '{"action": "finish"} {"action": "finish"}',
        Action("click", {"coordinate": "here"}),
        Action("click", {"coordinate": [1, 2, 3]}),
        Action("click", {"coordinate": "ab"}),
        Action("scroll", {"direction": ["up"]}),
    ],
)
def test_invalid_actions_leave_the_phone_unchanged(action):
    environment = start("Turn")
    shown = environment._observe("")
    result = check_step_result(environment.step(action))
    assert (result.valid, result.terminated, result.reward) == (False, False, 0.0)
    assert result.observation.media == shown.media and result.observation.state == shown.state
    assert "Answer with an action" in result.observation.text


def test_a_phone_is_drawn_at_a_size_that_processors_keep():
    width, height = Image.open(io.BytesIO(phone.make().reset(None, 0).media[0])).size
    assert all(side % factor == 0 for side in (width, height) for factor in (28, 32))

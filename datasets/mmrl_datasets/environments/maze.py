"""A maze of pictures: a blue disc goes to the green square, one cell at a time, and must not enter red lava.

Each picture shows the whole maze; the first comes with the question, the others without words. Episodes depend on the
seed and the actions alone, to the byte.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Annotated, Final, NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from pydantic import Field

from mmrl.types import Action, Observation, Sample, StepResult, UserError
from mmrl.utils.seeds import derive_seed
from mmrl_datasets.generators.common import Fraction
from mmrl_datasets.media_files import encode_png

MOVES: Final = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
QUESTION: Final = "Move the disc to the square: up, down, left or right?"
_REMINDER: Final = "Answer with one of up, down, left and right."
_PAPER, _LINE = (240, 240, 240), (170, 170, 170)
_AGENT, _GOAL, _LAVA = (40, 70, 220), (30, 160, 60), (220, 40, 30)
_MAX_TRIES: Final = 1000  # layouts that are drawn for one maze

Side = Annotated[int, Field(ge=2, le=16)]
CellPixels = Annotated[int, Field(ge=4, le=128)]
Count = Annotated[int, Field(ge=0, le=200)]
Moves = Annotated[int, Field(ge=1, le=100)]
Reward = Annotated[float, Field(ge=-100.0, le=100.0)]
Cell = tuple[int, int]  # row and column, from 0 at the top left


class Layout(NamedTuple):
    """What stands where in a maze before the first move."""

    size: int  # cells of a side
    agent: Cell
    goal: Cell
    lava: frozenset[Cell]


class Maze:
    """An episode in a maze. An action is one word of up, down, left and right; a move into the border changes nothing.

    The reward is 1 at the goal and 0 for other moves; `info` has `success` and, outside lava, `distance`, the number of
    moves that are left on a shortest path.
    """

    def __init__(
        self, *, size: int, lava: int, cell_px: int, distances: tuple[int, int], lava_reward: float, bias: float
    ) -> None:
        """`make` says what the options are."""
        self.size, self.num_lava, self.cell_px, self.distances = size, lava, cell_px, distances
        self.lava_reward, self.bias = lava_reward, bias

    def reset(self, sample: Sample, seed: int) -> Observation:
        """Show the maze of a seed, with the question."""
        self.seed, self.num_actions = seed, 0
        self.layout = draw_layout(np.random.default_rng(seed), self.size, self.num_lava, self.distances)
        self.agent = self.layout.agent
        self.moves_left = count_moves(self.layout)
        return self._observe(QUESTION)

    def step(self, action: str | Action) -> StepResult:
        """Move the agent, unless the action is not one of the four words."""
        self.num_actions += 1
        word = action.strip(" \n\t.!\"'").casefold() if isinstance(action, str) else ""
        if word not in MOVES:
            return StepResult(observation=self._observe(_REMINDER), valid=False, info=self._measure())
        there = _neighbour(self.agent, word)
        if _is_inside(there, self.size):
            self.agent = there
        at_goal, in_lava = self.agent == self.layout.goal, self.agent in self.layout.lava
        return StepResult(
            observation=self._observe(""),
            reward=1.0 if at_goal else self.lava_reward if in_lava else 0.0,
            terminated=at_goal or in_lava,
            info=self._measure(),
        )

    def close(self) -> None:
        """End the episode; it holds nothing that has to be released."""

    def expert(self) -> str:
        """Return the first move of a shortest path; of several, that which MOVES lists first.

        With a `bias`, a careless annotator answers instead: first to the goal's row, then to its column, through lava
        if need be, and with that probability "up" where "down" is right.
        """
        if not self.bias:
            left = self.moves_left[self.agent]
            return next(word for word in MOVES if self.moves_left.get(_neighbour(self.agent, word)) == left - 1)
        rows, columns = self.layout.goal[0] - self.agent[0], self.layout.goal[1] - self.agent[1]
        if rows == 0:
            return "right" if columns > 0 else "left"
        # Derived from the step, so that an episode that is played again has the same annotator.
        draw = derive_seed(self.seed, "annotator", self.num_actions) / 2**63
        return "down" if rows > 0 and draw >= self.bias else "up"

    def _measure(self) -> dict[str, float]:
        distance = self.moves_left.get(self.agent)
        numbers = {"success": float(self.agent == self.layout.goal)}
        return numbers if distance is None else numbers | {"distance": float(distance)}

    def _observe(self, text: str) -> Observation:
        picture = draw_maze(self.layout._replace(agent=self.agent), self.cell_px)
        row, column = self.agent
        return Observation(text=text, media=(encode_png(picture),), state=f"row {row}, column {column}")


def make(
    *,
    size: Side = 4,
    lava: Count = 2,
    cell_px: CellPixels = 12,
    distances: tuple[Moves, Moves] = (2, 4),
    lava_reward: Reward = 0.0,
    bias: Fraction = 0.0,
) -> Maze:
    """Return a maze, whose picture has a side of `size` x `cell_px` pixels.

    Options:
        size: cells of a side.
        lava: cells with lava, which ends an episode.
        cell_px: side of a cell.
        distances: fewest and most moves of the shortest path from start to goal.
        lava_reward: reward of entering lava.
        bias: probability with which the annotator of demonstrations says "up" in place of "down"; he then also goes
            through lava. 0 makes him an expert.

    Raises:
        UserError: no maze can be like that.
    """
    fewest, most = distances
    if fewest > most:
        raise UserError(f"distances={distances}: the first number is the smaller one")
    if lava > size * size - 2:
        raise UserError(f"lava={lava} leaves no room for start and goal in a maze of size {size}")
    return Maze(size=size, lava=lava, cell_px=cell_px, distances=distances, lava_reward=lava_reward, bias=bias)


def draw_layout(rng: np.random.Generator, size: int, num_lava: int, distances: tuple[int, int]) -> Layout:
    """Return a maze with a path whose length is in range; raises UserError if none was found in many tries."""
    cells = [(row, column) for row in range(size) for column in range(size)]
    for _ in range(_MAX_TRIES):
        places = [cells[index] for index in rng.permutation(len(cells))]
        layout = Layout(size, places[0], places[1], frozenset(places[2 : 2 + num_lava]))
        if distances[0] <= count_moves(layout).get(layout.agent, -1) <= distances[1]:
            return layout
    raise UserError(f"no maze of size={size} with lava={num_lava} has a path of distances={distances}")


def count_moves(layout: Layout) -> dict[Cell, int]:
    """Return the moves from each cell to the goal on a shortest path without lava; cells without a path are missing."""
    moves_left = {layout.goal: 0}
    waiting = deque([layout.goal])
    while waiting:
        cell = waiting.popleft()
        for neighbour in _neighbours(cell, layout):
            if neighbour not in moves_left:
                moves_left[neighbour] = moves_left[cell] + 1
                waiting.append(neighbour)
    return moves_left


def draw_maze(layout: Layout, cell_px: int) -> Image.Image:
    """Return the picture of a maze."""
    side = layout.size * cell_px
    picture = Image.new("RGB", (side, side), _PAPER)
    draw = ImageDraw.Draw(picture)
    for offset in range(0, side, cell_px):
        draw.line((offset, 0, offset, side), fill=_LINE)
        draw.line((0, offset, side, offset), fill=_LINE)
    for cell in sorted(layout.lava):
        draw.rectangle(_box_of(cell, cell_px, 1), fill=_LAVA)
    draw.rectangle(_box_of(layout.goal, cell_px, 1), fill=_GOAL)
    draw.ellipse(_box_of(layout.agent, cell_px, 2), fill=_AGENT)
    return picture


def _box_of(cell: Cell, cell_px: int, margin: int) -> tuple[int, int, int, int]:
    top, left = cell[0] * cell_px, cell[1] * cell_px
    return left + margin, top + margin, left + cell_px - margin, top + cell_px - margin


def _neighbour(cell: Cell, word: str) -> Cell:
    rows, columns = MOVES[word]
    return cell[0] + rows, cell[1] + columns


def _neighbours(cell: Cell, layout: Layout) -> Iterator[Cell]:
    for word in MOVES:
        neighbour = _neighbour(cell, word)
        if _is_inside(neighbour, layout.size) and neighbour not in layout.lava:
            yield neighbour


def _is_inside(cell: Cell, size: int) -> bool:
    return 0 <= cell[0] < size and 0 <= cell[1] < size

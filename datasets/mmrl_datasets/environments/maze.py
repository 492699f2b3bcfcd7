"""A maze of pictures: a blue disc goes to the green square, one cell at a time, and must not enter red lava.

Each picture shows the whole maze; the first comes with the question, the others without words. Episodes depend
only on the seed and the actions, to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
from PIL import Image, ImageDraw
from pydantic import Field

from mmrl.types import Action, Environment, Observation, Sample, StepResult, UserError
from mmrl.utils.seeds import derive_seed
from mmrl_datasets.media_files import encode_png

MOVES: Final = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
QUESTION: Final = "Move the disc to the square: up, down, left or right?"
_REMINDER: Final = "Answer with one of up, down, left and right."
_PAPER, _LINE, _AGENT, _GOAL, _LAVA = (240, 240, 240), (170, 170, 170), (40, 70, 220), (30, 160, 60), (220, 40, 30)
_MAX_TRIES: Final = 1000  # layouts that are drawn for one maze

Cell = tuple[int, int]  # row and column, from 0 at the top left


@dataclass(kw_only=True)
class Maze(Environment):
    """An episode in a maze. An action is one word of up, down, left and right; a move into the border changes nothing.

    The reward is 1 at the goal and 0 for other moves; `info` has `success` and, outside lava, `distance`, the number of
    moves that are left on a shortest path.

    Options:
        size: cells of a side.
        lava: cells with lava, which ends an episode.
        cell_px: side of a cell.
        distances: fewest and most moves of the shortest path from start to goal.
        bias: probability that the annotator of demonstrations says "up" instead of "down". Above 0, the annotator goes
            to the goal's row and then to its column, even through lava; with 0, on a shortest path.
    """

    size: Annotated[int, Field(ge=2, le=16)] = 4
    lava: Annotated[int, Field(ge=0)] = 2
    cell_px: Annotated[int, Field(ge=4, le=128)] = 12
    distances: tuple[int, int] = (2, 4)
    bias: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0

    def __post_init__(self) -> None:
        """Check that there is room for start and goal."""
        if self.lava > self.size * self.size - 2:
            raise UserError(f"lava={self.lava} leaves no room for start and goal in a maze of size={self.size}")

    def reset(self, sample: Sample, seed: int) -> Observation:
        """Show the maze of a seed with the question; raises UserError if no maze has such a path."""
        self.seed, self.num_actions = seed, 0
        rng = np.random.default_rng(seed)
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        for _ in range(_MAX_TRIES):
            places = [cells[index] for index in rng.permutation(len(cells))]
            self.agent, self.goal, self.lava_cells = places[0], places[1], set(places[2 : 2 + self.lava])
            self.moves_left = self._count_moves()
            if self.distances[0] <= self.moves_left.get(self.agent, -1) <= self.distances[1]:
                return self._observe(QUESTION)
        raise UserError(f"no maze of size={self.size} with lava={self.lava} has a path of distances={self.distances}")

    def step(self, action: str | Action) -> StepResult:
        """Move the agent, unless the action is not one of the four words."""
        self.num_actions += 1
        word = action.strip(" \n\t.!\"'").casefold() if isinstance(action, str) else ""
        if word in MOVES:
            self.agent = self._move(self.agent, word)
        at_goal = self.agent == self.goal
        info = {"success": float(at_goal)}
        if self.agent in self.moves_left:
            info["distance"] = float(self.moves_left[self.agent])
        if word not in MOVES:
            return StepResult(observation=self._observe(_REMINDER), valid=False, info=info)
        ended = at_goal or self.agent in self.lava_cells
        return StepResult(observation=self._observe(""), reward=float(at_goal), terminated=ended, info=info)

    def expert(self) -> str:
        """Return the first move of a shortest path, of several the first in MOVES; with a `bias`, the annotator's."""
        if not self.bias:
            left = self.moves_left[self.agent]
            return next(word for word in MOVES if self.moves_left.get(self._move(self.agent, word)) == left - 1)
        rows, columns = self.goal[0] - self.agent[0], self.goal[1] - self.agent[1]
        if rows == 0:
            return "right" if columns > 0 else "left"
        # Derived from the step, so that an episode that is played again has the same annotator.
        draw = derive_seed(self.seed, "annotator", self.num_actions) / 2**63
        return "down" if rows > 0 and draw >= self.bias else "up"

    def _count_moves(self) -> dict[Cell, int]:
        """Return the moves from each cell to the goal on a shortest path; a cell without a path is missing."""
        moves_left = {self.goal: 0}
        waiting = [self.goal]
        for cell in waiting:  # grows while it is read: first all cells one move away, then two
            for word in MOVES:
                there = self._move(cell, word)
                if there not in self.lava_cells and there not in moves_left:
                    moves_left[there] = moves_left[cell] + 1
                    waiting.append(there)
        return moves_left

    def _move(self, cell: Cell, word: str) -> Cell:
        """Return the cell that a move leads to; at the border, the cell itself."""
        row, column = cell[0] + MOVES[word][0], cell[1] + MOVES[word][1]
        return (row, column) if 0 <= row < self.size and 0 <= column < self.size else cell

    def _observe(self, text: str) -> Observation:
        side = self.size * self.cell_px
        picture = Image.new("RGB", (side, side), _PAPER)
        draw = ImageDraw.Draw(picture)
        for offset in range(0, side, self.cell_px):
            draw.line((offset, 0, offset, side), fill=_LINE)
            draw.line((0, offset, side, offset), fill=_LINE)
        for cell in sorted(self.lava_cells):
            draw.rectangle(self._box_of(cell, 1), fill=_LAVA)
        draw.rectangle(self._box_of(self.goal, 1), fill=_GOAL)
        draw.ellipse(self._box_of(self.agent, 2), fill=_AGENT)
        row, column = self.agent
        return Observation(text=text, media=(encode_png(picture),), state=f"row {row}, column {column}")

    def _box_of(self, cell: Cell, margin: int) -> tuple[int, int, int, int]:
        top, left = cell[0] * self.cell_px, cell[1] * self.cell_px
        return left + margin, top + margin, left + self.cell_px - margin, top + self.cell_px - margin


make = Maze

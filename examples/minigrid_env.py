"""Rooms of minigrid, for `minigrid.yaml`: the environment of gymnasium's adapter, with an expert for demonstrations."""

import gymnasium

from mmrl import GymnasiumEnvironment

QUESTION = "Go to the green square. Answer left, right or forward."
ACTIONS = {"left": 0, "right": 1, "forward": 2}
AHEAD = ((1, 0), (0, 1), (-1, 0), (0, -1))  # column and row, by the direction in which the agent looks


class Room(GymnasiumEnvironment):
    """An episode in a room."""

    def expert(self) -> str:
        """Return the first action of a shortest way to the goal, round walls and lava."""
        room = self.env.unwrapped
        start = (int(room.agent_pos[0]), int(room.agent_pos[1]), int(room.agent_dir))
        seen, waiting = {start}, [(start, "")]
        for (x, y, facing), first in waiting:  # grows while it is read: first states one action away, then two
            if room.grid.get(x, y) and room.grid.get(x, y).type == "goal":
                return first
            dx, dy = AHEAD[facing]
            turned = {"left": (x, y, (facing - 1) % 4), "right": (x, y, (facing + 1) % 4)}
            for word, place in {"forward": (x + dx, y + dy, facing), **turned}.items():
                cell = room.grid.get(*place[:2])
                if place not in seen and (cell is None or cell.type == "goal"):
                    seen.add(place)
                    waiting.append((place, first or word))
        return "forward"


def make(*, id: str = "minigrid:MiniGrid-Empty-Random-5x5-v0", tile_size: int = 8) -> Room:
    """Make a room; each of its squares is shown with `tile_size` pixels a side."""
    return Room(gymnasium.make(id, render_mode="rgb_array", tile_size=tile_size), ACTIONS, QUESTION)

"""Wall-clock time that mmrl adds to a step of an environment: processes, checks, digests, and the file of the picture.

    python tools/bench/environments.py [--episodes 64] [--steps 20] [--workers 1]

Each step draws a new picture. "its own" is the environment's time when it is called in this process; mmrl takes the
rest. Exits 1 if that is more than 2 ms a step.
"""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image
from results import make_parser, write_results

from mmrl.config.schema import EnvironmentConfig
from mmrl.rollout.environments.episodes import EpisodeReply, EpisodeRequest, EpisodeWorkers
from mmrl.rollout.environments.pictures import save_picture
from mmrl.types import AnswerType, Environment, Observation, Sample, StepResult, Target

MOST_MS = 2.0
SAMPLE = Sample(id="s", task="t", parts=("?",), target=Target(answer_type=AnswerType.TEXT, value="?"))


class Painter:
    """Draws a picture of 48 x 48 pixels at each step."""

    def reset(self, sample: Sample, seed: int) -> Observation:
        """Begin with a generator of this seed."""
        self.rng = np.random.default_rng(seed)
        return Observation()

    def step(self, action: str) -> StepResult:
        """Draw blocks of random colours."""
        content = io.BytesIO()
        blocks = self.rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(blocks.repeat(8, 0).repeat(8, 1)).save(content, "png")
        return StepResult(observation=Observation(text=action, media=(content.getvalue(),)), reward=1.0)

    def close(self) -> None:
        """Nothing has to be closed."""


def make() -> Environment:
    return Painter()


def time_alone(episodes: int, steps: int) -> float:
    """Return the seconds of a step in this process."""
    painters = [Painter() for _ in range(episodes)]
    for seed, painter in enumerate(painters):
        painter.reset(SAMPLE, seed)
    start = time.perf_counter()
    for step in range(steps):
        for painter in painters:
            painter.step(f"action {step}")
    return (time.perf_counter() - start) / (episodes * steps)


def time_in_workers(episodes: int, steps: int, workers: int, folder: Path) -> float:
    """Return the seconds of a step in worker processes, its picture saved as a file."""
    options = EnvironmentConfig(kind="environment", fn=f"{__file__}:make", workers=workers)
    processes = EpisodeWorkers(Path(), options)
    past: list[list[str]] = [[] for _ in range(episodes)]
    digests: list[list[str]] = [[] for _ in range(episodes)]
    try:
        for step in range(steps + 1):
            if step == 1:  # the first starts the processes
                start = time.perf_counter()
            requests = []
            for episode in range(episodes):
                request = EpisodeRequest(
                    key=episode,
                    sample=SAMPLE,
                    seed=episode,
                    past=tuple(past[episode]),
                    digests=tuple(digests[episode]),
                    action=f"action {step}",
                )
                requests.append(request)
            for episode, reply in enumerate(processes.play(requests)):
                assert isinstance(reply, EpisodeReply), reply
                assert not reply.replayed
                (picture,) = reply.result.observation.media
                assert isinstance(picture, bytes)
                save_picture(folder, picture)
                past[episode].append(f"action {step}")
                digests[episode].append(reply.digest)
        return (time.perf_counter() - start) / (episodes * steps)
    finally:
        processes.close()


def main() -> None:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        own = time_alone(arguments.episodes, arguments.steps) * 1000.0
        whole = time_in_workers(arguments.episodes, arguments.steps, arguments.workers, Path(folder)) * 1000.0
    added = whole - own
    print(f"a step: {whole:.2f} ms, of which {own:.2f} its own and {added:.2f} ours (at most {MOST_MS:g})")
    write_results(arguments.json, "environments", {"step_ms": whole, "own_ms": own, "added_ms": added})
    sys.exit(added > MOST_MS)


if __name__ == "__main__":
    main()

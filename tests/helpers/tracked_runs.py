"""Run directories that grow as those of real runs, processes that follow them, and what a tracker has in the end."""

import json
import signal
import socket
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from config_samples import SMALL
from fork_server import run_forked
from PIL import Image

from mmrl.config import dump_yaml, load_config
from mmrl.log.run_dir import RunDir
from mmrl.log.trackers.backends import TRACKERS, Picture, RunFacts, StepRow
from mmrl.log.trackers.process import Follower
from mmrl.utils.digests import file_digest

Points = Counter[tuple[int, str]]
"""How often a tracker has each (global step, metric)."""


class FakeTracker:
    """Appends what it is given to a file, a line for each row, as a database would."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, step: int, sent: set[tuple[int, str]]) -> set[tuple[int, str]]:
        return sent | {key for key in read_fake(self.path) if key[0] >= step}

    def log(self, rows: list[StepRow]) -> None:
        with self.path.open("a") as file:
            for row in rows:
                file.write(json.dumps([row.step, row.values]) + "\n")
                file.flush()

    def log_pictures(self, step: int, pictures: list[Picture]) -> None:
        with self.path.with_suffix(".pictures").open("a") as file:
            file.write(f"{step} {len(pictures)}\n")

    def end(self, status: str, summary: Mapping[str, float]) -> None:
        with self.path.with_suffix(".end").open("a") as file:
            file.write(json.dumps([status, dict(summary)]) + "\n")


def read_fake(path: Path) -> Points:
    points: Points = Counter()
    for line in path.read_text().splitlines() if path.exists() else ():
        step, values = json.loads(line)
        points.update((step, name) for name in values)
    return points


def make_run(folder: Path, trackers: str = "[tensorboard]", **overrides: str) -> RunDir:
    """A run directory that has a config, a manifest and no line yet."""
    run_dir = RunDir(folder / "run")
    run_dir.path.mkdir(parents=True)
    source = folder / "c.yaml"
    source.write_text(SMALL)
    settings = [f"{key}={value}" for key, value in {"logging.trackers": trackers, **overrides}.items()]
    config = load_config(source, [f"run.dir={run_dir.path}", *settings]).config
    run_dir.config.write_text(dump_yaml(config))
    run_dir.trackers.mkdir()
    run_dir.manifest.write_text(json.dumps({"mmrl": "0.2.0", "git": {"commit": "ab12", "dirty": False}}))
    return run_dir


def expected_lines(cold: int = 4, rl: int = 6) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl: two stages, each with a validation in the middle, a test before and after."""
    lines: list[dict[str, Any]] = [{"stage": "cold", "step": 0, "test/mean": 0.1}]
    for stage, steps in (("cold", cold), ("rl", rl)):
        for step in range(1, steps + 1):
            lines.append({"stage": stage, "step": step, "learner/lr": 0.1 * step, "reward/mean": step / 7, "kl": None})
            if step == steps // 2:
                lines.append({"stage": stage, "step": step, "validation/mean": step / 3})
    return [*lines, {"stage": None, "step": 0, "test/mean": 0.9}]


def expected_points(lines: list[dict[str, Any]], cold: int = 4) -> Points:
    """Each (global step, metric) of lines once, those of timings.jsonl included."""
    last = max(line["step"] for line in lines if line["stage"] == "rl")
    points: Points = Counter()
    for line in lines:
        step = line["step"] + {"cold": 0, "rl": cold, None: cold + last}[line["stage"]]
        names = [name for name, value in line.items() if name not in ("stage", "step") and value is not None]
        points.update((step, name) for name in names)
        if "learner/lr" in line:
            points[step, "time/step_s"] += 1
    return points


def ours(points: Points) -> Points:
    """The points of a tracker that are metrics of the run: no fields of its own, of the stage or of pictures."""
    groups: dict[str, Points] = {}
    for (step, name), count in points.items():
        group, slash, _ = name.partition("/")
        if slash:
            groups.setdefault(group, Counter())[step, name] = count
    groups.pop("stage")
    metrics: Points = Counter()
    for group in ("learner", "reward", "validation", "test", "time"):
        metrics.update(groups.get(group, {}))
    return metrics


def append(run_dir: RunDir, lines: list[dict[str, Any]]) -> None:
    """Write lines as a run does: a step's metrics, then its timings."""
    for line in lines:
        with run_dir.metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if "learner/lr" in line:
            with run_dir.timings.open("a") as file:
                file.write(json.dumps({"stage": line["stage"], "step": line["step"], "time/step_s": 1.0}) + "\n")


def resume_at(run_dir: RunDir, num_lines: int) -> None:
    """Cut metrics.jsonl back to a checkpoint, as a resumed run does; timings.jsonl stays as it is."""
    kept = run_dir.metrics.read_bytes().splitlines(keepends=True)[:num_lines]
    run_dir.metrics.write_bytes(b"".join(kept))


def write_rollouts(run_dir: RunDir, step: int) -> None:
    """Two groups of the RL stage with two rollouts each, about a picture of 40 x 20 pixels, halved for the model."""
    picture = run_dir.path / "data" / "x.png"
    picture.parent.mkdir(exist_ok=True)
    Image.new("RGB", (40, 20), (0, 0, 200)).save(picture)
    medium = {
        **{"kind": "image", "path": "data/x.png", "sha256": file_digest(picture), "timestamp": None, "crop": None},
        **{"original": [40, 20], "resized": [20, 10], "offset": [0, 0]},
    }
    lines = []
    for group in range(2):
        for rollout in range(2):
            record = {
                **{"stage": "rl", "step": step, "group": group, "sample": f"s{group}", "rollout": rollout},
                **{"question": "<image>Where?", "response": "here", "answer": [0, 0, 10, 5], "answer_type": "box"},
                **{"target": [0, 0, 10, 5], "target_frame": "px_original", "frame": "px_resized"},
                **{"media_index": 0, "media": [medium], "total": 0.5},
            }
            lines.append(json.dumps(record) + "\n")
    run_dir.rollouts.mkdir(exist_ok=True)
    (run_dir.rollouts / f"rl-{step:06d}.jsonl").write_text("".join(lines))


def fake_follower(run_dir: RunDir, tracker: FakeTracker) -> Follower:
    """A follower that sends to `tracker` under the name of `fake`."""

    def open_fake(run: RunFacts) -> FakeTracker:
        return tracker

    TRACKERS["fake"] = open_fake
    return make_follower(run_dir, "fake")


def make_follower(run_dir: RunDir, name: str) -> Follower:
    return Follower(run_dir, load_config(run_dir.config).config, run_dir.path, name)


def refuse_network() -> None:
    """Refuse connections of this process to anything but itself."""
    connect = socket.socket.connect

    def connect_here(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"a test wanted to connect to {address}")
        connect(self, address)

    socket.socket.connect = connect_here  # type: ignore[method-assign]


def follow_in_process(run_dir: RunDir, name: str, moment: str, number: int) -> int:
    """Run `follow_and_die.py` on a run directory in a new process; return its exit code."""
    program = Path(__file__).with_name("follow_and_die.py")
    done = run_forked(program, run_dir.path, name, moment, number)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def read_tensorboard(run_dir: RunDir) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir.tensorboard), size_guidance={"scalars": 0})
    accumulator.Reload()
    points: Points = Counter()
    for name in accumulator.Tags()["scalars"]:
        points.update((event.step, name) for event in accumulator.Scalars(name))
    return points


def read_wandb(run_dir: RunDir) -> Points:
    """What `wandb sync` would send: the rows of all offline files of the run."""
    from wandb.proto.wandb_internal_pb2 import Record

    points: Points = Counter()
    for path in run_dir.trackers.glob("wandb/offline-run-*/*.wandb"):
        for content in _read_leveldb_log(path.read_bytes()):
            record = Record()
            record.ParseFromString(content)
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            points.update((int(row["global_step"]), name) for name in row)
    return points


def _read_leveldb_log(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file: after a header of 7 bytes blocks of 32 KiB, in which records are cut into chunks."""
    header = struct.Struct("<IHB")  # checksum, length, kind: 1 whole, 2 first, 3 middle, 4 last
    position, record = 7, b""
    while position + header.size <= len(data):
        left_in_block = 2**15 - position % 2**15
        if left_in_block < header.size:
            position += left_in_block
            continue
        _, length, kind = header.unpack_from(data, position)
        position += header.size
        if position + length > len(data) or kind not in (1, 2, 3, 4):
            return  # a kill left it incomplete
        record += data[position : position + length]
        position += length
        if kind in (1, 4):
            yield record
            record = b""


def read_trackio(project: str) -> Points:
    from trackio.sqlite_storage import SQLiteStorage

    points: Points = Counter()
    records = SQLiteStorage.get_run_records(project)
    assert len(records) == 1, "a resumed run continues its run in the tracker"
    for row in SQLiteStorage.get_logs(project, records[0]["name"]):
        points.update((row["step"], name) for name, value in row.items() if isinstance(value, float))
    return points


def read_mlflow(run_dir: RunDir, project: str) -> Points:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir.trackers.resolve()}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    assert len(runs) == 1, "a resumed run continues its run in the tracker"
    points: Points = Counter()
    for name in runs[0].data.metrics:
        history = client.get_metric_history(runs[0].info.run_id, name)
        points.update((metric.step, name) for metric in history)
    return points

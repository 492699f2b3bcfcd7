"""Read the files of a run or an evaluation in whatever state they are: being written, cut off, partly deleted, older.

Nothing here raises for a file that is missing or damaged. What could not be read is kept as a problem, and the page
shows it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from mmrl.config.yaml_tree import parse_yaml
from mmrl.types import UserError
from mmrl.utils.digests import text_digest

StepKind = Literal["train", "validation", "test"]
Row = dict[str, Any]
_ValueT = TypeVar("_ValueT")

_RUN_FILES: Final = ("config.yaml", "metrics.jsonl", "manifest.json", "status.json", "rollouts")
_EVAL_FILES: Final = ("predictions.jsonl", "verdicts.jsonl")
_STEP_NAME: Final = re.compile(r"(.+)-(\d+)(-validation)?")
_MAX_LISTED: Final = 5  # names that an error message lists
_MAX_JSON_BYTES: Final = 64_000_000  # of one JSON document or line; more is not a record of mmrl


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """The folder of a run or of an evaluation."""

    id: str  # `r0`, `r1`, ...: the first part of its documents' keys
    path: Path  # the folder
    shown_path: str  # the path as the command line named it
    kind: Literal["run", "eval"]  # a run of `mmrl train`, or a folder of `mmrl eval`


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFile:
    """A file of rollouts."""

    key: str  # key of its document
    kind: StepKind  # rollouts of training, of a validation, or of the test before or after the run
    stage: str | None  # name of the stage; None for a test
    step: int  # step within the stage; 0 for a test
    label: str  # a few words for people
    path: Path  # the file

    @property
    def tokens_path(self) -> Path:
        """Path of the tokens of these rollouts; the file need not exist."""
        return self.path.with_suffix(".npz")


def find_run(path: Path, run_id: str, shown_path: str) -> RunFolder:
    """Return the run or evaluation in a folder.

    Raises:
        UserError: the folder is neither.
    """
    if any((path / name).exists() for name in _RUN_FILES):
        return RunFolder(id=run_id, path=path, shown_path=shown_path, kind="run")
    if any((path / name).exists() for name in _EVAL_FILES):
        return RunFolder(id=run_id, path=path, shown_path=shown_path, kind="eval")
    if not path.is_dir():
        raise UserError(
            f"{shown_path}: {'not a folder' if path.exists() else 'no such folder'}; name the folder of a run"
        )
    inner = sorted(file.parent.name for name in ("config.yaml", *_EVAL_FILES) for file in path.glob(f"*/{name}"))
    hint = f"; it holds {', '.join(inner[:_MAX_LISTED])}: name one of them" if inner else ""
    raise UserError(
        f"{shown_path} is neither a run (no config.yaml, metrics.jsonl or rollouts/) nor a folder of `mmrl eval` "
        f"(no predictions.jsonl){hint}"
    )


def list_step_files(folder: RunFolder, stages: list[str]) -> list[StepFile]:
    """Return the files of rollouts in the order of the run, whose stages are `stages`."""
    files = []
    for path in (folder.path / "rollouts").glob("*.jsonl"):
        named = _STEP_NAME.fullmatch(path.stem)
        kind: StepKind = "train"
        stage, step, label = None, 0, path.stem.replace("-", " ")
        if path.stem.startswith("test-"):
            kind = "test"
        elif named is None:
            continue
        else:
            kind = "validation" if named[3] else "train"
            stage, step = named[1], int(named[2])
            label = f"{stage} {step}" + (" validation" if named[3] else "")
        key = f"{folder.id}/{make_key(path.stem)}"
        files.append(StepFile(key=key, kind=kind, stage=stage, step=step, label=label, path=path))
    places = {name: place for place, name in enumerate(stages)}

    def order(file: StepFile) -> tuple[int, int, str]:
        if file.kind == "test":
            return (-1 if file.path.stem == "test-before" else len(places) + 1, 0, "")
        # Of one step, the rollouts that were trained on come before the validation that followed.
        return (places.get(file.stage or "", len(places)), file.step, file.kind)

    return sorted(files, key=order)


def make_key(name: str) -> str:
    """Return a part of a key for a file's name: letters, digits, `_`, `-` and `.`, which differ for other names."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    return plain if plain == name else f"{plain}.{text_digest(name)[:8]}"


def parse_json(text: str | bytes) -> object:
    """Parse JSON; a number that is not finite becomes None, since the page's JSON has none.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    if len(text) > _MAX_JSON_BYTES:
        raise ValueError(f"{len(text):,} bytes are too many for a record")
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    try:
        return json.loads(text, parse_constant=lambda _: None, parse_float=_parse_float)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _parse_float(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


class RunFiles:
    """Reads the files of one run, and notes what could not be read."""

    def __init__(self, root: Path) -> None:
        """Read below `root`; nothing is read yet."""
        self.root = root
        self._problems: dict[str, str] = {}  # by file, what could not be read
        self._cache: dict[Path, tuple[tuple[int, int] | None, Any]] = {}  # by file, its signature and what was parsed

    @property
    def problems(self) -> list[str]:
        """What could not be read, one line a file."""
        return [f"{name}: {problem}" for name, problem in sorted(self._problems.items())]

    def report(self, path: Path, problem: str) -> None:
        """Add a problem of a file, or of the folder in it, to those that the page shows."""
        self._problems[path.relative_to(self.root).as_posix()] = problem

    def signature(self, path: Path) -> tuple[int, int] | None:
        """Return time of change and size of a file, which differ after it changed; None if there is none."""
        try:
            status = path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size

    def read(self, path: Path, parse: Callable[[Path], _ValueT], missing: _ValueT) -> _ValueT:
        """Return what `parse` makes of a file, and `missing` if the file is missing or cannot be read."""
        self._problems.pop(path.relative_to(self.root).as_posix(), None)
        try:
            return parse(path)
        except FileNotFoundError:
            return missing
        except (OSError, ValueError, UserError) as error:
            self.report(path, f"cannot be read ({_shorten(error)})")
            return missing

    def read_cached(self, path: Path, parse: Callable[[Path], _ValueT], missing: _ValueT) -> _ValueT:
        """Return what `read` returns, and the same value again until the file changes."""
        signature = self.signature(path)
        if path not in self._cache or self._cache[path][0] != signature:
            self._cache[path] = signature, self.read(path, parse, missing)
        value: _ValueT = self._cache[path][1]
        return value

    def read_object(self, name: str) -> Row:
        """Return the JSON object in a file of the run; an empty one if there is none."""
        return self.read_cached(self.root / name, _parse_object, {})

    def read_yaml(self, name: str) -> Row:
        """Return the mapping in a YAML file of the run; an empty one if there is none."""
        return self.read_cached(self.root / name, _parse_mapping, {})

    def read_lines(self, path: Path) -> Iterator[tuple[int, Row]]:
        """Yield index and object of each line of a JSONL file, from 0. Lines that are no JSON object are left out.

        A last line without its end is left out silently: a writer is at it, or was killed there.
        """
        self._problems.pop(path.relative_to(self.root).as_posix(), None)
        num_bad, first_bad = 0, ""
        try:
            with path.open("rb") as file:
                for index, line in enumerate(file):
                    if not line.endswith(b"\n"):
                        break
                    try:
                        row = parse_json(line)
                        if not isinstance(row, dict):
                            raise ValueError("not a JSON object")
                    except ValueError as error:
                        first_bad = first_bad or f"line {index + 1}: {_shorten(error)}"
                        num_bad += 1
                        continue
                    yield index, row
        except FileNotFoundError:
            return
        except OSError as error:
            self.report(path, f"cannot be read ({error.strerror})")
        if num_bad:
            self.report(path, f"{num_bad} line(s) cannot be read ({first_bad})")


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return a mapping as it is, and an empty one in place of anything else that a damaged file may hold."""
    return value if isinstance(value, Mapping) else {}


def as_list(value: object) -> list[Any]:
    """Return a list as it is, and an empty one in place of anything else that a damaged file may hold."""
    return value if isinstance(value, list) else []


def _parse_object(path: Path) -> Row:
    value = parse_json(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _parse_mapping(path: Path) -> Row:
    node, _ = parse_yaml(path.read_text(encoding="utf-8", errors="replace"), lambda line: f"line {line}")
    value = None if node is None else node.plain_value
    if not isinstance(value, dict):
        raise ValueError("not a mapping")
    return value


def _shorten(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.split("\n")[0][:120]

"""The sub-commands of `mmrl reward`: list, show, new, test, lint and try."""

from __future__ import annotations

import inspect
import json
import keyword
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from PIL import Image, ImageDraw
from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmrl.answer import ResponseFormat, list_coordinates, validate_value
from mmrl.cli.common import echo
from mmrl.scoring.forks import run_in_forks
from mmrl.scoring.lint import LintReport, filter_scorable, lint_reward
from mmrl.scoring.registry import (
    builtin_case_tables,
    builtin_rewards,
    case_media,
    find_cases,
    find_own_folder,
    load_bound_reward,
    load_reward,
    qualified_name,
)
from mmrl.scoring.reward_workers import first_call_timeout_s
from mmrl.scoring.trial_responses import build_attacks, make_samples
from mmrl.types import (
    AnswerType,
    CoordinateSystem,
    Failure,
    Response,
    Sample,
    Size,
    Unscorable,
    UserError,
    VideoRef,
    use_media_opener,
)
from mmrl_rewards.cases import Case, CaseResult, first_error_message, load_case_table, load_sample
from mmrl_rewards.contract import BoundReward, Reward, bind

# A drawn row.
_SIDE_PX: Final = 640
_LINE_PX: Final = 14
_LINE_CHARS: Final = 96
_RADIUS_PX: Final = 5
# Two colours that people with any colour vision tell apart.
_TARGET_COLOR, _ANSWER_COLOR = (0, 158, 115), (230, 97, 0)
# A new reward.
_FORMAT: Final = ResponseFormat()
_MAX_ATTACK_CHARS: Final = 400
_PICTURE_SIZE: Final = (1000, 1000)  # as in `make_samples`
_PIXELS: Final = "    pixels = sample.image(0)  # uint8 [height, width, 3]; let the value depend on what they show\n"


def print_rewards() -> int:
    """Print a table of the rewards that come with mmrl."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("reward", "answer types", "range", "formula"):
        table.add_column(heading, no_wrap=heading == "reward")
    for name, reward in builtin_rewards().items():
        answer_types = ", ".join(reward.answer_types) or "any"
        # The first paragraph of its docstring, on one line.
        formula = " ".join(reward.doc.partition("\n\n")[0].split())
        value_range = f"{reward.low:g} to {reward.high:g}"
        table.add_row(name.removeprefix("mmrl_rewards."), answer_types, value_range, Text(formula))
    Console().print(table)
    return 0


def print_reward(name: str) -> None:
    """Print a reward's docstring, options and source."""
    reward = load_reward(name, Path())
    answer_types = ", ".join(reward.answer_types) or "any type of answer"
    echo(f"{qualified_name(name)}  (`{reward.name}`, {reward.low:g} to {reward.high:g}, {answer_types})\n")
    echo(f"{reward.doc}\n")
    for option, parameter in inspect.signature(reward.fn).parameters.items():
        if option in reward.options:
            echo(f"option {parameter}")
    echo(f"source {inspect.getsourcefile(reward.fn)}:{inspect.getsourcelines(reward.fn)[1]}")


def draw_reward_case(name: str, row: int, file: Path) -> None:
    """Draw a row of a reward's case table, counted from 0 among its own rows, as a PNG.

    Raises:
        UserError: there is no such row, its picture cannot be opened, or the file cannot be written.
    """
    cases, folder = find_cases(name, Path())
    if not 0 <= row < len(cases):
        raise UserError(f"the case table of {name!r} has no row {row}; it has {len(cases)}, counted from 0")
    reward = load_bound_reward(name, Path(), cases[row].args)
    try:
        with use_media_opener(case_media(folder)):
            _draw_case(cases[row], reward).save(file, "PNG")
    except Unscorable as error:
        raise UserError(f"row {row} cannot be drawn: {error}") from error
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from error
    echo(f"wrote {file}: the target is green, the answer orange")


def _draw_case(case: Case, reward: BoundReward) -> Image.Image:
    """Return the picture of a case with the target in green and the answer in orange, and its value, reason and source.

    Raises:
        Unscorable: the picture cannot be opened.
        UserError: the row names no picture.
    """
    index, media = case.sample.media_index, case.sample.all_media()
    if index >= len(media) or media[index].file is None:
        raise UserError('the row names no picture; in its sample, write "image": "picture.png"')
    response, sample = case.build()
    ref = sample.media[index]
    if isinstance(ref, VideoRef):
        picture = Image.fromarray(sample.video_frames(index, [ref.start or 0.0])[0])
    else:
        picture = Image.fromarray(sample.image(index))
    factor = _SIDE_PX / max(picture.size)
    size = Size(max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
    picture = picture.resize(size, Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS)
    _draw_marks(picture, response, sample)
    result = case.score(reward)
    texts = [f"value {result.value}, expected {case.expected}: {result.reason}", f"source: {case.source}"]
    lines = []
    for text in (*texts, f"{case.response!r:.300}"):
        lines += textwrap.wrap(text, _LINE_CHARS)
    page = Image.new("RGB", (_SIDE_PX, size.height + (len(lines) + 1) * _LINE_PX), "white")
    page.paste(picture, (0, 0))
    # Pillow's own font, which every machine has.
    ImageDraw.Draw(page).multiline_text((4, size.height + 4), "\n".join(lines), "black", spacing=2)
    return page


def _draw_marks(picture: Image.Image, response: Response, sample: Sample) -> None:
    target, draw = sample.target, ImageDraw.Draw(picture)
    shown = response.resize_maps[target.media_index]
    marks = [(target.value, target.coordinate_system, _TARGET_COLOR)]
    if response.answer.value is not None:
        marks.append((response.answer.value, response.coordinate_system, _ANSWER_COLOR))
    for value, system, color in marks:
        # A target may be broken on purpose.
        with suppress(ValueError):
            for values in list_coordinates(target.answer_type, validate_value(target.answer_type, value)):
                shares = shown.convert(values, system or CoordinateSystem.PX_ORIGINAL, CoordinateSystem.NORM_1)
                places = [share * picture.size[axis % 2] for axis, share in enumerate(shares)]
                if len(places) == 2:
                    draw.circle(places, _RADIUS_PX, fill=color, outline="white")
                else:
                    draw.rectangle(places, outline=color, width=3)


def create_reward(name: str, answer_type: AnswerType, folder: Path, *, looks: bool) -> int:
    """Write NAME.py and NAME.json for targets of a type; with `looks`, also NAME.png, for a reward that sees it.

    Raises:
        UserError: the name is not a Python name, or a file is there already or cannot be written.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UserError(f"{name!r} cannot be the name of a function: use letters, digits and _, a letter first")
    code, table = folder / f"{name}.py", folder / f"{name}.json"
    if answer_type is AnswerType.BOX and looks:
        source = _read_template("look")
    else:
        doc, expression, standard, imports, *options = json.loads(_read_template("formulas"))[answer_type]
        source = _read_template("answer").replace("TYPE", answer_type.name).replace("DOC", doc)
        source = source.replace("OPTIONS", "".join(options))
        source = source.replace("EXPRESSION", expression).replace("STANDARD", standard).replace("IMPORT\n", imports)
        source = source.replace("LOOKS", ", looks=True" if looks else "").replace("PIXELS\n", _PIXELS if looks else "")
    sources = source, _write_rows(answer_type, looks=looks)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, source in zip((code, table), sources, strict=True):
            # "x" refuses to write over a file that is there.
            with path.open("x", encoding="utf-8") as file:
                file.write(source.replace("NAME", name))
        if looks:
            with (folder / f"{name}.png").open("xb") as png:
                _draw_new_picture().save(png)
    except FileExistsError as error:
        raise UserError(f"{error.filename} exists already; choose another name or folder") from error
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error
    echo(f"wrote {code} and {table}; try\n  mmrl reward test {table}\n  mmrl reward lint {code}:{name}")
    return 0


def _draw_new_picture() -> Image.Image:
    """Return a blue picture with a red rectangle where the box of `make_samples` lies."""
    (box_sample,) = make_samples((AnswerType.BOX,))
    picture = Image.new("RGB", _PICTURE_SIZE, "#2b6cb0")
    left, top, right, bottom = map(int, box_sample.target.value)
    picture.paste("#c53030", (left, top, right, bottom))
    return picture


def _write_rows(answer_type: AnswerType, *, looks: bool) -> str:
    """Return a case table: correct responses, and attempts to earn a reward without solving the task."""
    (sample,) = make_samples((answer_type,))
    image = "NAME.png" if looks else _PICTURE_SIZE
    target = {"answer_type": answer_type, "value": sample.target.value, "image": image}
    if sample.target.coordinate_system:
        target["coordinates"] = sample.target.coordinate_system
    right = _FORMAT.build_example(sample.target)
    rows = [("correct", right, 1), ("correct, after thinking", f"<think>so</think>{right}", 1)]
    for name, text in build_attacks(sample, _FORMAT, right).items():
        if len(text) <= _MAX_ATTACK_CHARS:
            rows.append((name, text, 0))
    rows += [("nested tags", f"<answer>{right}</answer>", 0), ("two answers", right + right, 0)]
    lines = []
    for source, text, expected in rows:
        row = {"fn": "./NAME.py:NAME", "sample": target, "response": text, "expected": expected, "source": source}
        if source == "whole picture":
            row["tolerance"] = 0.05  # it overlaps a little
        lines.append("  " + json.dumps(row, ensure_ascii=False))
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _read_template(kind: str) -> str:
    return Path(__file__).with_name(f"new_reward.{kind}.txt").read_text(encoding="utf-8")


def run_case_tables(names: Sequence[str], *, verbose: bool) -> int:
    """Run case tables, or the rows about single rewards; return 1 if a row fails."""
    failures = 0
    for title, base_dir, cases in _select_cases(names):
        passed = 0
        for index, (case, outcome) in enumerate(zip(cases, _score_cases(cases, base_dir), strict=True)):
            passed += _print_outcome(f"{title} row {index}", case, outcome, verbose=verbose)
        echo(f"{title}: {passed} of {len(cases)} rows pass")
        failures += len(cases) - passed
    return int(failures > 0)


def lint_rewards(names: Sequence[str], args: Mapping[str, Any], table: Path | None) -> int:
    """Lint rewards, by default all that come with mmrl; return 1 if one is not fit to train with."""
    num_unfit = 0
    for name in names or builtin_rewards():
        folder = table.parent if table else find_own_folder(name, Path())
        with use_media_opener(case_media(folder)):
            reward, samples = _reward_and_samples(name, args, table)
            report = lint_reward(reward, samples)
        _print_lint_report(name, report)
        num_unfit += not report.ok
    return int(num_unfit > 0)


def try_reward(row: Mapping[str, Any], sample_file: Path, response: str) -> int:
    """Score one response, or the text of a file for `@FILE`; print value (or "unscorable") and reason as JSON.

    Raises:
        UserError: a file cannot be read, or `row` is not a row of a case table.
    """
    if response.startswith("@"):
        try:
            response = Path(response[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise UserError(f"--response {response}: cannot be read: {reason}") from error
    fields = {"expected": 0, "source": "", "sample": load_sample(sample_file), "response": response}
    try:
        case = Case.model_validate({**fields, **row})
    except ValidationError as error:
        raise UserError(f"--case: {first_error_message(error)}") from error
    [outcome] = _score_cases([case], sample_file.parent, reward_dir=Path())
    echo(json.dumps({"value": outcome.value, "reason": outcome.reason}, ensure_ascii=False))
    return int(outcome.value is None)


def _score_cases(cases: Sequence[Case], base_dir: Path, reward_dir: Path | None = None) -> list[CaseResult]:
    """Score rows in another process: a reward that hangs, or ends its process, fails only its row.

    Pictures lie in `base_dir`; so do files of rewards if `reward_dir` is not given.
    """
    bound_rewards = [load_bound_reward(case.fn, reward_dir or base_dir, case.args) for case in cases]
    # Any of these calls may be the first of its reward.
    timeout_s = max([first_call_timeout_s(bound.reward.timeout_s) for bound in bound_rewards], default=0.0)
    tasks = [partial(case.score, bound) for case, bound in zip(cases, bound_rewards, strict=True)]
    results = []
    with use_media_opener(case_media(base_dir)):
        for bound, outcome in zip(bound_rewards, run_in_forks(tasks, timeout_s), strict=True):
            if isinstance(outcome, Failure):
                results.append(CaseResult(None, f"{outcome.reason} ({bound.reward.place})", False))
            else:
                results.append(outcome)
    return results


def _print_outcome(title: str, case: Case, outcome: CaseResult, *, verbose: bool) -> bool:
    """Print a row if it fails or with `verbose`, and return True if it passes."""
    if verbose or not outcome.passed:
        verdict = "pass" if outcome.passed else "FAIL"
        echo(f"{verdict} {title} {case.fn}: expected {case.expected}, got {outcome.value}")
        echo(f"     reason: {outcome.reason}\n     source: {case.source}\n     response: {case.response!r:.120}")
    return outcome.passed


def _select_cases(names: Sequence[str]) -> list[tuple[str, Path, tuple[Case, ...]]]:
    """Return the named tables, each with its title, the folder that its files start from, and its rows."""
    tables = []
    for name in names or map(str, builtin_case_tables()):
        path = Path(name)
        if path.suffix == ".json":
            tables.append((path.name, path.parent, load_case_table(path)))
        else:
            cases, base_dir = find_cases(name, Path())
            tables.append((name, base_dir, cases))
    return tables


def _reward_and_samples(name: str, args: Mapping[str, Any], table: Path | None) -> tuple[BoundReward, Sequence[Sample]]:
    """Return a reward with its options, and samples to try it on; raise UserError if it can score none."""
    reward = load_reward(name, Path())
    # One plain sample per answer type suffices, unless the reward reads pictures, needs options or cannot score them;
    # then the samples of its case table are used.
    needs_options = any(option.required and key not in args for key, option in reward.options.items())
    why = "looks at pictures" if reward.looks else "needs options"
    if table is None and not needs_options and not reward.looks:
        bound = bind(reward, args)
        samples, reasons = filter_scorable(bound, make_samples(reward.answer_types or tuple(AnswerType)))
        if samples:
            return bound, samples
        why = f"can score no plain sample ({reasons[0]})"
    try:
        cases = load_case_table(table) if table else find_cases(name, Path())[0]
    except UserError as error:
        raise UserError(f"reward {reward.name!r} {why}, so lint takes samples from its case table: {error}") from error
    return _bind_to_cases(reward, args, [case for case in cases if case.expected != "unscorable"])


def _bind_to_cases(
    reward: Reward[...], args: Mapping[str, Any], cases: Sequence[Case]
) -> tuple[BoundReward, Sequence[Sample]]:
    """Return a reward with its options, or the first row's, and the samples of a table that it can score."""
    if not cases:
        raise UserError(f"no row of the case table of reward {reward.name!r} expects a value: there is nothing to try")
    bound = bind(reward, args or cases[0].args)
    unique_samples = {case.sample.model_dump_json(): case.sample.build() for case in cases}
    samples, reasons = filter_scorable(bound, tuple(unique_samples.values()))
    if samples:
        return bound, samples
    problem = f"reward {reward.name!r} can score no sample of its case table with the options {dict(bound.args)}"
    if reward.looks and not any(medium.file for case in cases for medium in case.sample.all_media()):
        problem = (
            f"reward {reward.name!r} looks at pictures, and no row of its case table names one: write its path from "
            'the folder of the table, `"image": "NAME.png"`, into `sample`; `mmrl reward new NAME --looks` shows how'
        )
    raise UserError(f"{problem}; the first says: {reasons[0]}")


def _print_lint_report(name: str, report: LintReport) -> None:
    echo(f"{name}: {'fit' if report.ok else 'NOT FIT'}")
    for finding in report.findings:
        echo(f"  {'pass' if finding.ok else 'FAIL'}  {finding.check}: {finding.detail}")
    for attack in report.attacks:
        verdict, limit = "pass", ""
        if not attack.ok:
            verdict, limit = "FAIL", f", at most {attack.max_allowed:.3g} is tolerated"
        detail = f"({attack.answer_type}: {attack.reason:.80})"
        echo(f"  {verdict}  {attack.attack} earns {attack.value:.3g}{limit} {detail}")

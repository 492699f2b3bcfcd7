"""`mmrl reward new`: write a reward and its case table, to fill in."""

from __future__ import annotations

import json
import keyword
from pathlib import Path

from PIL import Image

from mmrl.answer import ResponseFormat
from mmrl.cli.common import echo
from mmrl.scoring.trial_responses import build_attacks, make_samples
from mmrl.types import AnswerType, UserError

_GRAMMAR = ResponseFormat()
_MAX_CHARS = 400
_PICTURE_SIZE = (1000, 1000)  # as in `make_samples`
_PIXELS = "    pixels = sample.image(0)  # uint8 [height, width, 3]; let the value depend on what they show\n"


def create_reward(name: str, answer_type: AnswerType, folder: Path, *, looks: bool) -> int:
    """Write NAME.py and NAME.json for targets of a type; with `looks`, also NAME.png, for a reward that sees it.

    Raises:
        UserError: the name is not a Python name, or a file is there already or cannot be written.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UserError(f"{name!r} cannot be the name of a function: use letters, digits and _, a letter first")
    code, table = folder / f"{name}.py", folder / f"{name}.json"
    if answer_type is AnswerType.BOX and looks:
        sources = _read_template("look"), _write_rows(answer_type, looks=True)
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
            (box_sample,) = make_samples((AnswerType.BOX,))
            picture = Image.new("RGB", _PICTURE_SIZE, "#2b6cb0")
            left, top, right, bottom = map(int, box_sample.target.value)
            picture.paste("#c53030", (left, top, right, bottom))
            with (folder / f"{name}.png").open("xb") as png:
                picture.save(png)
    except FileExistsError as error:
        raise UserError(f"{error.filename} exists already; choose another name or folder") from error
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error
    echo(f"wrote {code} and {table}; try\n  mmrl reward test {table}\n  mmrl reward lint {code}:{name}")
    return 0


def _write_rows(answer_type: AnswerType, *, looks: bool) -> str:
    """Return a case table: correct responses, and attempts to earn a reward without solving the task."""
    (sample,) = make_samples((answer_type,))
    image = "NAME.png" if looks else _PICTURE_SIZE
    target = {"answer_type": answer_type, "value": sample.target.value, "image": image}
    if sample.target.coordinate_system:
        target["coordinates"] = sample.target.coordinate_system
    right = _GRAMMAR.build_example(sample.target)
    rows = [("correct", right, 1), ("correct, after thinking", f"<think>so</think>{right}", 1)]
    for name, text in build_attacks(sample, _GRAMMAR, right).items():
        if len(text) <= _MAX_CHARS:
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

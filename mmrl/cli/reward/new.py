"""`mmrl reward new`: write a reward and its case table, which pass and wait to be filled in."""

from __future__ import annotations

import json
import keyword
from pathlib import Path

from mmrl.types import UserError

_CODE_TEMPLATE = '''"""The reward `{name}`."""

from mmrl.types import AnswerType, Response, RewardValue, Sample
from mmrl_rewards.contract import reward, target_value


@reward(name="{name}", answer_types=(AnswerType.NUMBER,))
def {name}(response: Response, sample: Sample, *, tolerance: float = 0.0) -> RewardValue:
    """Return 1 if |answer - target| <= tolerance, else 0.

    Source: where the formula comes from. Departures: what is different here.
    Unscorable: the target is not a number.
    """
    target = target_value(sample, AnswerType.NUMBER)
    value = response.answer.value
    if value is None:
        return RewardValue(0.0, response.answer.problems[0])
    return RewardValue(float(abs(value - target) <= tolerance), f"{{value}}, expected {{target}}")
'''
_CASE_ROWS: tuple[tuple[str, dict[str, float], int, str], ...] = (
    ("<answer>3</answer>", {}, 1, "correct"),
    ("<think>one, two, three</think><answer>3</answer>", {}, 1, "correct, after thinking"),
    ("<answer>4</answer>", {}, 0, "incorrect"),
    ("<answer>4</answer>", {"tolerance": 1}, 1, "|4 - 3| <= 1"),
    ("", {}, 0, "nothing at all"),
    (" \n", {}, 0, "white space"),
    ("3", {}, 0, "no tags"),
    ("<answer>3</answer><answer>4</answer>", {}, 0, "two answers"),
    ("<answer><answer>3</answer></answer>", {}, 0, "nested tags"),
    ("<think><answer>3</answer></think>", {}, 0, "an answer in the thinking alone"),
    ("<answer>1, 2, 3, 4, 5</answer>", {}, 0, "dumped numbers"),
    ("<answer>\u0663</answer>", {}, 0, "a digit of another script"),
)


def create_reward(name: str, folder: Path) -> int:
    """Write NAME.py and NAME.json.

    Raises:
        UserError: the name is not a Python name, or a file is there already or cannot be written.
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UserError(f"{name!r} cannot be the name of a function: use letters, digits and _, a letter first")
    rows = []
    for response, args, expected, source in _CASE_ROWS:
        rows.append(
            {
                "fn": f"./{name}.py:{name}",
                "args": args,
                "sample": {"answer_type": "number", "value": 3},
                "response": response,
                "expected": expected,
                "source": source,
            }
        )
    table = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n"
    code, cases = folder / f"{name}.py", folder / f"{name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in ((code, _CODE_TEMPLATE.format(name=name)), (cases, table)):
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except FileExistsError as error:
        raise UserError(f"{error.filename} exists already; choose another name or folder") from error
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error
    print(f"wrote {code} and {cases}; try\n  mmrl reward test {cases}\n  mmrl reward lint {code}:{name}")
    return 0

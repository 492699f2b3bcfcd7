"""predictions.jsonl keeps whole batches, and a line that is not a prediction is refused."""

import json
from dataclasses import replace

import pytest

from mmrl import types
from mmrl.benchmarks.predictions import Prediction, append_predictions, read_complete_predictions


def make_prediction(number: int) -> Prediction:
    return Prediction(
        id=str(number),
        response_index=0,
        text=f"<answer>{number}\u2028</answer>",
        finish_reason=types.FinishReason.EOS,
        num_tokens=3,
        prompt_digest="ab",
        coordinate_system=types.CoordinateSystem.PX_RESIZED,
        resize_maps=(types.ResizeMap(types.Size(40, 30), types.Size(56, 28)),),
    )


def test_incomplete_batch_and_torn_line_are_dropped(tmp_path):
    path, predictions = tmp_path / "predictions.jsonl", [make_prediction(number) for number in range(5)]
    append_predictions(path, predictions)
    assert read_complete_predictions(path, [2, 2, 1]) == predictions
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    assert read_complete_predictions(path, [2, 2, 1]) == predictions[:4]
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:4])
    path.write_bytes(whole.splitlines(keepends=True)[0])
    assert read_complete_predictions(path, [2, 2, 1]) == []
    assert read_complete_predictions(tmp_path / "none.jsonl", [2]) == []


def test_turns_and_failure_of_an_episode_are_kept(tmp_path):
    call = types.Action(name="click", arguments={"coordinate": [1, 2]})
    turns = (
        types.Turn(action="left", state="s", valid=False),
        types.Turn(action=call, reward=1.0, info={"success": 1.0}),
        types.Turn(),
    )
    failure = types.Failure(types.FailureKind.TIMEOUT, "action 2: too late")
    predictions = [replace(make_prediction(0), turns=turns), replace(make_prediction(1), failure=failure)]
    append_predictions(tmp_path / "predictions.jsonl", predictions)
    assert read_complete_predictions(tmp_path / "predictions.jsonl", [2]) == predictions


def test_continuation_is_kept_and_a_row_that_does_not_say_which_is_refused(tmp_path):
    path, part = tmp_path / "predictions.jsonl", types.ResizeMap(types.Size(40, 30), types.Size(56, 28), (4, 8))
    continued = {"num_turns": 2, "used_tool": True, "rethought": True, "tool_resize_maps": (part,)}
    prediction = replace(make_prediction(0), first_response_chars=3, resize_maps=(part,), **continued)
    append_predictions(path, [prediction])
    assert read_complete_predictions(path, [1]) == [prediction]
    row = json.loads(path.read_text())
    for name in ("num_turns", "used_tool", "rethought", "tool_sizes"):
        del row[name]
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(types.UserError, match="an earlier version wrote it.*choose another folder"):
        read_complete_predictions(path, [1])
    path.write_text(json.dumps({**row, "first_response_chars": None}) + "\n")
    assert read_complete_predictions(path, [1]) == [replace(make_prediction(0), resize_maps=(part,))]


def test_line_that_is_not_a_prediction_is_refused(tmp_path):
    (tmp_path / "predictions.jsonl").write_text("{}\n")
    with pytest.raises(types.UserError, match="predictions.jsonl:1"):
        read_complete_predictions(tmp_path / "predictions.jsonl", [1])

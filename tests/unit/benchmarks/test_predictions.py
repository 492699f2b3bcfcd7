"""predictions.jsonl keeps whole batches, and a line that is not a prediction is refused."""

from pathlib import Path

import pytest

from mmrl.benchmarks.predictions import Prediction, append_predictions, read_complete_batches
from mmrl.types import CoordinateSystem, FinishReason, ResizeMap, Size, UserError


def make_prediction(number: int) -> Prediction:
    return Prediction(
        id=str(number),
        response_index=0,
        text=f"<answer>{number}\u2028</answer>",
        finish_reason=FinishReason.EOS,
        num_tokens=3,
        prompt_digest="ab",
        coordinate_system=CoordinateSystem.PX_RESIZED,
        resize_maps=(ResizeMap(Size(40, 30), Size(56, 28)),),
    )


def test_incomplete_batch_and_torn_line_are_dropped(tmp_path: Path) -> None:
    path, predictions = tmp_path / "predictions.jsonl", [make_prediction(number) for number in range(5)]
    append_predictions(path, predictions)
    assert read_complete_batches(path, [2, 2, 1]) == predictions
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    assert read_complete_batches(path, [2, 2, 1]) == predictions[:4]
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:4])
    path.write_bytes(whole.splitlines(keepends=True)[0])
    assert read_complete_batches(path, [2, 2, 1]) == []
    assert read_complete_batches(tmp_path / "none.jsonl", [2]) == []


def test_line_that_is_not_a_prediction_is_refused(tmp_path: Path) -> None:
    (tmp_path / "predictions.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="predictions.jsonl:1"):
        read_complete_batches(tmp_path / "predictions.jsonl", [1])

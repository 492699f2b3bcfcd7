"""Results of `mmrl.evaluate` and `mmrl.train` are read from their folders."""

from mmrl.api.evaluate import Evaluation
from mmrl.api.train import TrainResult
from mmrl.benchmarks.predictions import Prediction, append_predictions
from mmrl.evaluation.eval_dir import EvalDir
from mmrl.types import CoordinateSystem, FinishReason
from mmrl.utils.files import json_line

LINE_ENDS = "a\u2028b\x85c\x0bd\re"  # `str.splitlines` ends a line at each of these, JSON at none


def test_a_response_with_other_ends_of_lines_is_one_prediction(tmp_path):
    written = Prediction(
        id="q1",
        response_index=0,
        text=LINE_ENDS,
        finish_reason=FinishReason.EOS,
        num_tokens=9,
        prompt_digest="0",
        coordinate_system=CoordinateSystem.PX_ORIGINAL,
        resize_maps=(),
    )
    append_predictions(EvalDir(tmp_path).predictions_file, [written])
    assert Evaluation(tmp_path, report={}).predictions == [written]


def test_a_metric_named_by_a_task_with_other_ends_of_lines_is_one_row(tmp_path):
    row = {"step": 1, f"reward/{LINE_ENDS}": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json_line(row), encoding="utf-8")
    assert TrainResult(tmp_path, model_dir=tmp_path).metrics == [row]

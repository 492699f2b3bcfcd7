"""Arguments of `mmrl.evaluate`, refused before a model is loaded."""

import pytest

import mmrl
from mmrl import UserError

MINE = mmrl.Benchmark(name="mine")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": None}, "data must be a list, got None"),
        ({"data": 3}, "data must be a list, got 3"),
        ({"data": [3]}, "data: 3 is not a path"),
        ({"model": 3}, "model: 3 is not a path"),
        ({"out_dir": 3}, "out_dir: 3 is not a path"),
        ({"media_root": 3}, "media_root=3: must be str"),
        ({"allow_missing": "no"}, "allow_missing='no': must be bool"),
        ({"coordinate_system": "pixels"}, "coordinate_system='pixels': must be CoordinateSystem"),
        ({"overide": []}, "'overide' is not an option; did you mean 'overrides'"),
        ({"temperature": 1}, "'temperature' is not an option; there are checkpoint, split"),
        ({"data": "--out/gone.jsonl"}, "^data: .*--out/gone.jsonl: no such file"),
        ({"benchmark": mmrl.Benchmark(name="")}, "benchmark named ''; its name must be a valid file name"),
        ({"benchmark": mmrl.Benchmark(name=None)}, "benchmark named None; its name must"),  # type: ignore[arg-type]
        ({"benchmark": mmrl.Benchmark(name="b/../8")}, "benchmark named 'b/../8'; its name must"),
    ],
)
def test_a_wrong_argument_is_named(arguments, message, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=message):
        mmrl.evaluate(
            **{"model": tmp_path, "benchmark": MINE, "data": tmp_path, "out_dir": tmp_path / "out", **arguments}
        )


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_folder_that_holds_something_else_is_refused(tmp_path, name):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).touch()
    with pytest.raises(UserError, match=f"out holds '{name}' but is not an evaluation; choose another folder"):
        mmrl.evaluate(tmp_path / "model", MINE, tmp_path, out_dir=tmp_path / "out")

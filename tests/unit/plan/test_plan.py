"""`mmrl plan`: parameters are those that are published, and a line through two depths is the whole model."""

import json
from pathlib import Path

import pytest

from mmrl.config.schema import ModelConfig
from mmrl.plan import measure as measuring
from mmrl.plan.hardware import find_gpu
from mmrl.plan.measure import LearnerOptions, MicroBatchShape, measure
from mmrl.plan.shapes import build_meta_model, read_shapes, shipped_models
from mmrl.types import UserError

# Source: `safetensors.total` of each model on huggingface.co.
PUBLISHED_PARAMETERS = {
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen/Qwen2.5-VL-72B-Instruct": 73_410_777_344,
    "Qwen/Qwen3-VL-2B-Instruct": 2_127_532_032,
    "Qwen/Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
}


class _Config:
    def __init__(self, path):
        self.model = ModelConfig(path=path)


@pytest.mark.parametrize("path", PUBLISHED_PARAMETERS)
def test_parameters_are_the_published_ones(path):
    family, shapes = read_shapes(_Config(path))
    model = build_meta_model(family, shapes, "bfloat16")
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED_PARAMETERS[path]


def test_every_shipped_model_names_its_source():
    folder = Path(measuring.__file__).parent / "models"
    assert len(shipped_models()) == len(list(folder.glob("*.json"))) >= 15
    for file in folder.glob("*.json"):
        assert "config.json of Qwen/" in json.loads(file.read_text())["source"]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [(), ("vision", "language")], ids=["kept", "recomputed"])
@pytest.mark.parametrize("path", ["Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen3-VL-4B-Instruct"])
def test_line_through_two_depths_is_the_whole_model(monkeypatch, path, recompute):
    family, shapes = read_shapes(_Config(path))
    shapes = measuring.trim_shapes(shapes, 12, shapes.vision_config.depth)
    shapes.vision_config.depth = 10
    options = LearnerOptions(model=ModelConfig(path=path, gradient_checkpointing=recompute), freeze=())
    batch_shape = MicroBatchShape(num_groups=2, text_tokens=50, grids=((1, 16, 16),), responses=(64, 30))
    extrapolated = measure(family, shapes, options, batch_shape)
    monkeypatch.setattr(measuring, "_LANGUAGE_DEPTHS", (12, 12))
    monkeypatch.setattr(measuring, "_VISION_DEPTHS", (10, 10))
    whole = measure(family, shapes, options, batch_shape)
    assert extrapolated.total_flops() == pytest.approx(whole.total_flops(), rel=1e-3)
    assert extrapolated.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.02)


def test_unknown_model_and_gpu_are_refused_with_those_that_are_known(tmp_path):
    with pytest.raises(UserError, match="shapes come with mmrl"):
        read_shapes(_Config("Qwen/Qwen9-VL-3B"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UserError, match="'llama' model; a plan knows qwen2_vl"):
        read_shapes(_Config(str(tmp_path)))
    with pytest.raises(UserError, match="--gpu b300: unknown; known are a100-40gb"):
        find_gpu("b300")

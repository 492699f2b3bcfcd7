"""vLLM in the learner's process, on the learner's CUDA device: they take turns with its memory, and they agree."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from videos import write_video

EQUIVALENCE = Path(__file__).parents[1] / "equivalence"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install -e '.[vllm]'"),
]


def test_sleeping_engine_frees_its_memory_and_wakes_to_new_weights(make_tiny, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EQUIVALENCE)
    from vllm_scenes import facts, questions, start

    clip = write_video(tmp_path / "clip.mp4", range(91), size=(64, 32))
    process = start({"in_process": questions(make_tiny(), "qwen2_5_vl", clip, tmp_path)}, tmp_path)
    found = facts(process, tmp_path)["in_process"]
    assert found["freed bytes"] > 2**30
    assert min(found["gaps with old weights"].values()) > 0.01
    assert max(found["gaps"].values()) < 0.05 and max(found["gaps after sync"].values()) < 0.05

"""The commands that the documents show are run, or checked as far as they can be without a GPU and a model hub."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmrl.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_config_of_the_page_about_own_data_passes_the_check_of_data(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "train_on_my_data.md").read_text()
    [row], [config] = (re.findall(rf"```{language}\n(.*?)```", page, re.S) for language in ("json", "yaml"))
    (tmp_path / "bottles.yaml").write_text(config)
    (tmp_path / "shelf").mkdir()
    noise = np.random.default_rng(0)
    for split, size in {"train": 16, "held_out": 4}.items():
        lines = []
        for index in range(size):
            image = f"shelf/{split}-{index}.jpg"
            Image.fromarray(noise.integers(0, 255, (56, 56, 3), dtype=np.uint8)).save(tmp_path / image)
            lines.append(json.dumps(json.loads(row) | {"image": image, "count": index % 4}))
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    code = main(["data", "check", "bottles.yaml", "model.path=null", "model.from_scratch={}"])
    text = capsys.readouterr().out
    assert code == 0, text
    assert "bottles: 0 errors" in text

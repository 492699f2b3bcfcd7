"""Search of pages by an encoder of their pictures, against transformers' similarity of a small CLIP from scratch."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from factories import make_sample
from PIL import Image
from tiny_clip import write_clip

from mmrl.rollout.environments.encoded_pages import index_file, make, write_index
from mmrl.types import AnswerType, Unscorable, UserError

WORDS = ("red", "green", "blue", "page", "of")
COLOURS = {"red": (200, 20, 10), "green": (10, 180, 60), "blue": (20, 30, 220), "white": (255, 255, 255)}
SAMPLE = make_sample("52", AnswerType.TEXT, task="pages", parts=("Which?",), meta={"pages": ["green"]})


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> str:
    return str(write_clip(tmp_path_factory.mktemp("clip"), WORDS))


@pytest.fixture
def table(tmp_path) -> Path:
    for name, colour in COLOURS.items():
        pixels = np.full((40, 60, 3), 255, dtype=np.uint8)
        pixels[5:30, 10 : 20 + 8 * len(name)] = colour
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    rows = [{"id": name, "path": f"{name}.png"} for name in COLOURS]
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "pages.jsonl"


def shown_pages(table: Path, encoder: str, words: str, **options: int) -> list[tuple[str, float]]:
    """Search for the same words until nothing is left; return the pages with their relevance."""
    environment = make(corpus=str(table), encoder=encoder, **options)
    environment.reset(SAMPLE, 0)
    found = []
    while (result := environment.step(f"<search>{words}</search>")).observation.media:
        found.append((Path(result.observation.media[0].path).stem, result.info["relevant"]))
    return found


@pytest.mark.parametrize("words", ["red page", "blue", "page of green of green of green of green"])
def test_pages_come_in_the_order_of_the_model_s_own_similarity(table, encoder, words):
    import torch
    from transformers import AutoModel, AutoProcessor

    write_index(table, encoder)
    model, processor = AutoModel.from_pretrained(encoder).eval(), AutoProcessor.from_pretrained(encoder)
    pictures = [Image.open(table.with_name(f"{name}.png")).convert("RGB") for name in COLOURS]
    inputs = processor(text=[words], images=pictures, return_tensors="pt", truncation=True, max_length=8)
    with torch.inference_mode():
        similarities = model(**inputs).logits_per_text[0]
    expected = [list(COLOURS)[index] for index in similarities.argsort(descending=True)]
    assert shown_pages(table, encoder, words) == [(name, float(name == "green")) for name in expected]
    assert shown_pages(table, encoder, words, top_k=2) == [(name, float(name == "green")) for name in expected[:2]]


def test_index_belongs_to_a_table_and_an_encoder(table, encoder, tmp_path_factory, monkeypatch, capsys):
    with pytest.raises(UserError, match=r"no index of these pages .*`python -m mmrl\.rollout.* writes pages\."):
        make(corpus=str(table), encoder=encoder)
    monkeypatch.setattr(sys, "argv", ["encoded_pages", str(table), encoder])
    runpy.run_module("mmrl.rollout.environments.encoded_pages", run_name="__main__")
    file = Path(capsys.readouterr().out.strip())
    assert file == index_file(table, encoder) and np.load(file).shape == (4, 8)
    first = file.read_bytes()
    assert write_index(table, encoder).read_bytes() == first
    other = str(write_clip(tmp_path_factory.mktemp("clip"), [*WORDS, "other"]))
    assert index_file(table, other) != file
    table.write_text(table.read_text() + "\n")
    with pytest.raises(UserError, match="no index"):
        make(corpus=str(table), encoder=encoder)


def test_what_cannot_be_embedded_is_named(table, encoder, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="nowhere: cannot be read"):
        write_index(table, str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(Unscorable, match="no model in"):
        write_index(table, str(tmp_path / "empty"))
    (tmp_path / "red.png").write_bytes(b"no picture")
    monkeypatch.setattr(sys, "argv", ["encoded_pages", str(table), encoder])
    with pytest.raises(SystemExit, match=r"error: .*red\.png"):
        runpy.run_module("mmrl.rollout.environments.encoded_pages", run_name="__main__")
    assert not index_file(table, encoder).exists()
    with pytest.raises(UserError, match="cannot be read"):
        write_index(tmp_path / "missing.jsonl", encoder)

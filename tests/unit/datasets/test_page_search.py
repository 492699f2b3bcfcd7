"""Search that shows pages: what is found, what was seen, parts of pages, and episodes played by the step."""

import json
import random
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from math import log
from pathlib import Path

import pytest
from factories import make_sample
from PIL import Image, ImageDraw
from samplers import make_pipeline
from tool_calls import responses

from mmrl.config.schema import EnvironmentConfig
from mmrl.rollout.tools.executor import ToolRunner
from mmrl.types import LAST_MEDIUM, AnswerType, ImageCrop, RolloutBatch, Unscorable, UserError
from mmrl.utils.observations import check_step_result
from mmrl_datasets.environments.pages import make

pytest.importorskip("rank_bm25")

TEXTS = {
    "invoice": "Invoice 37 total 52 euro",
    "menu": "Soup of the day, bread and butter",
    "letter": "Dear Anna, the invoice is paid. Anna, thank you",
}
META = {"pages": ["invoice"], "queries": ["invoice total"]}
SAMPLE = make_sample("52", AnswerType.TEXT, task="pages", parts=("What does the invoice say?",), meta=META)


def write_corpus(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    lines = []
    for number, (name, text) in enumerate(TEXTS.items()):
        page = Image.new("RGB", (120, 160), (255 - 40 * number, 255, 255))
        ImageDraw.Draw(page).text((8, 8), text, fill=(0, 0, 0))
        page.save(folder / f"{name}.png")
        lines.append(json.dumps({"id": name, "path": f"{name}.png", "text": text}) + "\n")
    (folder / "pages.jsonl").write_text("".join(lines))
    return folder / "pages.jsonl"


@pytest.fixture
def search(tmp_path):
    environment = make(corpus=str(write_corpus(tmp_path / "corpus")))
    environment.reset(SAMPLE, 0)
    return lambda action: check_step_result(environment.step(action))


def test_each_search_shows_the_best_page_that_was_not_seen(search):
    first = search("<think>I <search>need</search> it.</think><search>the Invoice total</search>")
    assert Path(first.observation.media[0].path).name == "invoice.png" and first.info == {"relevant": 1.0}
    again = search("<search>the Invoice total</search>")
    assert Path(again.observation.media[0].path).name == "letter.png" and again.info == {"relevant": 0.0}
    assert again.observation.state == "invoice, letter"
    menu = search("<search>the invoice</search>")  # of the words of the menu, "the" is one
    assert Path(menu.observation.media[0].path).name == "menu.png"
    none = search("<search>the invoice</search>")
    assert none.observation.text == "No further page fits these words." and not none.observation.media
    assert none.valid and none.info == {}
    assert search("<search>zebra</search>").observation.media == ()


def test_a_part_is_of_the_picture_shown_last(search):
    assert search("<bbox>[1, 2, 30, 40.5]</bbox>").observation.media == (
        ImageCrop(medium_number=LAST_MEDIUM, box=(1.0, 2.0, 30.0, 40.5)),
    )


@pytest.mark.parametrize(
    "action",
    [
        "I do not know",
        "<search>a</search><answer>b</answer>",
        "<bbox>[1, 2, 3]</bbox>",
        "<bbox>left</bbox>",
        "<bbox>1</bbox>",
        "<bbox>[1e999, 1, 2, 3]</bbox>",
        "<bbox>[Infinity, 1, 2, 3]</bbox>",
        "<bbox>[true, 1, 2, 3]</bbox>",
        "<bbox>" + "[" * 100_000 + "</bbox>",
        "<search>never closed",
    ],
)
def test_text_without_an_action_gets_a_message_and_changes_nothing(search, action):
    result = search(action)
    assert not result.valid and result.observation.text and not result.terminated
    assert result.observation.state == "no page"


def test_an_answer_ends_the_episode_and_tells_whether_there_was_a_search(search):
    search("<bbox>[1, 2, 30, 40]</bbox>")
    at_once = search("<answer>52</answer>")
    assert at_once.terminated and at_once.info == {"searched": 0.0}
    search("<search>zebra</search>")
    assert search("<answer>52</answer>").info == {"searched": 1.0}


RELEVANT = """{% for page in meta_info.reference_page %}{{ meta_info.file_name | replace('.pdf', '') }}_{{ page }}
{% endfor %}"""
"""The ids of VRAG-RL's rag_dataset.json, as its reward manager puts them together (rm.py at commit 24f8d05)."""


def test_relevant_pages_may_come_from_a_template(tmp_path):
    pages = [{"id": f"a.b_{number}", "path": "x.png", "text": f"page {number}"} for number in (1, 2, 12)]
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps(page) + "\n" for page in pages))
    Image.new("RGB", (8, 8)).save(tmp_path / "x.png")
    row = {"meta_info": {"file_name": "a.b.pdf", "reference_page": [2, 12]}, "query": "page 12"}
    environment = make(corpus=str(tmp_path / "pages.jsonl"), relevant=RELEVANT)
    environment.reset(replace(SAMPLE, meta=row), 0)
    found = [environment.step(f"<search>{words}</search>").info["relevant"] for words in ("12", "1", "2")]
    assert found == [1.0, 0.0, 1.0]
    # Without the column `queries`, the expert searches for the question.
    assert environment.expert() == "<search>page 12</search>"
    assert environment.expert() == "<answer>52</answer>"
    other = {"meta_info": {"file_name": "a.b.pdf", "reference_page": [3]}}
    with pytest.raises(Unscorable, match=r"must be a list of ids of pages of the corpus, not \['a.b_3'"):
        environment.reset(replace(SAMPLE, meta=other), 0)
    with pytest.raises(UserError, match="relevant: .* is not a template"):
        make(corpus=str(tmp_path / "pages.jsonl"), relevant="{{ broken")


def test_expert_searches_and_answers(tmp_path):
    environment = make(corpus=str(write_corpus(tmp_path / "corpus")))
    environment.reset(SAMPLE, 0)
    assert environment.expert() == "<search>invoice total</search>"
    assert environment.expert() == "<answer>52</answer>"


def test_ranking_is_bm25(tmp_path):
    """Against the formula of Robertson and others, with the floor that rank-bm25 gives to frequent words."""
    rng = random.Random(0)
    words = [f"w{number}" for number in range(12)]
    documents = [[rng.choice(words) for _ in range(rng.randint(3, 12))] for _ in range(9)]
    lines = [json.dumps({"id": str(n), "path": "x.png", "text": " ".join(d)}) for n, d in enumerate(documents)]
    (tmp_path / "pages.jsonl").write_text("\n".join(lines))
    rank = make(corpus=str(tmp_path / "pages.jsonl")).rank
    mean = sum(map(len, documents)) / len(documents)
    idf = {}
    for word in {word for document in documents for word in document}:
        n = sum(word in document for document in documents)
        idf[word] = log(len(documents) - n + 0.5) - log(n + 0.5)
    floor = 0.25 * sum(idf.values()) / len(idf)
    idf = {word: floor if value < 0 else value for word, value in idf.items()}

    def score(document, query):
        total = 0.0
        for word in query:
            count = document.count(word)
            total += idf.get(word, 0.0) * count * 2.5 / (count + 1.5 * (0.25 + 0.75 * len(document) / mean))
        return total

    for _ in range(30):
        query = rng.sample(words, 2)
        found = rank(" ".join(query))
        assert set(found) == {n for n, document in enumerate(documents) if set(query) & set(document)}
        scores = [score(documents[page], query) for page in found]
        assert all(a >= b - 1e-9 for a, b in pairwise(scores))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"pages\.jsonl: no such file"),
        ("", "no page has a text"),
        ("{}\n", r"pages\.jsonl:1: a page needs id and path"),
        ("x", r"pages\.jsonl:1: .* not a line of JSON"),
        ('{"id": 1, "path": "x"}\n{"id": "1", "path": "y"}\n', r"pages\.jsonl:2: two pages have the id '1'"),
    ],
)
def test_damaged_corpus_is_named(tmp_path, content, message):
    table = tmp_path / "pages.jsonl"
    if content is not None:
        table.write_text(content)
    with pytest.raises(UserError, match=message):
        make(corpus=str(table))


def test_step_shows_pages_and_parts_of_their_files(tiny):
    """The part is cut from the file; one that is not there is told to the model; a page outside the roots fails."""
    root = Path(tiny.samples[0].images[0].path).parent
    batch = responses(
        tiny, "<search>invoice total</search>", "<bbox>[400, 400, 500, 500]</bbox>", "<answer>52</answer>"
    )
    group = [replace(rollout, index=index) for index, rollout in enumerate(batch.groups[0])]

    def play(table, turns):
        config = EnvironmentConfig(
            kind="environment", fn="mmrl_datasets.environments.pages:make", args={"corpus": str(table)}, turns=turns
        )
        with closing(ToolRunner(Path(), pictures_dir=root / "frames")) as runner:
            step = make_pipeline(tiny, config, tool_runner=runner).steps[0]
            return step(RolloutBatch(groups=(tuple(group),)), step=0).groups[0]

    table = write_corpus(root / "corpus")
    searched, looked, answered = play(table, 2)
    (shown,) = searched.observations
    assert Path(shown.ref.path).name == "invoice.png"
    assert not looked.turns[0].valid and looked.failure is None and not looked.observations
    assert answered.turns[0].terminated
    outside = table.with_name("outside.jsonl")
    outside.write_text(json.dumps({"id": "x", "path": "/etc/hostname", "text": "invoice total"}) + "\n")
    failed = play(outside, 2)[0]
    assert failed.failure is not None and "hostname" in failed.failure.reason

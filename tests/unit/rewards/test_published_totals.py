"""Published totals by the terms of the recipes themselves: what a response earns as `mmrl train NAME` scores it."""

from dataclasses import replace

import pytest
from factories import make_sample
from scoring import recipe_totals
from serving import judging, served

from mmrl.types import AnswerType, FinishReason, Turn


@pytest.fixture(scope="module")
def total():
    with recipe_totals() as total:
        yield total


@pytest.mark.parametrize(
    ("waits", "box", "rethought", "expected"),
    [
        (0, 3, False, 1.0),
        (1, 3, False, 1.1),
        (2, 3, False, 1.1),
        (3, 3, False, 0.4),
        (5, 3, False, 0.0),
        (6, 3, False, -0.1),
        (9, 3, False, -0.1),
        (0, 3, True, 1.0),
        (2, 3, True, 1.0),
        (4, 3, True, 1.0),
        (0, 4, False, 0.0),
        (2, 4, False, 0.0),
        (2, 4, True, 0.0),
        (0, None, False, -0.1),
        (2, None, True, -0.1),
    ],
)
def test_vl_rethinker_pays_by_the_ladder_of_its_code(total, waits, box, rethought, expected):
    """experience_maker.py:1327-1345 at commit dd2c17d: the ladder is for responses that were not forced to rethink."""
    words = "".join(f"Wait, look at number {number} of them again. " for number in range(waits))
    text = f"There are some. {words}" + (rf"So \boxed{{{box}}}" if box else "So three.")
    parent = {"parent_index": 0} if rethought else {}
    sample = make_sample("3", AnswerType.LATEX, task="maths")
    assert total("vl_rethinker", text, sample, **parent) == pytest.approx(expected)


@pytest.mark.parametrize("words", ["So ", "Wait, look again. So "])
@pytest.mark.parametrize("answer", [r"\boxed{3}", r"\boxed{4}", "three."])
def test_vl_rethinker_fines_a_response_that_was_cut_once_whatever_it_answers(total, words, answer):
    """experience_maker.py:769 at commit dd2c17d: without an end token, a response is invalid and earns -0.1."""
    sample = make_sample("3", AnswerType.LATEX, task="maths")
    assert total("vl_rethinker", words + answer, sample, finish_reason=FinishReason.LENGTH) == pytest.approx(-0.1)


SEARCH = Turn(action="<search>a</search>", state="", info={"relevant": 0.0})
FOUND = Turn(action="<search>b</search>", state="", info={"relevant": 1.0})
LOOK = Turn(action="<bbox>[1, 2, 3, 4]</bbox>", state="")


@pytest.mark.parametrize(
    ("turns", "opinion", "expected"),
    [
        ((FOUND, LOOK), 1, 1.0),
        ((SEARCH, FOUND), 1, 0.8 + 0.2 * 0.63093),
        ((SEARCH, SEARCH, FOUND), 1, 0.9),  # NDCG 1 / log2(4)
        ((SEARCH, SEARCH, FOUND), 0, 0.2),
        ((), 1, 0.0),
        ((LOOK,), 1, 0.0),
    ],
)
def test_vrag_pays_nothing_without_a_search(total, turns, opinion, expected):
    """rm.py at commit 24f8d05: 0.7 judge + 0.1 format + 0.2 NDCG, if the format has a search and an answer."""
    searched = float(any("relevant" in turn.info for turn in turns))
    last = Turn(action="<answer>52</answer>", state="", terminated=True, info={"searched": searched})
    meta = {"meta_info": {"file_name": "a.pdf", "reference_page": [5]}}
    sample = make_sample("52 euro", AnswerType.TEXT, task="pages", meta=meta)
    with served(judging(lambda _: {"score": opinion})) as (url, _):
        judge = f"rewards.terms.accuracy.args.judge.url={url}"
        got = total("vrag_rl", "<answer>52</answer>", sample, judge, turns=(*turns, last))
    assert got == pytest.approx(expected, abs=1e-5)


def test_an_episode_of_vrag_that_a_limit_cut_short_earns_nothing(total):
    sample = make_sample("52", AnswerType.TEXT, task="pages", meta={"meta_info": {"reference_page": [5]}})
    assert total("vrag_rl", "<search>a</search>", sample, turns=(replace(FOUND, truncated=True),)) == 0.0

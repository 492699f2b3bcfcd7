"""Text, OCR, table, ranking and length rewards against textbook recursions and other libraries; hostile text."""

import itertools
import math
import random
import unicodedata
from statistics import mean

import pytest
from apted import APTED, Config
from factories import make_answer, make_response, make_sample
from sacrebleu.metrics import BLEU
from sklearn.metrics import ndcg_score
from waiting import bounded

from mmrl.scoring.registry import builtin_rewards
from mmrl.types import AnswerType, RewardValue, Unscorable, UserError
from mmrl_rewards import length, ocr, ranking, strings, table, text

HERE = tuple(f"{module.__name__}:" for module in (ocr, table, text))
TEXTUAL = {
    name: fn
    for name, fn in builtin_rewards().items()
    if fn.answer_types == (AnswerType.TEXT,) and name.startswith(HERE)
}
PAYING_RIGHT = [length.cosine, length.brevity, length.window]
TABLE = "<table><tr><td>tea</td><td>2</td></tr></table>"


def score(reward, kind, target, answer, *, tokens=0, meta=None, **options):
    """Return the reward of a parsed answer; None stands for a response without an answer."""
    response = make_response(answer if isinstance(answer, str) else "", make_answer(answer), num_tokens=tokens)
    term = reward(response, make_sample(target, kind, meta=meta or {}), **options)
    assert isinstance(term, RewardValue)
    assert reward.low <= term.value <= reward.high
    assert 0 < len(term.reason) < 250
    return term.value


def of_text(reward, target, answer, **more):
    return score(reward, AnswerType.TEXT, target, answer, **more)


def edits(a, b):
    """Levenshtein's distance as its definition has it."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        rows.append([i])
        for j, y in enumerate(b, 1):
            rows[i].append(min(rows[i - 1][j] + 1, rows[i][j - 1] + 1, rows[i - 1][j - 1] + (x != y)))
    return rows[-1][-1]


def test_error_rates_and_anls_equal_the_textbook_distance():
    rng = random.Random(0)
    for _ in range(200):
        a, b = (
            " ".join("".join(rng.choices("abAé", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 25))) for _ in "ab"
        )
        assert of_text(ocr.cer, b, a) == pytest.approx(max(0, 1 - edits(a, b) / len(b)))
        assert of_text(ocr.wer, b, a) == pytest.approx(max(0, 1 - edits(a.split(), b.split()) / len(b.split())))
        a, b = a.lower(), b.lower()
        nl = edits(a, b) / max(len(a), len(b))
        assert of_text(ocr.anls, b, a) == pytest.approx(1 - nl if nl < 0.5 else 0)
        assert of_text(ocr.anls, b, a, threshold=1.0) == pytest.approx(1 - nl)
        assert of_text(ocr.cer, b, a.upper(), ignore_case=True) == of_text(ocr.cer, b, a)


def subsequence(a, b):
    """Length of the longest common subsequence, by recursion on the last words."""
    if not a or not b:
        return 0
    if a[-1] == b[-1]:
        return 1 + subsequence(a[:-1], b[:-1])
    return max(subsequence(a[:-1], b), subsequence(a, b[:-1]))


def overlap(a, b, n):
    """Count the n-grams that both have in common, each as often as it occurs in both."""
    left = [b[i : i + n] for i in range(len(b) - n + 1)]
    found = 0
    for i in range(len(a) - n + 1):
        if a[i : i + n] in left:
            left.remove(a[i : i + n])
            found += 1
    return found


def sentence(rng, most=7, least=1):
    return rng.choices(["cat", "dog", "the", "a", "4"], k=rng.randint(least, most))


def test_rouge_equals_counting():
    rng = random.Random(1)
    for _ in range(300):
        a, b = sentence(rng), sentence(rng, least=2)
        of = {variant: of_text(text.rouge, " ".join(b), " ".join(a), variant=variant) for variant in ("1", "2", "L")}
        assert of["1"] == pytest.approx(2 * overlap(a, b, 1) / (len(a) + len(b)))
        assert of["2"] == pytest.approx(2 * overlap(a, b, 2) / (len(a) + len(b) - 2))
        assert of["L"] == pytest.approx(2 * subsequence(a, b) / (len(a) + len(b)))


def test_bleu_equals_its_formula_where_nothing_is_smoothed():
    rng = random.Random(2)
    compared = 0
    while compared < 100:
        a, b = sentence(rng, 12, 4), sentence(rng, 12, 4)
        precisions = [overlap(a, b, n) / (len(a) - n + 1) for n in (1, 2)]
        if 0 in precisions:
            continue
        compared += 1
        brevity = min(1.0, math.exp(1 - len(b) / len(a)))
        expected = brevity * math.sqrt(precisions[0] * precisions[1])
        assert of_text(text.bleu, " ".join(b), " ".join(a), order=2) == pytest.approx(expected)


def test_bleu_of_several_targets_is_sacrebleus():
    targets = ["the cat is on the mat", "there is a cat on the mat"]
    answer = "the the cat on the mat"
    expected = BLEU(effective_order=True).sentence_score(answer, targets).score / 100
    got = of_text(text.bleu, targets[0], answer, meta={"more": targets[1:]}, column="more")
    assert got == pytest.approx(expected)
    assert got > of_text(text.bleu, targets[0], answer)


def test_chrf_equals_its_formula():
    rng = random.Random(3)
    for _ in range(200):
        a, b = ("".join(rng.choices("abc", k=rng.randint(6, 15))) for _ in "ab")
        shared = [overlap(a, b, n) for n in range(1, 7)]
        precision = mean(found / (len(a) - n) for n, found in enumerate(shared))
        recall = mean(found / (len(b) - n) for n, found in enumerate(shared))
        expected = 5 * precision * recall / (4 * precision + recall) if shared[0] else 0
        assert of_text(text.chrf, b, a) == pytest.approx(expected)


def test_repetition_equals_counting_runs():
    rng = random.Random(4)
    for _ in range(200):
        words, order = sentence(rng, 20), rng.randint(1, 4)
        runs = [tuple(words[i : i + order]) for i in range(len(words) - order + 1)]
        expected = len(set(runs)) / len(runs) - 1 if runs else 0
        assert score(text.repetition, AnswerType.TEXT, "x", " ".join(words), order=order) == pytest.approx(expected)


def test_fields_equal_counting_pairs():
    rng = random.Random(5)
    for _ in range(200):
        a, b = ({key: rng.choice(["x", "y", 1]) for key in rng.sample("abcdef", rng.randint(1, 6))} for _ in "ab")
        expected = 2 * len(a.items() & b.items()) / (len(a) + len(b))
        assert score(ocr.fields, AnswerType.JSON, b, a) == pytest.approx(expected)


class Node:
    def __init__(self, tag, cell=None, children=()):
        self.tag, self.cell, self.children = tag, cell, list(children)


class Costs(Config):
    """As in the published code of TEDS."""

    valuecls = float

    def rename(self, a, b):
        if a.tag != b.tag or (a.cell or ())[1:] != (b.cell or ())[1:]:
            return 1.0
        if a.tag != "td":
            return 0.0
        return edits(a.cell.text, b.cell.text) / max(len(a.cell.text), len(b.cell.text), 1)


def tree(source):
    return Node("table", children=[Node("tr", children=[Node("td", cell) for cell in row]) for row in source.rows])


def random_table(rng, rows=5, columns=4):
    def cell():
        return table.TableCell("".join(rng.choices("ab", k=rng.randint(0, 4))), rng.choice([1, 1, 1, 2]))

    return table.ParsedTable(
        tuple(tuple(cell() for _ in range(rng.randint(1, columns))) for _ in range(rng.randint(1, rows)))
    )


def test_distance_of_tables_equals_apted():
    rng = random.Random(6)
    for _ in range(150):
        a, b = random_table(rng), random_table(rng)
        expected = APTED(tree(a), tree(b), Costs()).compute_edit_distance()
        assert table.tree_edit_distance(a, b) == pytest.approx(expected)
        assert table.tree_edit_distance(b, a) == pytest.approx(expected)
        assert table.tree_edit_distance(a, b, structure_only=True) <= expected + 1e-9
        assert table.tree_edit_distance(a, a) == 0


def html_of(source):
    rows = "".join(
        "".join(f"<td colspan={c.colspan}>{c.text}</td>" for c in row).join(["<tr>", "</tr>"]) for row in source.rows
    )
    return f"<table>{rows}</table>"


def test_teds_is_the_share_of_nodes_that_need_no_edit():
    rng = random.Random(7)
    for _ in range(100):
        a, b = random_table(rng), random_table(rng)
        assert table.parse_table(html_of(a)) == a
        expected = 1 - APTED(tree(a), tree(b), Costs()).compute_edit_distance() / max(a.num_nodes, b.num_nodes)
        got = of_text(table.teds, html_of(b), html_of(a))
        assert got == pytest.approx(0 if a.num_nodes > 2 * b.num_nodes else max(0, expected))


def test_a_large_table_takes_bounded_time():
    def grid(rows, columns, shift):
        cells = [[str(shift + row * columns + column) for column in range(columns)] for row in range(rows)]
        return "<table>" + "".join("<tr><td>" + "<td>".join(row) + "</tr>" for row in cells) + "</table>"

    with bounded():
        assert 0 < of_text(table.teds, grid(40, 9, 0), grid(40, 9, 1)) < 1
        assert of_text(table.teds, grid(40, 9, 0), grid(400, 9, 1)) == 0


def test_cer_of_long_texts_takes_bounded_time():
    for answer in ("ba" * 10_000, "x" * 1_000_000):
        with bounded():
            of_text(ocr.cer, "ab" * 10_000, answer)


@pytest.mark.parametrize(
    "source",
    [
        *("", "<", "<>", "<!--", "<![CDATA[", "<!DOCTYPE", "<?xml version='1.0' encoding='x'?>", "|", "|-|\n|-|\n|"),
        *("a|b\n-|-|-\nc", "<td>" * 5000, "<table><tr><td>" * 5000, "|" * 5000 + "\n" + "|-" * 5000, "</td></table>"),
    ],
)
def test_reading_a_table_gives_a_table_or_says_why(source):
    try:
        found = table.parse_table(source)
    except ValueError as error:
        assert 0 < len(str(error)) < 80
    else:
        assert found.num_nodes >= 2


NAMES = [f"p{number}" for number in range(8)]


def test_rankings_equal_scikit_learn_and_counting():
    rng = random.Random(8)
    for _ in range(200):
        relevant, answer = rng.sample(NAMES, rng.randint(1, 4)), rng.sample(NAMES, len(NAMES))
        k = rng.randint(1, len(NAMES))
        truth = [[float(name in relevant) for name in NAMES]]
        given = [[-float(answer.index(name)) for name in NAMES]]
        assert score(ranking.ndcg, AnswerType.LIST, relevant, answer, k=k) == pytest.approx(
            ndcg_score(truth, given, k=k)
        )
        first = min(answer.index(name) for name in relevant) + 1
        assert score(ranking.mrr, AnswerType.LIST, relevant, answer, k=k) == (1 / first if first <= k else 0)
        found = len(set(answer[:k]) & set(relevant)) / len(relevant)
        assert score(ranking.recall, AnswerType.LIST, relevant, answer, k=k) == pytest.approx(found)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_permutation_earns_what_it_has_above_the_mean_of_all_orders(size):
    orders = list(itertools.permutations(range(1, size + 1)))
    target = orders[len(orders) // 2]
    gains = [[float(size - 1 - target.index(item)) for item in range(1, size + 1)]]
    for k in range(1, size + 1):
        plain = [
            (ranking.ndcg, [ndcg_score(gains, [[-o.index(i) for i in range(1, size + 1)]], k=k) for o in orders]),
            (ranking.mrr, [1 / (o.index(target[0]) + 1) * (o.index(target[0]) < k) for o in orders]),
            (ranking.recall, [len(set(o[:k]) & set(target[:k])) / k for o in orders]),
        ]
        for reward, values in plain[: 2 if k == size else 3]:
            chance = mean(values)
            for order, value in zip(orders, values, strict=True):
                got = score(reward, AnswerType.PERMUTATION, target, order, k=k)
                assert got == pytest.approx(max(0, (value - chance) / (1 - chance)), abs=1e-9)


@pytest.mark.parametrize("reward", PAYING_RIGHT)
def test_no_length_lifts_a_wrong_answer_above_a_right_one(reward):
    lengths = [0, 1, 319, 320, 400, 512, 513, 1024, 2048, 10**7]
    for floor in (0.0, 0.1, 0.9):
        right = [score(reward, AnswerType.NUMBER, 3, 3, tokens=tokens, floor=floor) for tokens in lengths]
        wrong = [
            score(reward, AnswerType.NUMBER, 3, answer, tokens=n, floor=floor) for n in lengths for answer in (4, None)
        ]
        assert max(wrong) == 0
        assert min(right) == pytest.approx(floor)
        assert max(right) == 1
        if reward is not length.window:
            assert right == sorted(right, reverse=True)


def test_the_penalties_fall_with_the_length():
    tokens = range(0, 25_000, 500)
    fines = [score(length.overlong, AnswerType.NUMBER, 3, 3, tokens=n) for n in tokens]
    assert fines == sorted(fines, reverse=True)
    hill = [score(length.surrogate, AnswerType.NUMBER, 3, 3, tokens=n, max_tokens=24_500) for n in tokens]
    top = hill.index(max(hill))
    assert hill[: top + 1] == sorted(hill[: top + 1])
    assert hill[top:] == sorted(hill[top:], reverse=True)
    assert (hill[0], hill[-1]) == (0, -1)


def test_an_empty_window_is_refused():
    with pytest.raises(UserError, match="no length lies between least = 9 and most = 5"):
        score(length.window, AnswerType.NUMBER, 3, 3, least=9, most=5)


HOSTILE = {
    "nothing": None,
    "control characters": "\x00\x01\x1b[2J\x7f",
    "lone surrogates": "\ud800 tea \udfff",
    "10 MB": "ab " * (10_000_000 // 3),
    "10 MB of one word": "a" * 10_000_000,
    "combining marks": "a" + "\u0301\u0323" * 500_000,
    "a ligature that grows": "\ufdfa" * 100_000,
    "nan": "NaN",
    "right to left": "\u202e\u202d",
    "tags": "<table><tr><td>" * 10_000,
}


@pytest.mark.parametrize("reward", TEXTUAL.values(), ids=TEXTUAL)
@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_no_answer_raises_or_takes_long(reward, answer):
    target = TABLE if reward is table.teds else "Goods received in Zürich"
    with bounded():
        assert of_text(reward, target, answer) < 0.3


def test_a_lone_surrogate_is_one_character():
    assert of_text(ocr.cer, "kitten", "kit\ud800ten") == pytest.approx(5 / 6)
    assert of_text(table.teds, TABLE, TABLE.replace("tea", "t\ud800ea")) == 1


@pytest.mark.parametrize("reward", TEXTUAL.values(), ids=TEXTUAL)
@pytest.mark.parametrize("answer", [None, "", "tea", "x" * 100_000])
def test_an_unusable_target_is_unscorable_whatever_the_answer(reward, answer):
    for target in (" \n", 7, None, ["tea"]):
        with pytest.raises(Unscorable):
            of_text(reward, target, answer)


def test_white_space_around_and_between_words_does_not_count():
    for reward in TEXTUAL.values():
        target = TABLE if reward is table.teds else "Goods received in Zürich"
        assert of_text(reward, target, f" \n{target.replace(' ', '  ')}\t") == 1


def test_normalising_in_pieces_is_normalising():
    rng = random.Random(9)
    for _ in range(300):
        made = "".join(rng.choices(["e\u0301", "ﬁ", "①", "ｶﾞ", "x", " ", "\u3000", "\u1112\u1161\u11ab"], k=60))
        assert strings.normalize(made) == " ".join(unicodedata.normalize("NFKC", made).split())


def test_words_are_letters_and_digits_and_single_ideographs():
    assert strings.words("Don't go: 3.5 km, ＡＢ!") == ["don", "t", "go", "3", "5", "km", "ab"]
    assert strings.words("東京tower 2号") == ["東", "京", "tower", "2", "号"]
    assert strings.words("snake_case") == ["snake", "case"]
    assert strings.words("?! … —") == []

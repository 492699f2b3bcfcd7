"""Text, OCR, table, ranking, length and thinking rewards against textbook recursions and other libraries.

Values by hand, attacks and unusable targets are rows of the case tables.
"""

import itertools
import math
import random
import unicodedata
from statistics import mean

import pytest
from apted import APTED, Config
from factories import make_answer, make_response, make_sample
from sklearn.metrics import ndcg_score
from waiting import bounded

from mmrl.answer import ResponseFormat
from mmrl.scoring.registry import builtin_rewards
from mmrl.types import AnswerType, ResizeMap, Size, UserError
from mmrl_rewards import geometry, length, ocr, ranking, reasoning, strings, table, text

TEXT_REWARDS = {
    name: fn
    for name, fn in builtin_rewards().items()
    if fn.answer_types == (AnswerType.TEXT,) and name.startswith(("mmrl_rewards.ocr", "mmrl_rewards.t"))
}
SENTENCE = "Goods received in Zürich"
TABLE = "<table><tr><td>tea</td><td>2</td></tr></table>"


def value(reward, answer_type, target, answer, *, num_tokens=0, **options):
    """The reward of an answer that is parsed already; None stands for a response without one."""
    response = make_response(answer if isinstance(answer, str) else "", make_answer(answer), num_tokens=num_tokens)
    got = reward(response, make_sample(target, answer_type), **options)
    assert reward.low <= got.value <= reward.high
    assert 0 < len(got.reason) < 250
    return got.value


def of_text(reward, target, answer, **options):
    return value(reward, AnswerType.TEXT, target, answer, **options)


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
        words_a, words_b = (
            ["".join(rng.choices("abAé", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 25))] for _ in "ab"
        )
        a, b = " ".join(words_a), " ".join(words_b)
        assert of_text(ocr.cer, b, a) == pytest.approx(max(0, 1 - edits(a, b) / len(b)))
        assert of_text(ocr.wer, b, a) == pytest.approx(max(0, 1 - edits(words_a, words_b) / len(words_b)))
        distance = edits(a.lower(), b.lower()) / max(len(a), len(b))
        assert of_text(ocr.anls, b, a) == pytest.approx(1 - distance if distance < 0.5 else 0)
        assert of_text(ocr.anls, b, a, threshold=1.0) == pytest.approx(1 - distance)


def subsequence(a, b):
    """Length of the longest common subsequence, by recursion on the last words."""
    if not a or not b:
        return 0
    if a[-1] == b[-1]:
        return 1 + subsequence(a[:-1], b[:-1])
    return max(subsequence(a[:-1], b), subsequence(a, b[:-1]))


def shared_ngrams(a, b, n):
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
        common = {"1": shared_ngrams(a, b, 1), "2": shared_ngrams(a, b, 2), "L": subsequence(a, b)}
        for variant, count in common.items():
            expected = 2 * count / (len(a) + len(b) - 2 * (variant == "2"))
            assert of_text(text.rouge, " ".join(b), " ".join(a), variant=variant) == pytest.approx(expected)


def test_bleu_equals_its_formula_where_nothing_is_smoothed():
    rng = random.Random(2)
    compared = 0
    while compared < 100:
        a, b = sentence(rng, 12, 4), sentence(rng, 12, 4)
        precisions = [shared_ngrams(a, b, n) / (len(a) - n + 1) for n in (1, 2)]
        if 0 in precisions:
            continue
        compared += 1
        expected = min(1.0, math.exp(1 - len(b) / len(a))) * math.sqrt(precisions[0] * precisions[1])
        assert of_text(text.bleu, " ".join(b), " ".join(a), order=2) == pytest.approx(expected)


def test_chrf_equals_its_formula():
    rng = random.Random(3)
    for _ in range(200):
        a, b = ("".join(rng.choices("abc", k=rng.randint(6, 15))) for _ in "ab")
        shared = [shared_ngrams(a, b, n) for n in range(1, 7)]
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
        assert of_text(text.repetition, "x", " ".join(words), order=order) == pytest.approx(expected)


def test_fields_equal_counting_pairs():
    rng = random.Random(5)
    for _ in range(200):
        a, b = ({key: rng.choice(["x", "y", 1]) for key in rng.sample("abcdef", rng.randint(1, 6))} for _ in "ab")
        expected = 2 * len(a.items() & b.items()) / (len(a) + len(b))
        assert value(ocr.fields, AnswerType.JSON, b, a) == pytest.approx(expected)


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


def tree(parsed):
    return Node("table", children=[Node("tr", children=[Node("td", cell) for cell in row]) for row in parsed.rows])


def random_table(rng):
    def cell():
        return table.TableCell("".join(rng.choices("ab", k=rng.randint(0, 4))), rng.choice([1, 1, 1, 2]))

    rows = [[cell() for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 5))]
    return table.ParsedTable(tuple(map(tuple, rows)))


def html_of(parsed):
    rows = ["".join(f"<td colspan={c.colspan}>{c.text}</td>" for c in row) for row in parsed.rows]
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def test_teds_equals_apted():
    rng = random.Random(6)
    for _ in range(150):
        a, b = random_table(rng), random_table(rng)
        expected = APTED(tree(a), tree(b), Costs()).compute_edit_distance()
        assert table.tree_edit_distance(a, b) == pytest.approx(expected)
        assert table.tree_edit_distance(a, b, structure_only=True) <= expected + 1e-9
        assert table.parse_table(html_of(a)) == a
        share = 1 - expected / max(a.num_nodes, b.num_nodes)
        got = of_text(table.teds, html_of(b), html_of(a))
        assert got == pytest.approx(0 if a.num_nodes > 2 * b.num_nodes else max(0, share))


def grid(rows, columns, shift):
    cells = [[str(shift + row * columns + column) for column in range(columns)] for row in range(rows)]
    return "<table>" + "".join("<tr><td>" + "<td>".join(row) + "</tr>" for row in cells) + "</table>"


def test_large_tables_and_long_texts_are_compared_in_bounded_time():
    with bounded():
        assert 0 < of_text(table.teds, grid(40, 9, 0), grid(40, 9, 1)) < 1
        assert of_text(table.teds, grid(40, 9, 0), grid(400, 9, 1)) == 0
        for answer in ("ba" * 10_000, "x" * 1_000_000):
            of_text(ocr.cer, "ab" * 10_000, answer)


@pytest.mark.parametrize(
    "source",
    [
        *("", "<", "<>", "<!--", "<![CDATA[", "<!DOCTYPE", "<?xml version='1.0' encoding='x'?>", "|", "|-|\n|-|\n|"),
        *("a|b\n-|-|-\nc", "<td>" * 5000, "<table><tr><td>" * 5000, "|" * 5000 + "\n" + "|-" * 5000, "</td></table>"),
    ],
)
def test_reading_a_table_gives_a_table_or_a_short_error(source):
    try:
        found = table.parse_table(source)
    except ValueError as error:
        assert 0 < len(str(error)) < 80
    else:
        assert found.num_nodes >= 2


RANKINGS = (ranking.ndcg, ranking.mrr, ranking.recall)
NAMES = [f"p{number}" for number in range(8)]


def test_rankings_equal_scikit_learn_and_counting():
    rng = random.Random(8)
    for _ in range(200):
        relevant, answer = rng.sample(NAMES, rng.randint(1, 4)), rng.sample(NAMES, len(NAMES))
        k = rng.randint(1, len(NAMES))
        gains, scores = [[float(name in relevant) for name in NAMES]], [[-float(answer.index(name)) for name in NAMES]]
        first = min(answer.index(name) for name in relevant) + 1
        found = len(set(answer[:k]) & set(relevant)) / len(relevant)
        got = [value(reward, AnswerType.LIST, relevant, answer, k=k) for reward in RANKINGS]
        assert got == pytest.approx([ndcg_score(gains, scores, k=k), 1 / first if first <= k else 0, found])


def test_a_power_discounts_as_the_code_of_mm_r5_does():
    """rerank_reward of github.com/i2vec/MM-R5 at 0806019: sum of 1 / rank^3 over that of the best order."""
    rng = random.Random(9)
    for _ in range(100):
        relevant, answer = rng.sample(NAMES, rng.randint(1, 4)), rng.sample(NAMES, rng.randint(1, len(NAMES)))
        found = [1 / (answer.index(name) + 1) ** 3 for name in relevant if name in answer]
        best = [1 / rank**3 for rank in range(1, len(relevant) + 1)]
        got = value(ranking.ndcg, AnswerType.LIST, relevant, answer, k=len(NAMES), power=3)
        assert got == pytest.approx(sum(found) / sum(best))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_permutation_earns_what_it_has_above_the_mean_of_all_orders(size):
    orders = list(itertools.permutations(range(1, size + 1)))
    target = orders[len(orders) // 2]
    gains = [[float(size - 1 - target.index(item)) for item in range(1, size + 1)]]
    for k in range(1, size + 1):
        plain = [
            [ndcg_score(gains, [[-o.index(i) for i in range(1, size + 1)]], k=k) for o in orders],
            [1 / (o.index(target[0]) + 1) * (o.index(target[0]) < k) for o in orders],
            [len(set(o[:k]) & set(target[:k])) / k for o in orders],
        ]
        for reward, values in zip(RANKINGS, plain, strict=True):
            if reward is ranking.recall and k == size:
                continue  # every order has all items among its first `size`
            chance = mean(values)
            got = [value(reward, AnswerType.PERMUTATION, target, order, k=k) for order in orders]
            assert got == pytest.approx([max(0, (share - chance) / (1 - chance)) for share in values], abs=1e-9)


@pytest.mark.parametrize("reward", [length.cosine, length.brevity, length.window])
def test_no_length_lifts_a_wrong_answer_above_a_right_one(reward):
    lengths = [0, 1, 319, 320, 400, 512, 513, 1024, 2048, 10**7]
    for floor in (0.0, 0.1, 0.9):
        right, wrong, missing = (
            [value(reward, AnswerType.NUMBER, 3, answer, num_tokens=n, floor=floor) for n in lengths]
            for answer in (3, 4, None)
        )
        assert max(wrong + missing) == 0
        assert (min(right), max(right)) == (pytest.approx(floor), 1)
        if reward is not length.window:
            assert right == sorted(right, reverse=True)


def test_an_empty_window_is_refused():
    with pytest.raises(UserError, match="least = 9 and most = 5"):
        value(length.window, AnswerType.NUMBER, 3, 3, least=9, most=5)


HOSTILE = {
    "no answer": None,
    "control characters": "\x00\x01\x1b[2J\x7f",
    "lone surrogates": "\ud800 tea \udfff",
    "10 MB": "ab " * (10_000_000 // 3),
    "10 MB of one word": "a" * 10_000_000,
    "combining marks": "a" + "\u0301\u0323" * 500_000,
    "a ligature that grows": "\ufdfa" * 100_000,
    "right to left": "\u202e\u202d",
    "tags": "<table><tr><td>" * 10_000,
}


@pytest.mark.parametrize("reward", TEXT_REWARDS.values(), ids=TEXT_REWARDS)
@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_answer_earns_little_in_bounded_time(reward, answer):
    with bounded():
        assert of_text(reward, TABLE if reward is table.teds else SENTENCE, answer) < 0.3


@pytest.mark.parametrize("reward", TEXT_REWARDS.values(), ids=TEXT_REWARDS)
def test_white_space_around_and_between_words_does_not_count(reward):
    target = TABLE if reward is table.teds else SENTENCE
    assert of_text(reward, target, f" \n{target.replace(' ', '  ')}\t") == 1


def test_a_lone_surrogate_is_one_character():
    assert of_text(ocr.cer, "kitten", "kit\ud800ten") == pytest.approx(5 / 6)
    assert of_text(table.teds, TABLE, TABLE.replace("tea", "t\ud800ea")) == 1


def test_normalising_in_pieces_is_normalising():
    rng = random.Random(9)
    for _ in range(300):
        made = "".join(rng.choices(["e\u0301", "ﬁ", "①", "ｶﾞ", "x", " ", "\u3000", "\u1112\u1161\u11ab"], k=60))
        assert strings.normalize(made) == " ".join(unicodedata.normalize("NFKC", made).split())


def test_words_are_runs_of_letters_and_digits_and_single_ideographs():
    assert strings.words("Don't go: 3.5 km, ＡＢ!") == ["don", "t", "go", "3", "5", "km", "ab"]
    assert strings.words("東京tower snake_case ?! …") == ["東", "京", "tower", "snake", "case"]


def of_thought(reward, thought, count=2):
    """The reward of a response that thinks and then counts, about an image of 200 x 100 pixels."""
    written = f"<think>{thought}</think><answer>{count}</answer>"
    answer = ResponseFormat(thinking="optional").parse(written, AnswerType.NUMBER)
    response = make_response(written, answer, resize_maps=(ResizeMap(Size(200, 100), Size(200, 100)),))
    return reward(response, make_sample(2)).value


def test_more_reflections_never_earn_more_than_the_first():
    waits = [f"Wait, is number {i} really one of them?" for i in range(12)]
    earned = [of_thought(reasoning.reflection, " ".join(waits[:n])) for n in range(1, 13)]
    assert earned == sorted(earned, reverse=True)
    assert earned[-1] == -11.0


def test_boxes_of_a_thought_equal_counting():
    rng = random.Random(0)
    for _ in range(200):
        boxes = [tuple(rng.randint(-5, 210) for _ in range(4)) for _ in range(rng.randint(1, 6))]
        boxes += rng.sample(boxes, k=rng.randint(0, 1))
        count = rng.randint(1, 6)
        valid = {(x1, y1, x2, y2) for x1, y1, x2, y2 in boxes if 0 <= x1 < x2 <= 200 and 0 <= y1 < y2 <= 100}
        valid = {box for box in valid if geometry.area(box) <= 0.9 * 200 * 100}
        got = of_thought(reasoning.boxes, " and ".join(map(str, map(list, boxes))), count)
        assert got == pytest.approx(len(valid) / len(boxes) * (count == len(valid)))


@pytest.mark.parametrize("reward", [reasoning.boxes, reasoning.consistency, reasoning.reflection])
@pytest.mark.parametrize("part", ["[1, 2, 3, ", "[1,1,1,1]", "wait ", "9", "( A ", "\ud800\x00", "[" + " " * 50])
def test_a_thought_of_a_million_characters_is_read_in_bounded_time(reward, part):
    with bounded():  # quadratic time would be 10 ** 12 steps
        of_thought(reward, part * (1_000_000 // len(part)))

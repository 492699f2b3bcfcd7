"""Rewards that look: their formulas against slow ones, in every place that calls rewards, and pictures that fail."""

import hashlib
import io
import json
import os
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from factories import make_sample
from PIL import Image
from scoring import GRAMMAR, as_read, check_samples, rollout
from ssim import slow_ssim
from videos import picture, write_video

from mmrl import types
from mmrl.cli import main
from mmrl.config.schema import ScoringConfig
from mmrl.media.pixel_reader import PixelReader
from mmrl.scoring import BoundTerm, RewardError, RewardFunctionScorer, registry
from mmrl.scoring.trial import RewardTrial
from mmrl_rewards import look, pixels
from mmrl_rewards.cases import Case, load_case_table
from mmrl_rewards.contract import BadAnswer, bind

ROOT = Path(__file__).parents[3]
PICTURES = ROOT / "rewards/cases/pictures"
PX = types.CoordinateSystem.PX_ORIGINAL


def image_ref(path):
    return types.ImageRef(path=str(path), sha256=hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def box_sample(tmp_path):
    """A sample with a picture of 100 x 100 pixels and a box in it."""
    Image.fromarray(picture(0, 100, 100)).save(tmp_path / "a.png")
    parts = (image_ref(tmp_path / "a.png"), "Where?")
    return make_sample((20, 20, 60, 52), types.AnswerType.BOX, parts=parts, coordinate_system=PX)


@pytest.fixture
def make_scorer(tmp_path):
    """Build a scorer of rewards by their names; its workers end with the test."""
    scorers = []

    def make_scorer(*names, **options):
        terms = []
        for name in names:
            load = partial(registry.load_bound_reward, name, tmp_path, {})
            terms.append(BoundTerm(name=name, reward=load(), load_reward=load, options=as_read({})))
        reader = PixelReader(types.MediaPolicy(roots=(tmp_path.resolve(),)))
        scorers.append(RewardFunctionScorer(terms, ScoringConfig(**options), reader))
        return scorers[-1]

    yield make_scorer
    for scorer in scorers:
        scorer.close()


def test_likeness_against_ssim_pixel_by_pixel():
    tiles = np.asarray(Image.open(PICTURES / "tiles.png").convert("RGB"))
    row = next(case for case in load_case_table(ROOT / "rewards/cases/look_likeness.json") if case.tolerance == 0.005)
    crops = []
    for left in (40, 41):
        crop = Image.fromarray(tiles[20:35, left : left + 20])
        crops.append(np.asarray(crop.resize((32, 32), Image.Resampling.BICUBIC)))
    target, given = crops
    plain = [np.full_like(target, 255), np.broadcast_to(np.median(target, axis=(0, 1)).astype(np.uint8), target.shape)]
    blank = max(slow_ssim(page, target) for page in plain)
    expected = (slow_ssim(given, target) - blank) / (1 - blank)
    with types.use_media_opener(registry.case_media(ROOT / "rewards/cases")):
        value = bind(look.likeness, {})(*row.build()).value
    assert value == pytest.approx(expected, abs=1e-6) and row.expected == pytest.approx(expected, abs=row.tolerance)


@pytest.mark.parametrize("seed", range(20))
def test_difference_against_a_search_through_all_pixels(seed, tmp_path):
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 256, (9, 11, 3), dtype=np.uint8)
    second = np.clip(first.astype(int) + rng.integers(-20, 21, first.shape), 0, 255)
    for _ in range(2):
        second[rng.integers(9), rng.integers(11), rng.integers(3)] = 255 * (second[0, 0, 0] < 128)
    changed = []
    for y in range(9):
        for x in range(11):
            if max(abs(int(first[y, x, c]) - int(second[y, x, c])) for c in range(3)) >= 32:
                changed.append((x, y))
    xs, ys = [x for x, _ in changed], [y for _, y in changed]
    refs = []
    for name, values in (("a.png", first), ("b.png", second.astype(np.uint8))):
        Image.fromarray(values).save(tmp_path / name)
        refs.append({"file": str(tmp_path / name)})
    sample = {"answer_type": "box", "value": [0, 0, 1, 1], "coordinates": "px_original", "media": refs}
    row = {"fn": "", "sample": sample, "response": "<answer>[2, 1, 8, 7]</answer>", "expected": 0, "source": ""}
    with types.use_media_opener(PixelReader(types.MediaPolicy(roots=(tmp_path.resolve(),)))):
        case = Case.model_validate(row)
        if not changed:
            with pytest.raises(types.Unscorable, match="no pixel"):
                bind(look.difference, {})(*case.build())
            return
        value = bind(look.difference, {})(*case.build()).value
    box = {(x, y) for x in range(min(xs), max(xs) + 1) for y in range(min(ys), max(ys) + 1)}
    answer = {(x, y) for x in range(2, 8) for y in range(1, 7)}
    assert value == pytest.approx(len(box & answer) / len(box | answer))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_group_is_scored_by_what_the_picture_shows(box_sample, make_scorer, workers):
    scorer = make_scorer("look:likeness", workers=workers)
    check_samples(scorer, [box_sample], GRAMMAR)
    assert RewardTrial(scorer, GRAMMAR).check_wrong_answers([box_sample]) == []
    # The model sees the picture at half its size. A blind probe hides it from the model, not from the reward.
    hidden = replace(box_sample, parts=(replace(box_sample.images[0], corruption=types.Corruption.GREY), "Where?"))
    right = rollout("<answer>[10, 10, 30, 26]</answer>", box_sample)
    outside = rollout("<answer>[10, 10, 51, 26]</answer>", box_sample, 1)
    guess = rollout("<answer>[10, 10, 30, 26]</answer>", hidden)
    (group,) = scorer.score_groups([[right, outside]], step=0, probes=[{"grey": [guess]}])
    assert group.totals == (1.0, 0.0) and group.probes["grey"][0].total == 1.0
    assert "not within its 100x100 pixels" in group.scores[1].terms["look:likeness"].reason
    assert scorer.score_eval([right])[0].total == 1.0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_picture_that_changed_since_is_a_counted_abstention(box_sample, make_scorer, workers):
    scorer = make_scorer("look:likeness", workers=workers, on_missing_score="skip")
    Image.fromarray(picture(5, 100, 100)).save(box_sample.images[0].path)
    (group,) = scorer.score_groups([[rollout("<answer>[10, 10, 30, 26]</answer>", box_sample)]], step=0)
    failure = group.dropped[0].failures["look:likeness"]
    assert failure.kind is types.FailureKind.UNSCORABLE and "changed since it was referenced" in failure.reason
    with pytest.raises(RewardError, match="changed since it was referenced"):
        check_samples(scorer, [box_sample], GRAMMAR)


def load_term(folder, name, **options):
    """A term with the reward of this name in the file of this name."""
    load = partial(registry.load_bound_reward, f"./{name}.py:{name}", folder, {})
    return BoundTerm(name=name, reward=load(), load_reward=load, options=as_read(options))


def open_scorer(folder, term, **options):
    """A scorer of one term that sees the pictures of a folder."""
    return RewardFunctionScorer(
        [term], ScoringConfig(**options), PixelReader(types.MediaPolicy(roots=(folder.resolve(),)))
    )


def test_the_trial_knows_the_true_size_of_a_picture(tmp_path, make_scorer):
    Image.fromarray(picture(0, 64, 48)).save(tmp_path / "a.png")
    parts = (image_ref(tmp_path / "a.png"), "Where?")
    norm = types.CoordinateSystem.NORM_1000
    sample = make_sample((250, 250, 750, 750), types.AnswerType.BOX, parts=parts, coordinate_system=norm)
    scorer = make_scorer("look:likeness")
    check_samples(scorer, [sample], GRAMMAR)
    (tmp_path / "size.py").write_text(
        "from mmrl import reward\n"
        "@reward(name='size', looks=True)\n"
        "def size(response, sample) -> float:\n"
        "    assert response.resize_maps[0].original == (64, 48)\n"
        "    return 0.0\n"
    )
    with closing(open_scorer(tmp_path, load_term(tmp_path, "size"), custom_rewards="main_process")) as sized:
        check_samples(sized, [sample], GRAMMAR)


def test_nothing_is_opened_where_no_reward_asks(box_sample, make_scorer):
    os.remove(box_sample.images[0].path)
    scorer = make_scorer("box:iou")
    check_samples(scorer, [box_sample], GRAMMAR)
    assert scorer.score_eval([rollout("<answer>[10, 10, 30, 26]</answer>", box_sample)])[0].total == 1.0


def test_a_case_may_name_a_video(tmp_path, capsys):
    write_video(tmp_path / "a.mp4")
    (tmp_path / "frame.py").write_text(
        "from mmrl import AnswerType, reward\n"
        "@reward(name='frame', answer_types=(AnswerType.NUMBER,), looks=True)\n"
        "def frame(response, sample) -> float:\n"
        "    frames = sample.video_frames(0, [response.answer.value, 1.0])\n"
        "    return float((frames[0] == frames[1]).all())\n"
    )
    sample = {"answer_type": "number", "value": 1, "media": [{"type": "video", "file": "a.mp4"}]}
    rows = []
    for answer, expected in (("1", 1), ("1.05", 1), ("2", 0)):
        row = {"fn": "./frame.py:frame", "sample": sample, "response": f"<answer>{answer}</answer>"}
        rows.append(row | {"expected": expected, "source": "12 frames a second"})
    (tmp_path / "frame.json").write_text(json.dumps(rows))
    assert main(["reward", "test", str(tmp_path / "frame.json")]) == 0, capsys.readouterr().out
    rows[0]["response"] = "<answer>5</answer>"
    (tmp_path / "frame.json").write_text(json.dumps(rows))
    assert main(["reward", "test", str(tmp_path / "frame.json")]) == 1
    assert "there is nothing at 5 s; its last frame is at 3.917 s" in capsys.readouterr().out


def test_reward_try_finds_the_picture_beside_the_sample(tmp_path, capsys):
    Image.fromarray(picture(0, 64, 48)).save(tmp_path / "a.png")
    sample = {"answer_type": "box", "value": [8, 8, 40, 40], "coordinates": "px_original", "image": "a.png"}
    (tmp_path / "s.json").write_text(json.dumps(sample))
    command = ["reward", "try", "--fn", "look:likeness", "--sample", str(tmp_path / "s.json"), "--response"]
    assert main([*command, "<answer>[8, 8, 40, 40]</answer>"]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == 1.0
    os.remove(tmp_path / "a.png")
    main([*command, "<answer>[8, 8, 40, 40]</answer>"])
    assert json.loads(capsys.readouterr().out)["value"] == "unscorable"


def test_lint_asks_a_reward_that_looks_to_say_so(tmp_path, capsys):
    for name in ("look.py", "look.json", "look.png"):
        (tmp_path / name).write_bytes((ROOT / "examples" / name).read_bytes())
    assert main(["reward", "lint", f"{tmp_path}/look.py:colour"]) == 0
    assert "no files, network, clock or randomness, but media of the sample" in capsys.readouterr().out
    code = (tmp_path / "look.py").read_text()
    (tmp_path / "quiet.py").write_text(code.replace(", looks=True", ""))
    (tmp_path / "quiet.json").write_text((tmp_path / "look.json").read_text().replace("look.py", "quiet.py"))
    assert main(["reward", "lint", f"{tmp_path}/quiet.py:colour"]) == 1
    assert "FAIL  pure: uses media of the sample (declare @reward(..., looks=True))" in capsys.readouterr().out


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_that_looks_without_saying_so_is_refused_before_the_first_step(tmp_path, box_sample, workers):
    (tmp_path / "quiet.py").write_text(
        "from mmrl import reward\n"
        "@reward(name='quiet')\n"
        "def quiet(response, sample) -> float:\n"
        "    return float(sample.image(0).mean() > 300.0)\n"
    )
    term, place = load_term(tmp_path, "quiet"), "worker" if workers else "main_process"
    remedy = r"raised UserError: nothing opens media .* declares @reward\(..., looks=True\).* \(quiet.py:4\)"
    with (
        closing(open_scorer(tmp_path, term, workers=workers, custom_rewards=place)) as scorer,
        pytest.raises(RewardError, match=remedy),
    ):
        check_samples(scorer, [box_sample], GRAMMAR)


def test_crops_blame_the_sample_or_the_answer(box_sample, tmp_path):
    response, _ = Case.model_validate(
        {
            **{"fn": "", "response": "<answer>[90, 90, 110, 95]</answer>", "expected": 0, "source": ""},
            "sample": {"answer_type": "box", "value": [0, 0, 1, 1], "coordinates": "px_original", "image": [100, 100]},
        }
    ).build()
    with types.use_media_opener(PixelReader(types.MediaPolicy(roots=(tmp_path.resolve(),)))):
        assert np.array_equal(pixels.target_crop(response, box_sample), picture(0, 100, 100)[20:52, 20:60])
        with pytest.raises(BadAnswer, match=r"\[90.0, 90.0, 110.0, 95.0\] \(px_original\) is not within"):
            pixels.answer_crop(response, box_sample)
        wide = replace(box_sample, target=replace(box_sample.target, value=(0, 0, 101, 50)))
        with pytest.raises(types.Unscorable, match="the target: .* is not within its 100x100 pixels"):
            pixels.target_crop(response, wide)
        absent = replace(box_sample, target=replace(box_sample.target, media_index=3))
        with pytest.raises(types.Unscorable, match="medium 3"):
            pixels.answer_crop(response, absent)


@pytest.mark.parametrize("max_bytes", [30_000, 10_000, 2_000, 700])
def test_an_encoded_image_keeps_within_its_bytes(max_bytes):
    source = np.random.default_rng(0).integers(0, 256, (90, 100, 3), dtype=np.uint8)
    media_type, content = pixels.encode_image(source, max_bytes)
    assert len(content) <= max_bytes
    decoded = np.asarray(Image.open(io.BytesIO(content)))
    if max_bytes == 30_000:
        assert media_type == "image/png" and np.array_equal(decoded, source)
    else:
        assert media_type == "image/jpeg" and min(decoded.shape[:2]) >= 5


def test_an_image_that_cannot_be_made_small_enough_is_an_error():
    with pytest.raises(ValueError, match="one pixel has"):
        pixels.encode_image(np.zeros((9, 9, 3), np.uint8), 50)


def test_a_case_with_pictures_needs_an_opener():
    (row, *_) = load_case_table(ROOT / "rewards/cases/look_difference.json")
    with pytest.raises(types.UserError, match="nothing opens media here"):
        row.build()

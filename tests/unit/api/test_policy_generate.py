"""`mmrl.Policy.generate`: the pictures, questions and answer types that it takes, and those that it refuses."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmrl import ImageRef, Policy, Response, Sample, UserError


def make_policy(folder: Path, asked: list[Sample]) -> Policy:
    """Return a policy without a model; it keeps the samples that it is asked about in `asked`."""

    def answer(sample: Sample) -> Response:
        asked.append(sample)
        return None  # type: ignore[return-value]  # no test reads the response

    return Policy(answer, folder, ExitStack())


def test_a_pil_image_is_turned_upright_as_its_file_is(tmp_path):
    exif = Image.Exif()
    exif[0x112] = 6  # the camera was turned by a quarter
    Image.new("RGB", (64, 48)).save(tmp_path / "turned.jpg", exif=exif)
    asked: list[Sample] = []
    make_policy(tmp_path, asked).generate(Image.open(tmp_path / "turned.jpg"), "What is it?")
    picture = asked[0].parts[0]
    assert isinstance(picture, ImageRef)
    assert Image.open(picture.path).size == (48, 64)


@pytest.mark.parametrize("medium", [b"\x89PNG", np.zeros((4, 4, 3), np.uint8), None, [3]])
def test_what_is_not_a_picture_is_refused_by_its_type(tmp_path, medium):
    with pytest.raises(UserError, match="images are paths or PIL images, not (bytes|ndarray|NoneType|int)"):
        make_policy(tmp_path, []).generate(medium, "What is it?")


def test_a_pil_image_that_is_not_a_png_names_the_remedy(tmp_path):
    with pytest.raises(UserError, match=r"cannot write mode CMYK as PNG; .* try image\.convert\('RGB'\)"):
        make_policy(tmp_path, []).generate(Image.new("CMYK", (8, 8)), "What is it?")


def test_a_closed_pil_image_and_a_path_with_a_null_character_are_refused(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    picture = Image.open(tmp_path / "a.png")
    picture.close()
    with pytest.raises(UserError, match="Operation on closed image; open it again"):
        make_policy(tmp_path, []).generate(picture, "What is it?")
    with pytest.raises(UserError, match="cannot be read: embedded null byte"):
        make_policy(tmp_path, []).generate("a\0.png", "What is it?")


def test_an_unknown_answer_type_and_a_question_that_is_not_text_are_refused(tmp_path):
    policy = make_policy(tmp_path, [])
    with pytest.raises(UserError, match="answer_type 'numbr' is unknown; did you mean 'number'"):
        policy.generate([], "How many?", answer_type="numbr")
    with pytest.raises(UserError, match="answer_type None is unknown; use text, choice"):
        policy.generate([], "How many?", answer_type=None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="a question is text, not None"):
        policy.generate([], None)  # type: ignore[arg-type]


def test_a_closed_policy_refuses_questions(tmp_path):
    policy = make_policy(tmp_path, [])
    policy.close()
    with pytest.raises(UserError, match="closed; load it again with Policy.from_run"):
        policy.generate([], "What is it?")

"""The likeness of a caption and an image or drawing, against transformers' similarity of a small CLIP from scratch."""

from pathlib import Path

import numpy as np
import pytest
from factories import make_response, make_sample
from PIL import Image
from tiny_clip import LONGEST, write_clip

from mmrl.answer import ResponseFormat
from mmrl.media.pixel_reader import PixelReader
from mmrl.types import AnswerType, ImageRef, MediaPolicy, Unscorable, use_media_opener
from mmrl.utils.digests import file_digest
from mmrl_rewards import caption, render
from mmrl_rewards.contract import BadAnswer
from mmrl_rewards.services.renderer import DrawingLimits, draw

WORDS = ("a", "red", "blue", "square", "on", "white")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return str(write_clip(tmp_path_factory.mktemp("clip"), WORDS))


@pytest.fixture
def picture(tmp_path):
    pixels = np.full((40, 60, 3), 255, dtype=np.uint8)
    pixels[10:30, 20:40] = (220, 10, 10)
    Image.fromarray(pixels).save(tmp_path / "p.png")
    with use_media_opener(PixelReader(MediaPolicy(roots=(tmp_path.resolve(),)))):
        yield ImageRef(path=str(tmp_path / "p.png"), sha256=file_digest(tmp_path / "p.png"))


def scored(picture, text, **args):
    response = make_response(text, ResponseFormat(thinking="optional").parse(text, AnswerType.TEXT))
    return caption.image_text(
        response, make_sample("a red square", AnswerType.TEXT, parts=(picture, "What is it?")), **args
    )


@pytest.mark.parametrize("text", ["a red square", "blue", "a red square on white a"])
def test_the_cosine_is_that_of_the_model_itself(encoder, picture, text):
    import torch
    from transformers import AutoModel, AutoProcessor

    model, processor = AutoModel.from_pretrained(encoder).eval(), AutoProcessor.from_pretrained(encoder)
    inputs = processor(text=[text], images=[Image.open(picture.path).convert("RGB")], return_tensors="pt")
    with torch.inference_mode():
        cosine = float(model(**inputs).logits_per_image / model.logit_scale.exp())
    got = scored(picture, f"<answer>{text}</answer>", encoder=encoder, scale=0.5)
    assert got.value == pytest.approx(0.5 * max(0.0, cosine), abs=1e-6)
    assert (
        scored(picture, f"<think>{text}</think><answer>blue</answer>", encoder=encoder, scale=0.5, of="thought") == got
    )


def test_values_are_clipped_and_differ_between_texts(encoder, picture):
    values = {scored(picture, f"<answer>{word}</answer>", encoder=encoder, scale=0.1).value for word in WORDS[4:]}
    assert len(values) > 1
    assert scored(picture, "<answer>a red square</answer>", encoder=encoder, scale=1e9).value in (0.0, 1.0)


def test_what_the_encoder_would_not_read_is_not_paid(encoder, picture):
    fits, too_long = ("a " * count for count in (LONGEST - 2, LONGEST - 1))
    assert "cosine" in scored(picture, f"<answer>{fits}</answer>", encoder=encoder).reason
    got = scored(picture, f"<answer>{too_long}</answer>", encoder=encoder)
    assert got == (0.0, "a text of 9 tokens, and the encoder reads 8")


def test_a_folder_without_such_a_model_is_unscorable(picture, tmp_path):
    with pytest.raises(Unscorable, match="no model in"):
        scored(picture, "<answer>a</answer>", encoder=str(tmp_path))
    with pytest.raises(Unscorable, match="no encoder is configured"):
        scored(picture, "<answer>a</answer>")


def test_a_picture_that_is_gone_is_unscorable_whatever_the_text(encoder, picture):
    Path(picture.path).unlink()
    with pytest.raises(Unscorable, match="p.png"):
        scored(picture, "", encoder=encoder)


SQUARE = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><rect width="9" height="5" fill="red"/></svg>'


def drawn(text, svg, encoder):
    answer = f"<answer>{svg}</answer>"
    response = make_response(answer, ResponseFormat().parse(answer, AnswerType.TEXT))
    return render.svg_text.fn(response, make_sample(text, AnswerType.TEXT), encoder=encoder, side=64)


# The second text has more tokens than the encoder reads, so only its beginning counts.
@pytest.mark.parametrize("text", ["a red square", "a red square on white a blue square on a red square"])
def test_a_drawing_is_compared_with_its_target_beyond_a_white_page(encoder, text):
    import torch
    from transformers import AutoModel, AutoProcessor

    model, processor = AutoModel.from_pretrained(encoder).eval(), AutoProcessor.from_pretrained(encoder)
    page = draw("svg", SQUARE, side=64, limits=DrawingLimits())
    cosines = []
    for pixels in (page, np.full_like(page, 255)):
        inputs = processor(
            text=[text], images=[Image.fromarray(pixels)], return_tensors="pt", truncation=True, max_length=LONGEST
        )
        with torch.inference_mode():
            cosines.append(float(model(**inputs).logits_per_image / model.logit_scale.exp()))
    expected = (cosines[0] - cosines[1]) / (1.0 - cosines[1])
    assert expected > 0.05
    assert drawn(text, SQUARE, encoder).value == pytest.approx(expected, abs=1e-5)
    assert drawn(text, SQUARE.replace("red", "white"), encoder).value == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("element", ["text", "tspan", "textPath", "svg:text", "TEXT"])
def test_a_drawing_with_words_in_it_earns_nothing(encoder, element):
    with pytest.raises(BadAnswer, match="contains text"):
        drawn("a red square", SQUARE.replace("<rect", f"<{element}>a red square</{element}><rect"), encoder)


@pytest.mark.parametrize("answer", ["a red square", "<svg><script>1</script></svg>", "<svg"])
def test_what_cannot_be_drawn_earns_nothing(encoder, answer):
    with pytest.raises(BadAnswer, match="the drawing"):
        drawn("a red square", answer, encoder)

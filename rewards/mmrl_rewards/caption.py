"""A reward for captions that needs no reference: an encoder of images and texts compares the text with the picture."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mmrl.types import Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import BadAnswer, Of, part_text, reward
from mmrl_rewards.pixels import keep_last
from mmrl_rewards.services.encoder import embed_caption, embed_captioned_image

_embed_shared_image = keep_last(embed_captioned_image)


@reward(name="image_text", uses_service=True, looks=True)
def image_text(
    response: Response,
    sample: Sample,
    *,
    encoder: str | None = None,
    scale: Annotated[float, Field(gt=0.0)] = 2.5,
    of: Of = "answer",
) -> RewardValue:
    """Return min(1, scale * max(0, c)), where c is the cosine of the embeddings of the text and the image, in [0, 1].

    `encoder` names a folder with a CLIP, SigLIP or similar model as transformers saves it; nothing is downloaded. `of`
    names the part of the response that is compared. The image is the target's; the target itself is not used.

    Source: CLIPScore (arXiv:2104.08718, eq. 1), with its weight of 2.5, which suits CLIP; the text-image term of
    Symbolic Graphics Programming (arXiv:2509.05208).
    Departures: no prefix such as "A photo depicts" is added, and values above 1 count 1. A text of more tokens than the
    encoder reads earns 0, since what it does not read would be paid for.
    Unscorable: there is no encoder or no image text model in its folder, or the sample's image cannot be opened.
    """
    if encoder is None:
        raise Unscorable("no encoder is configured: set args.encoder to a folder with a CLIP or SigLIP")
    pixels = sample.image(sample.target.media_index)
    text = part_text(response, of)
    image = _embed_shared_image(encoder, pixels)
    try:
        cosine = float(embed_caption(encoder, text) @ image)
    except ValueError as error:
        raise BadAnswer(str(error)) from error
    return RewardValue(min(1.0, scale * max(0.0, cosine)), f"cosine {cosine:.3f} of text and image")

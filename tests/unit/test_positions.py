"""M-RoPE position ids: transformers' own, for every family, and the refusals."""

import pytest
import torch

from mmrl.policy.positions import mrope_positions
from mmrl.types import UserError

IMAGE, TEXT = 7, 1
PROMPTS = {
    "text": ([TEXT] * 5, []),
    "one": ([TEXT, *[IMAGE] * 6, TEXT, TEXT], [(1, 4, 6)]),
    "first and last": ([IMAGE] * 4, [(1, 4, 4)]),
    "tall": ([TEXT, *[IMAGE] * 5, TEXT], [(1, 10, 2)]),
    "wide": ([TEXT, *[IMAGE] * 5, TEXT, TEXT], [(1, 2, 10)]),
    "three": ([TEXT, *[IMAGE] * 4, TEXT, *[IMAGE] * 12, TEXT, IMAGE, TEXT], [(1, 4, 4), (1, 6, 8), (1, 2, 2)]),
}


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_equal_those_of_transformers(tiny, family):
    model = tiny(family).policy.model.model
    for ids, grids in PROMPTS.values():
        kinds = torch.tensor([[int(token == IMAGE) for token in ids]])
        theirs, _ = model.get_rope_index(
            input_ids=torch.tensor([ids]),
            mm_token_type_ids=kinds,
            image_grid_thw=torch.tensor(grids) if grids else None,
            attention_mask=torch.ones_like(kinds),
        )
        ours = mrope_positions(ids, grids, image_id=IMAGE, merge=2)
        assert ours.tolist() == theirs[:, 0].tolist()
        assert ours.dtype == torch.int64


def test_positions_by_hand():
    positions = mrope_positions([TEXT, *[IMAGE] * 6, TEXT], [(1, 4, 6)], image_id=IMAGE, merge=2)
    assert positions.tolist() == [[0, 1, 1, 1, 1, 1, 1, 4], [0, 1, 1, 1, 2, 2, 2, 4], [0, 1, 2, 3, 1, 2, 3, 4]]


def test_two_pictures_side_by_side_need_no_text_between_them():
    positions = mrope_positions([IMAGE, *[IMAGE] * 4], [(1, 2, 2), (1, 4, 4)], image_id=IMAGE, merge=2)
    assert positions[0].tolist() == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("ids", "grids", "message"),
    [
        ([TEXT, IMAGE], [], "token 1 is an image placeholder, but all 0 image grids are used up"),
        ([IMAGE, IMAGE, TEXT], [(1, 2, 2)], "token 1 is an image placeholder, but all 1 image grids"),
        ([TEXT, IMAGE, TEXT], [(1, 4, 4)], r"grid \(1, 4, 4\) needs 4 image tokens from token 1 on"),
        ([TEXT, IMAGE, IMAGE], [(1, 4, 4)], r"grid \(1, 4, 4\) needs 4 image tokens from token 1 on"),
        ([TEXT], [(1, 2, 2)], "1 of 1 images have no placeholder tokens"),
        ([IMAGE, TEXT], [(1, 2, 2), (1, 4, 4)], "1 of 2 images have no placeholder tokens"),
    ],
)
def test_tokens_that_do_not_fit_the_grids_are_refused(ids, grids, message):
    with pytest.raises(UserError, match=message):
        mrope_positions(ids, grids, image_id=IMAGE, merge=2)

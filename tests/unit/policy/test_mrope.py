"""M-RoPE position ids: transformers' own, for every family, and the refusals."""

from dataclasses import replace

import pytest
import torch

from mmrl.policy.families import FAMILIES, PlaceholderRun
from mmrl.types import UserError

IMAGE, VIDEO, TEXT = 7, 8, 1
PROMPTS = {
    "text": ([TEXT] * 5, []),
    "one": ([TEXT, *[IMAGE] * 6, TEXT, TEXT], [(1, 4, 6)]),
    "first and last": ([IMAGE] * 4, [(1, 4, 4)]),
    "tall": ([TEXT, *[IMAGE] * 5, TEXT], [(1, 10, 2)]),
    "wide": ([TEXT, *[IMAGE] * 5, TEXT, TEXT], [(1, 2, 10)]),
    "three": ([TEXT, *[IMAGE] * 4, TEXT, *[IMAGE] * 12, TEXT, IMAGE, TEXT], [(1, 4, 4), (1, 6, 8), (1, 2, 2)]),
}


def positions(ids, images=(), videos=()):
    return FAMILIES["qwen2_vl"].position_ids(
        ids, {IMAGE: [PlaceholderRun(grid) for grid in images], VIDEO: list(videos)}, merge_size=2
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_equal_those_of_transformers(make_tiny, family):
    model = make_tiny(family).policy.model.model
    for ids, grids in PROMPTS.values():
        kinds = torch.tensor([[int(token == IMAGE) for token in ids]])
        theirs, _ = model.get_rope_index(
            input_ids=torch.tensor([ids]),
            mm_token_type_ids=kinds,
            image_grid_thw=torch.tensor(grids) if grids else None,
            attention_mask=torch.ones_like(kinds),
        )
        ours = positions(ids, grids)
        assert ours.tolist() == theirs[:, 0].tolist()
        assert ours.dtype == torch.int64


def test_positions_by_hand():
    assert positions([TEXT, *[IMAGE] * 6, TEXT], [(1, 4, 6)]).tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4],
        [0, 1, 1, 1, 2, 2, 2, 4],
        [0, 1, 2, 3, 1, 2, 3, 4],
    ]


def test_two_pictures_side_by_side_need_no_text_between_them():
    assert positions([IMAGE, *[IMAGE] * 4], [(1, 2, 2), (1, 4, 4)])[0].tolist() == [0, 1, 1, 1, 1]


def test_text_after_a_video_goes_on_after_its_last_moment():
    """Two pairs of frames a second and a half apart, at two positions a second, 2 x 1 tokens each."""
    run = PlaceholderRun((2, 4, 2), time_step=2 * 1.5)
    assert positions([TEXT, *[VIDEO] * 4, TEXT, TEXT], videos=[run]).tolist() == [
        [0, 1, 1, 4, 4, 5, 6],
        [0, 1, 2, 1, 2, 5, 6],
        [0, 1, 1, 1, 1, 5, 6],
    ]


@pytest.mark.parametrize(
    ("family", "second_per_grid", "times"),
    [
        ("qwen2_vl", 1.0, [0, 0, 1, 1, 2, 2, 3]),  # a pair of frames is a step, however long it takes
        ("qwen2_vl", 9.0, [0, 0, 1, 1, 2, 2, 3]),
        ("qwen2_5_vl", 1.0, [0, 0, 1, 1, 2, 2, 3]),
        ("qwen2_5_vl", 2.6, [0, 0, 2, 2, 5, 5, 6]),  # rounded down
        ("qwen2_5_vl", 0.4, [0, 0, 0, 0, 0, 0, 2]),  # the frames' two columns reach further than their times
    ],
)
def test_how_the_families_tell_time(family, second_per_grid, times):
    runs = FAMILIES[family].video_placeholder_runs((3, 2, 4), second_per_grid)
    assert positions([*[VIDEO] * 6, TEXT], videos=runs)[0].tolist() == times


def test_seconds_are_those_of_a_float32_tensor_as_in_vllm():
    """0.7 is 0.69999999 there, so ten steps of two positions a second are 13 positions, not 14."""
    family = replace(FAMILIES["qwen2_5_vl"], tokens_per_second=2)
    assert positions([VIDEO] * 11, videos=family.video_placeholder_runs((11, 2, 2), 0.7))[0, 10] == 13


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_each_pair_of_frames_is_read_as_a_picture_after_its_time(family):
    runs = FAMILIES[family].video_placeholder_runs((2, 2, 4), 1.0)
    ids = [TEXT, VIDEO, VIDEO, TEXT, VIDEO, VIDEO, TEXT]
    assert positions(ids, videos=runs)[0].tolist() == [0, 1, 1, 3, 4, 4, 6]
    assert positions(ids, videos=runs).tolist() == positions(ids, videos=[PlaceholderRun((1, 2, 4))] * 2).tolist()


@pytest.mark.parametrize(
    ("ids", "grids", "message"),
    [
        ([TEXT, IMAGE], [], "token 1 is placeholder 7, but all its grids are used up"),
        ([IMAGE, IMAGE, TEXT], [(1, 2, 2)], "token 1 is placeholder 7, but all its grids are used up"),
        ([IMAGE, VIDEO, TEXT], [(1, 2, 2)], "token 1 is placeholder 8, but all its grids are used up"),
        ([TEXT, IMAGE, TEXT], [(1, 4, 4)], "4 tokens 7 must start at token 1, but do not"),
        ([TEXT, IMAGE, IMAGE], [(1, 4, 4)], "4 tokens 7 must start at token 1, but do not"),
        ([TEXT, IMAGE, IMAGE, IMAGE, VIDEO], [(1, 4, 4)], "4 tokens 7 must start at token 1, but do not"),
        ([TEXT], [(1, 2, 2)], "1 of 1 media have no placeholder tokens"),
        ([IMAGE, TEXT], [(1, 2, 2), (1, 4, 4)], "1 of 2 media have no placeholder tokens"),
    ],
)
def test_tokens_that_do_not_fit_the_grids_are_refused(ids, grids, message):
    with pytest.raises(UserError, match=message):
        positions(ids, grids)

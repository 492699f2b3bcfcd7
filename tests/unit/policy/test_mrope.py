"""M-RoPE positions against transformers' and by hand, for images, videos and each family's encoding of time."""

from dataclasses import replace

import pytest
import torch

from mmrl.policy.families import FAMILIES, PlaceholderRun
from mmrl.types import UserError

IMAGE, VIDEO, TEXT = 7, 8, 1
PROMPTS = {
    "text": ([TEXT] * 5, []),
    "image": ([TEXT, *[IMAGE] * 6, TEXT, TEXT], [(1, 4, 6)]),
    "image alone": ([IMAGE] * 4, [(1, 4, 4)]),
    "tall image": ([TEXT, *[IMAGE] * 5, TEXT], [(1, 10, 2)]),
    "wide image": ([TEXT, *[IMAGE] * 5, TEXT, TEXT], [(1, 2, 10)]),
    "images": ([TEXT, *[IMAGE] * 4, TEXT, *[IMAGE] * 12, TEXT, IMAGE, TEXT], [(1, 4, 4), (1, 6, 8), (1, 2, 2)]),
}


def positions(ids, images=(), videos=()):
    runs = {IMAGE: [PlaceholderRun(grid) for grid in images], VIDEO: list(videos)}
    return FAMILIES["qwen2_vl"].position_ids(ids, runs, merge_size=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_equal_those_of_transformers(make_tiny, family):
    model = make_tiny(family).policy.model.model
    for ids, grids in PROMPTS.values():
        types = torch.tensor([[int(token == IMAGE) for token in ids]])
        expected, _ = model.get_rope_index(
            input_ids=torch.tensor([ids]),
            mm_token_type_ids=types,
            image_grid_thw=torch.tensor(grids) if grids else None,
            attention_mask=torch.ones_like(types),
        )
        found = positions(ids, grids)
        assert found.tolist() == expected[:, 0].tolist()
        assert found.dtype == torch.int64


@pytest.mark.parametrize(
    ("ids", "images", "videos", "expected"),
    [
        (
            [TEXT, *[IMAGE] * 6, TEXT],
            [(1, 4, 6)],
            [],
            [[0, 1, 1, 1, 1, 1, 1, 4], [0, 1, 1, 1, 2, 2, 2, 4], [0, 1, 2, 3, 1, 2, 3, 4]],
        ),
        # Two images without text between them.
        ([IMAGE] * 5, [(1, 2, 2), (1, 4, 4)], [], [[0, 1, 1, 1, 1], [0, 1, 1, 2, 2], [0, 1, 2, 1, 2]]),
        # Two pairs of frames 1.5 s apart, at two positions a second, 2 x 1 tokens each.
        (
            [TEXT, *[VIDEO] * 4, TEXT, TEXT],
            [],
            [PlaceholderRun((2, 4, 2), time_step=2 * 1.5)],
            [[0, 1, 1, 4, 4, 5, 6], [0, 1, 2, 1, 2, 5, 6], [0, 1, 1, 1, 1, 5, 6]],
        ),
    ],
)
def test_positions_by_hand(ids, images, videos, expected):
    assert positions(ids, images, videos).tolist() == expected


@pytest.mark.parametrize(
    ("family", "second_per_grid", "expected"),
    [
        ("qwen2_vl", 1.0, [0, 0, 1, 1, 2, 2, 3]),  # a pair of frames is one position, however long it takes
        ("qwen2_vl", 9.0, [0, 0, 1, 1, 2, 2, 3]),
        ("qwen2_5_vl", 1.0, [0, 0, 1, 1, 2, 2, 3]),
        ("qwen2_5_vl", 2.6, [0, 0, 2, 2, 5, 5, 6]),  # rounded down
        ("qwen2_5_vl", 0.4, [0, 0, 0, 0, 0, 0, 2]),  # the columns of the frames reach further than their times
    ],
)
def test_times_of_a_video_follow_the_family(family, second_per_grid, expected):
    runs = FAMILIES[family].video_placeholder_runs((3, 2, 4), second_per_grid)
    assert positions([*[VIDEO] * 6, TEXT], videos=runs)[0].tolist() == expected


def test_seconds_are_rounded_to_float32_as_in_vllm():
    """0.7 is 0.69999999 there, so ten times two positions a second are 13 positions, not 14."""
    family = replace(FAMILIES["qwen2_5_vl"], tokens_per_second=2)
    assert positions([VIDEO] * 11, videos=family.video_placeholder_runs((11, 2, 2), 0.7))[0, 10] == 13


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_each_pair_of_frames_with_a_timestamp_is_positioned_as_an_image(family):
    runs = FAMILIES[family].video_placeholder_runs((2, 2, 4), 1.0)
    assert runs == (PlaceholderRun((1, 2, 4)),) * 2
    assert positions([TEXT, VIDEO, VIDEO, TEXT, VIDEO, VIDEO, TEXT], videos=runs)[0].tolist() == [0, 1, 1, 3, 4, 4, 6]


@pytest.mark.parametrize(
    ("ids", "grids", "words"),
    [
        ([TEXT, IMAGE], [], "token 1 is placeholder 7, but all its grids are used up"),
        ([IMAGE, IMAGE, TEXT], [(1, 2, 2)], "token 1 is placeholder 7, but all its grids are used up"),
        ([IMAGE, VIDEO, TEXT], [(1, 2, 2)], "token 1 is placeholder 8, but all its grids are used up"),
        ([TEXT, IMAGE, TEXT], [(1, 4, 4)], "4 tokens 7 must start at token 1"),
        ([TEXT, IMAGE, IMAGE], [(1, 4, 4)], "4 tokens 7 must start at token 1"),
        ([TEXT, IMAGE, IMAGE, IMAGE, VIDEO], [(1, 4, 4)], "4 tokens 7 must start at token 1"),
        ([TEXT], [(1, 2, 2)], "1 of 1 media have no placeholder tokens"),
        ([IMAGE, TEXT], [(1, 2, 2), (1, 4, 4)], "1 of 2 media have no placeholder tokens"),
    ],
)
def test_placeholders_that_do_not_fit_the_grids_are_refused(ids, grids, words):
    with pytest.raises(UserError, match=words):
        positions(ids, grids)

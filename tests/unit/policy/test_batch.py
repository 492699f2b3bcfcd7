"""Experiences to tensors: both layouts by hand, and what is refused."""

from dataclasses import replace

import pytest
import torch
from factories import make_answer
from processors import pad_prompts

from mmrl import types
from mmrl.learner.micro_batches import pack_micro_batches
from mmrl.policy.batch import PackedGroup, Placeholders, PromptTensors, collate, group_by_prompt

IMAGE, VIDEO, PAD = 9, 8, 0
REFS = {IMAGE: types.ImageRef(path="p.png", sha256=""), VIDEO: types.VideoRef(path="v.mp4", sha256="")}
PARAMS = types.SamplingParams(max_new_tokens=8)
POLICY, FORCED = types.Author.POLICY, types.Author.FORCED


class FakeProcessor:
    """Positions that count up, and a patch of two numbers for each placeholder: the first token of the prompt."""

    placeholders = Placeholders(image_id=IMAGE, video_id=VIDEO, merge_size=1)

    def __init__(self, *, missing_patches=0, extra_positions=0):
        self.missing_patches, self.extra_positions = missing_patches, extra_positions

    def prompt_tensors(self, prompt):
        images, videos = (
            torch.full((prompt.token_ids.count(t), 2), float(prompt.token_ids[0])) for t in (IMAGE, VIDEO)
        )
        return PromptTensors(
            image_patches_MD=images[self.missing_patches :],
            video_patches_MD=videos,
            position_ids_3P=torch.arange(len(prompt.token_ids) + self.extra_positions).expand(3, -1),
            second_per_grid_V=torch.ones(prompt.token_ids.count(VIDEO)),
        )


def make_prompt(name, *ids):
    media = tuple(REFS[token] for token in ids if token in REFS)
    sample = types.Sample(
        id=name, task="t", parts=(*media, "?"), target=types.Target(answer_type=types.AnswerType.NUMBER, value=1)
    )
    return types.Prompt(
        sample=sample,
        token_ids=ids,
        grids=((1, 1, 1),) * len(media),
        resize_maps=(),
        coordinate_system=types.CoordinateSystem.NORM_1,
        digest=f"{name}{ids}",
    )


def make_experience(prompt, *segments, params=PARAMS):
    """An experience whose response has these segments of (author, token ids)."""
    made = [types.Segment(token_ids=ids, logprobs=(-1.0,) * len(ids), author=author) for author, ids in segments]
    rollout = types.Rollout(
        prompt=prompt,
        index=0,
        segments=tuple(made),
        text="",
        answer=make_answer(),
        finish_reason=types.FinishReason.EOS,
        sampling_params=params,
    )
    return types.Experience(rollout=rollout, advantage=1.0)


def pack(experiences, *, shared_prefix=True, processor=None):
    groups = group_by_prompt(experiences)
    return collate(groups, processor or FakeProcessor(), pad_id=PAD, shared_prefix=shared_prefix)


A, B = make_prompt("a", 1, IMAGE, 2), make_prompt("b", 3)
ONE = make_experience(A, (POLICY, (11, 12)))
TWO = make_experience(A, (POLICY, (13,)), (FORCED, (14,)), (POLICY, (15,)))
OTHER = make_experience(B, (types.Author.DEMONSTRATION, (16, 17)))


def test_the_plain_layout_has_a_padded_row_for_each_completion():
    batch = pack([ONE, TWO, OTHER], shared_prefix=False)
    assert batch.input_ids_BL.tolist() == [[1, 9, 2, 11, 12, 0], [1, 9, 2, 13, 14, 15], [3, 16, 17, 0, 0, 0]]
    assert batch.position_ids_3BL[1].tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 0, 0]]
    assert batch.token_types_BL.tolist() == [[0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0] * 6]
    assert batch.packed_groups is None
    # A forced token, 14, is context only.
    assert batch.target_ids_N.tolist() == [11, 12, 13, 15, 16, 17]
    assert batch.predictor_index_N.tolist() == [2, 3, 8, 10, 12, 13]  # 6 places a row
    assert batch.media.image_grids_I3.tolist() == [[1, 1, 1]] * 2
    assert batch.media.image_patches_MD.tolist() == [[1.0, 1.0]] * 2


def test_the_packed_layout_has_each_prompt_once():
    batch = pack([ONE, TWO, OTHER])
    assert batch.input_ids_BL.tolist() == [[1, 9, 2, 11, 12, 13, 14, 15, 3, 16, 17]]
    assert batch.position_ids_3BL[1].tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 2]]
    assert batch.token_types_BL.tolist() == [[0, 1, *[0] * 9]]
    assert batch.packed_groups == (PackedGroup(3, (2, 3)), PackedGroup(1, (2,)))
    assert batch.target_ids_N.tolist() == [11, 12, 13, 15, 16, 17]
    # The prompt's last token predicts the first of each completion.
    assert batch.predictor_index_N.tolist() == [2, 3, 2, 6, 8, 9]
    assert batch.media.image_grids_I3.tolist() == [[1, 1, 1]]
    assert batch.media.image_keys == (f"{A.digest}:0",)


def test_groups_keep_the_order_of_first_appearance():
    later = make_experience(A, (POLICY, (18,)))
    assert group_by_prompt([ONE, OTHER, later]) == [[ONE, later], [OTHER]]


@pytest.mark.parametrize(
    ("max_groups", "max_tokens", "shared_prefix", "expected"),
    [
        (9, 99, True, [[[OTHER], [ONE, TWO]]]),
        (1, 99, True, [[[OTHER]], [[ONE, TWO]]]),
        (9, 11, True, [[[OTHER], [ONE, TWO]]]),  # 3 + 3 + 2 + 3 tokens
        (9, 10, True, [[[OTHER]], [[ONE, TWO]]]),
        (9, 7, True, [[[OTHER]], [[ONE]], [[TWO]]]),  # the prompt is repeated
        (9, 1, True, [[[OTHER]], [[ONE]], [[TWO]]]),  # no sequence is cut
        (9, 18, False, [[[OTHER], [ONE, TWO]]]),  # three rows of 6
        (9, 17, False, [[[OTHER]], [[ONE, TWO]]]),
        (9, 11, False, [[[OTHER], [ONE]], [[TWO]]]),  # two rows of 5, one of 6
    ],
)
def test_micro_batches_keep_both_limits(max_groups, max_tokens, shared_prefix, expected):
    limits = {"max_groups": max_groups, "max_tokens": max_tokens}
    assert pack_micro_batches([ONE, OTHER, TWO], **limits, shared_prefix=shared_prefix) == expected


def test_an_empty_completion_takes_no_columns():
    batch = pack([make_experience(A, (POLICY, ())), ONE])
    assert batch.packed_groups == (PackedGroup(3, (2,)),)
    assert batch.predictor_index_N.tolist() == [2, 3]


def test_a_batch_without_media_has_no_patches_and_no_grids():
    media = pack([OTHER]).media
    assert (len(media.image_patches_MD), media.image_grids_I3.shape) == (0, (0, 3))


def test_prompts_are_padded_on_the_left_with_images_and_videos_apart():
    both, video = make_prompt("c", VIDEO, 1, IMAGE, IMAGE), make_prompt("d", 2, VIDEO)
    batch = pad_prompts([both, A, video], FakeProcessor(), pad_id=PAD)
    assert batch.input_ids_BP.tolist() == [[8, 1, 9, 9], [0, 1, 9, 2], [0, 0, 2, 8]]
    assert batch.attention_mask_BP.tolist() == [[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert batch.position_ids_3BP[2].tolist() == [[0, 1, 2, 3], [0, 0, 1, 2], [0, 0, 0, 1]]
    assert batch.token_types_BP.tolist() == [[2, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 2]]
    assert batch.media.image_patches_MD[:, 0].tolist() == [8.0, 8.0, 1.0]
    assert batch.media.video_patches_MD[:, 0].tolist() == [8.0, 2.0]
    assert batch.media.image_grids_I3.tolist() == [[1, 1, 1]] * 3
    assert batch.media.video_grids_V3.tolist() == [[1, 1, 1]] * 2


def test_moving_a_batch_moves_all_tensors_and_keeps_the_rest():
    batch = pack([ONE, TWO])
    moved = batch.to(torch.device("meta"))
    assert (moved.banned_token_ids, moved.packed_groups) == (batch.banned_token_ids, batch.packed_groups)
    assert moved.media.image_keys == batch.media.image_keys
    assert moved.input_ids_BL.is_meta and moved.media.image_patches_MD.is_meta
    assert moved.input_ids_BL.shape == batch.input_ids_BL.shape


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_each_token_has_the_temperature_it_was_sampled_at(shared_prefix):
    """A greedy token counts as sampled at 1; a segment without parameters of its own has those of its rollout."""
    cool = make_experience(A, (POLICY, (11,)), params=replace(PARAMS, temperature=0.5, max_new_tokens=3))
    first, trigger, second = TWO.rollout.segments
    second = replace(second, sampling_params=replace(PARAMS, temperature=0.9))
    mixed = replace(TWO, rollout=replace(TWO.rollout, segments=(first, trigger, second)))
    greedy = make_experience(B, (POLICY, (11, 12)), params=replace(PARAMS, temperature=0.0))
    batch = pack([cool, mixed, greedy], shared_prefix=shared_prefix)
    assert batch.target_ids_N.tolist() == [11, 13, 15, 11, 12]
    assert batch.temperature_N.tolist() == pytest.approx([0.5, 1.0, 0.9, 1.0, 1.0])


@pytest.mark.parametrize(
    ("prompt", "processor", "words"),
    [
        (replace(A, grids=((1, 2, 2),)), {}, "image grids call for 4 patches, there are 1, and 1 placeholders"),
        (replace(A, token_ids=(1, 2)), {}, "image grids call for 1 patches, there are 0, and 0 placeholders"),
        (replace(A, token_ids=(1, IMAGE, VIDEO)), {}, "video grids call for 0 patches, there are 1, and 1 placeholder"),
        (A, {"missing_patches": 1}, "image grids call for 1 patches, there are 0, and 1 placeholders"),
        (A, {"extra_positions": 1}, r"3 tokens, positions \[3, 4\]"),
    ],
)
def test_placeholders_grids_and_patches_that_disagree_are_refused(prompt, processor, words):
    fake = FakeProcessor(**processor)
    with pytest.raises(types.UserError, match=f"sample a: .*{words}"):
        pad_prompts([prompt, B], fake, pad_id=PAD)
    with pytest.raises(types.UserError, match=f"sample a: .*{words}"):
        pack([make_experience(prompt, (POLICY, (11,))), OTHER], processor=fake)


BAN_14 = replace(PARAMS, banned_token_ids=(14,))


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            [[ONE, make_experience(replace(A, digest="other"), (POLICY, (11,)))]],
            "sample a: siblings must share one prompt, got 2",
        ),
        ([[ONE], [make_experience(B, (POLICY, (11,)), params=BAN_14)]], "ban the same tokens, got 2 sets"),
        ([[make_experience(A, (POLICY, (11, IMAGE)))]], f"sample a: rollout 0 contains the placeholder {IMAGE}"),
        ([[make_experience(A, (POLICY, (11, VIDEO)))]], f"sample a: rollout 0 contains the placeholder {VIDEO}"),
        ([[make_experience(A, (POLICY, (11, 14)), params=BAN_14)]], "sample a: rollout 0 contains token 14, which its"),
    ],
)
def test_experiences_that_cannot_be_packed_are_refused(groups, words):
    with pytest.raises(ValueError, match=words):
        collate(groups, FakeProcessor(), pad_id=PAD)


def test_a_banned_token_may_be_forced():
    assert pack([make_experience(A, (POLICY, (11,)), (FORCED, (14,)), params=BAN_14)]).target_ids_N.tolist() == [11]

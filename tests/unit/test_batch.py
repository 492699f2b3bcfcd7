"""Experiences to tensors: the layout by hand, and what is refused."""

from dataclasses import replace

import pytest
import torch

from mmrl.answer import ResponseFormat
from mmrl.learner.micro_batches import pack_micro_batches
from mmrl.policy.batch import Placeholders, PrefixGroup, PromptTensors, collate, collate_prompts, group_by_prompt
from mmrl.types import (
    AnswerType,
    Author,
    CoordinateSystem,
    Experience,
    FinishReason,
    ImageRef,
    Prompt,
    Rollout,
    Sample,
    SamplingParams,
    Segment,
    Target,
    UserError,
    VideoRef,
)

IMAGE, VIDEO, PAD = 9, 8, 0
PARAMS = SamplingParams(max_new_tokens=8)


class Feed:
    """Positions that count up, and one patch of two numbers for each placeholder."""

    placeholders = Placeholders(image_id=IMAGE, video_id=VIDEO, merge_size=1)

    def prompt_tensors(self, prompt):
        images_ND, videos_ND = (
            torch.full((prompt.token_ids.count(t), 2), float(prompt.token_ids[0])) for t in (IMAGE, VIDEO)
        )
        positions_3P = torch.arange(len(prompt.token_ids)).expand(3, -1)
        seconds_V = torch.ones(prompt.token_ids.count(VIDEO))
        return PromptTensors(
            image_patches_MD=images_ND,
            video_patches_MD=videos_ND,
            position_ids_3P=positions_3P,
            second_per_grid_V=seconds_V,
        )


REFS = {IMAGE: ImageRef(path="p.png", sha256=""), VIDEO: VideoRef(path="v.mp4", sha256="")}


def prompt(name, *ids):
    media = tuple(REFS[token] for token in ids if token in REFS)
    sample = Sample(id=name, task="t", parts=(*media, "?"), target=Target(answer_type=AnswerType.NUMBER, value=1))
    grids = ((1, 1, 1),) * len(media)
    return Prompt(
        sample=sample,
        token_ids=ids,
        grids=grids,
        resize_maps=(),
        coordinate_system=CoordinateSystem.NORM_1,
        digest=f"{name}{ids}",
    )


def experience(prompt_, *segments, advantage=1.0, params=PARAMS):
    made = tuple(
        Segment(token_ids=ids, logprobs=tuple(-t / 10 for t in ids), author=author) for author, ids in segments
    )
    answer = ResponseFormat().parse("", AnswerType.NUMBER)
    rollout = Rollout(
        prompt=prompt_,
        index=0,
        segments=made,
        text="",
        answer=answer,
        finish_reason=FinishReason.EOS,
        sampling_params=params,
    )
    return Experience(rollout=rollout, advantage=advantage)


def packed(experiences, *, shared_prefix=True):
    return collate(group_by_prompt(experiences), Feed(), pad_id=PAD, shared_prefix=shared_prefix)


A, B = prompt("a", 1, IMAGE, 2), prompt("b", 3)
ONE = experience(A, (Author.POLICY, (11, 12)), advantage=0.5)
TWO = experience(A, (Author.POLICY, (13,)), (Author.FORCED, (14,)), (Author.POLICY, (15,)), advantage=-0.5)
OTHER = experience(B, (Author.DEMONSTRATION, (16, 17)), advantage=0.0)


def test_one_row_for_each_completion_by_hand():
    batch = packed([ONE, TWO, OTHER], shared_prefix=False)
    assert batch.input_ids_BL.tolist() == [[1, 9, 2, 11, 12, 0], [1, 9, 2, 13, 14, 15], [3, 16, 17, 0, 0, 0]]
    assert batch.position_ids_3BL[1].tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 0, 0]]
    assert batch.token_types_BL.tolist() == [[0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0] * 6]
    assert batch.prefix_tree is None
    assert batch.predictor_index_N.tolist() == [2, 3, 8, 10, 12, 13]  # 6 places a row
    assert batch.media.image_grids_I3.tolist() == [[1, 1, 1]] * 2
    assert batch.media.image_patches_MD.tolist() == [[1.0, 1.0]] * 2


def test_siblings_share_their_prompt_by_hand():
    batch = packed([ONE, TWO, OTHER])
    assert batch.input_ids_BL.tolist() == [[1, 9, 2, 11, 12, 13, 14, 15, 3, 16, 17]]
    assert batch.position_ids_3BL[1].tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 2]]
    assert batch.token_types_BL.tolist() == [[0, 1, *[0] * 9]]
    assert batch.prefix_tree == (PrefixGroup(3, (2, 3)), PrefixGroup(1, (2,)))
    # The prompt's last token predicts the first of each completion.
    assert batch.predictor_index_N.tolist() == [2, 3, 2, 6, 8, 9]
    assert batch.media.image_grids_I3.tolist() == [[1, 1, 1]]
    assert batch.media.image_keys == (f"{A.digest}:0",)


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_what_is_learned_is_the_same_in_both_layouts(shared_prefix):
    """The forced token 14 is context, not a lesson."""
    batch = packed([ONE, TWO, OTHER], shared_prefix=shared_prefix)
    assert batch.target_ids_N.tolist() == [11, 12, 13, 15, 16, 17]


def test_groups_keep_the_order_of_first_appearance():
    later = experience(A, (Author.POLICY, (18,)))
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
def test_the_budget_by_hand(max_groups, max_tokens, shared_prefix, expected):
    made = pack_micro_batches(
        [ONE, OTHER, TWO], max_groups=max_groups, max_tokens=max_tokens, shared_prefix=shared_prefix
    )
    assert made == expected


def test_an_empty_completion_takes_no_place():
    empty = experience(A, (Author.POLICY, ()))
    batch = packed([empty, ONE])
    assert batch.prefix_tree == (PrefixGroup(3, (2,)),)
    assert batch.predictor_index_N.tolist() == [2, 3]


def test_prompts_alone_are_padded_on_the_left():
    batch = collate_prompts([A, B], Feed(), pad_id=PAD)
    assert batch.input_ids_BP.tolist() == [[1, 9, 2], [0, 0, 3]]
    assert batch.attention_mask_BP.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch.position_ids_3BP[2].tolist() == [[0, 1, 2], [0, 0, 0]]


def test_text_alone_has_no_patches_and_no_grids():
    batch = packed([OTHER])
    assert (len(batch.media.image_patches_MD), batch.media.image_grids_I3.shape) == (0, (0, 3))


def test_moving_a_batch_keeps_everything():
    batch = packed([ONE, TWO])
    moved = batch.to(torch.device("meta"))
    assert (moved.banned_token_ids, moved.prefix_tree, moved.media.image_keys) == (
        batch.banned_token_ids,
        batch.prefix_tree,
        batch.media.image_keys,
    )
    assert moved.input_ids_BL.is_meta
    assert moved.media.image_patches_MD.is_meta
    assert moved.input_ids_BL.shape == batch.input_ids_BL.shape


def test_siblings_with_different_prompts_are_refused():
    stranger = experience(replace(A, digest="changed"), (Author.POLICY, (11,)))
    with pytest.raises(ValueError, match="sample a: siblings must share one prompt, got 2"):
        collate([[ONE, stranger]], Feed(), pad_id=PAD)


def test_laws_that_ban_different_tokens_are_refused():
    stranger = experience(B, (Author.POLICY, (11,)), params=replace(PARAMS, banned_token_ids=(4,)))
    with pytest.raises(ValueError, match="ban the same tokens, got 2 sets"):
        packed([ONE, stranger])


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_every_token_carries_the_temperature_it_was_drawn_at(shared_prefix):
    """Greedy is evaluated at 1; a segment without a law of its own has its rollout's."""
    cooler = experience(A, (Author.POLICY, (11,)), params=replace(PARAMS, temperature=0.5, max_new_tokens=3))
    first, trigger, second = TWO.rollout.segments
    second = replace(second, sampling_params=replace(PARAMS, temperature=0.9))
    mixed = Experience(rollout=replace(TWO.rollout, segments=(first, trigger, second)), advantage=1.0)
    greedy = experience(B, (Author.POLICY, (11, 12)), params=replace(PARAMS, temperature=0.0))
    batch = packed([cooler, mixed, greedy], shared_prefix=shared_prefix)
    assert batch.target_ids_N.tolist() == [11, 13, 15, 11, 12]
    assert batch.temperature_N.tolist() == pytest.approx([0.5, 1.0, 0.9, 1.0, 1.0])


class Short(Feed):
    """One patch too few, and one position too many."""

    def __init__(self, *, patches=0, positions=0):
        self.patches, self.positions = patches, positions

    def prompt_tensors(self, prompt):
        whole = super().prompt_tensors(prompt)
        positions_3P = torch.arange(len(prompt.token_ids) + self.positions).expand(3, -1)
        return replace(whole, image_patches_MD=whole.image_patches_MD[self.patches :], position_ids_3P=positions_3P)


@pytest.mark.parametrize(
    ("asked", "feed", "message"),
    [
        (replace(A, grids=((1, 2, 2),)), Feed(), "image grids call for 4 patches, there are 1, and 1 placeholders"),
        (replace(A, token_ids=(1, 2)), Feed(), "image grids call for 1 patches, there are 0, and 0 placeholders"),
        (
            replace(A, token_ids=(1, IMAGE, VIDEO)),
            Feed(),
            "video grids call for 0 patches, there are 1, and 1 placeholders",
        ),
        (A, Short(patches=1), "image grids call for 1 patches, there are 0, and 1 placeholders"),
        (A, Short(positions=1), r"3 tokens, positions \[3, 4\]"),
    ],
)
def test_media_that_disagree_are_refused_wherever_a_prompt_is_used(asked, feed, message):
    wrong = experience(asked, (Author.POLICY, (11,)))
    with pytest.raises(UserError, match=f"sample a: .*{message}"):
        collate_prompts([asked, B], feed, pad_id=PAD)
    with pytest.raises(UserError, match=f"sample a: .*{message}"):
        collate([[wrong], [OTHER]], feed, pad_id=PAD)


def test_pictures_and_videos_are_packed_apart():
    both, video = prompt("c", VIDEO, 1, IMAGE, IMAGE), prompt("d", 2, VIDEO)
    batch = collate_prompts([both, A, video], Feed(), pad_id=PAD)
    assert batch.token_types_BP.tolist() == [[2, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 2]]
    assert batch.media.image_patches_MD[:, 0].tolist() == [8.0, 8.0, 1.0]
    assert batch.media.video_patches_MD[:, 0].tolist() == [8.0, 2.0]
    assert batch.media.image_grids_I3.tolist() == [[1, 1, 1]] * 3
    assert batch.media.video_grids_V3.tolist() == [[1, 1, 1]] * 2


@pytest.mark.parametrize("token", [IMAGE, VIDEO])
def test_a_placeholder_in_a_completion_is_refused(token):
    with pytest.raises(ValueError, match=f"sample a: rollout 0 contains the placeholder {token}"):
        packed([experience(A, (Author.POLICY, (11, token)))])


def test_a_banned_token_is_refused_where_it_would_be_learned():
    params = replace(PARAMS, banned_token_ids=(14,))
    forced = experience(A, (Author.POLICY, (11,)), (Author.FORCED, (14,)), params=params)
    assert packed([forced]).target_ids_N.tolist() == [11]
    with pytest.raises(ValueError, match="sample a: rollout 0 contains token 14, which its sampling params ban"):
        packed([experience(A, (Author.POLICY, (11, 14)), params=params)])

"""Experiences to tensors: the layout by hand, and what is refused."""

from dataclasses import replace

import pytest
import torch

from mmrl.answer import Grammar
from mmrl.learner.micro_batches import pack
from mmrl.policy.batch import Placeholders, PromptTensors, Stem, by_prompt, collate, collate_prompts
from mmrl.types import (
    Author,
    Experience,
    Finish,
    Frame,
    ImageRef,
    Kind,
    Prompt,
    Rollout,
    Sample,
    SamplingLaw,
    Segment,
    Target,
    UserError,
    VideoRef,
)

IMAGE, VIDEO, PAD = 9, 8, 0
LAW = SamplingLaw(max_new_tokens=8)


class Feed:
    """Positions that count up, and one patch of two numbers for each placeholder."""

    placeholders = Placeholders(image=IMAGE, video=VIDEO, merge=1)

    def tensors(self, prompt):
        images_ND, videos_ND = (torch.full((prompt.ids.count(t), 2), float(prompt.ids[0])) for t in (IMAGE, VIDEO))
        positions_3P = torch.arange(len(prompt.ids)).expand(3, -1)
        seconds_V = torch.ones(prompt.ids.count(VIDEO))
        return PromptTensors(images_ND=images_ND, videos_ND=videos_ND, positions_3P=positions_3P, seconds_V=seconds_V)


REFS = {IMAGE: ImageRef(path="p.png", sha256=""), VIDEO: VideoRef(path="v.mp4", sha256="")}


def prompt(name, *ids):
    media = tuple(REFS[token] for token in ids if token in REFS)
    sample = Sample(id=name, task="t", parts=(*media, "?"), target=Target(kind=Kind.NUMBER, value=1))
    grids = ((1, 1, 1),) * len(media)
    return Prompt(sample=sample, ids=ids, grids=grids, resizes=(), frame=Frame.NORM_1, digest=f"{name}{ids}")


def experience(prompt_, *segments, advantage=1.0, law=LAW):
    made = tuple(Segment(ids=ids, logps=tuple(-t / 10 for t in ids), author=author) for author, ids in segments)
    answer = Grammar().parse("", Kind.NUMBER)
    rollout = Rollout(prompt=prompt_, index=0, segments=made, text="", answer=answer, finish=Finish.EOS, law=law)
    return Experience(rollout=rollout, advantage=advantage)


def packed(experiences, *, shared_prefix=True):
    return collate(by_prompt(experiences), Feed(), pad_id=PAD, shared_prefix=shared_prefix)


A, B = prompt("a", 1, IMAGE, 2), prompt("b", 3)
ONE = experience(A, (Author.POLICY, (11, 12)), advantage=0.5)
TWO = experience(A, (Author.POLICY, (13,)), (Author.TRIGGER, (14,)), (Author.POLICY, (15,)), advantage=-0.5)
OTHER = experience(B, (Author.TEACHER, (16, 17)), advantage=0.0)


def test_one_row_for_each_completion_by_hand():
    batch = packed([ONE, TWO, OTHER], shared_prefix=False)
    assert batch.ids_BL.tolist() == [[1, 9, 2, 11, 12, 0], [1, 9, 2, 13, 14, 15], [3, 16, 17, 0, 0, 0]]
    assert batch.positions_3BL[1].tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 0, 0]]
    assert batch.types_BL.tolist() == [[0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0] * 6]
    assert batch.tree is None
    assert batch.source_N.tolist() == [2, 3, 8, 10, 12, 13]  # 6 places a row
    assert batch.media.image_grids_I3.tolist() == [[1, 1, 1]] * 2
    assert batch.media.images_ND.tolist() == [[1.0, 1.0]] * 2


def test_siblings_share_their_prompt_by_hand():
    batch = packed([ONE, TWO, OTHER])
    assert batch.ids_BL.tolist() == [[1, 9, 2, 11, 12, 13, 14, 15, 3, 16, 17]]
    assert batch.positions_3BL[1].tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 0, 1, 2]]
    assert batch.types_BL.tolist() == [[0, 1, *[0] * 9]]
    assert batch.tree == (Stem(3, (2, 3)), Stem(1, (2,)))
    # The prompt's last token predicts the first of each completion.
    assert batch.source_N.tolist() == [2, 3, 2, 6, 8, 9]
    assert batch.media.image_grids_I3.tolist() == [[1, 1, 1]]
    assert batch.media.image_keys == (f"{A.digest}:0",)


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_what_is_learned_is_the_same_in_both_layouts(shared_prefix):
    """The forced token 14 is context, not a lesson."""
    batch = packed([ONE, TWO, OTHER], shared_prefix=shared_prefix)
    assert batch.ids_N.tolist() == [11, 12, 13, 15, 16, 17]


def test_groups_keep_the_order_of_first_appearance():
    later = experience(A, (Author.POLICY, (18,)))
    assert by_prompt([ONE, OTHER, later]) == [[ONE, later], [OTHER]]


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
    made = pack([ONE, OTHER, TWO], max_groups=max_groups, max_tokens=max_tokens, shared_prefix=shared_prefix)
    assert made == expected


def test_an_empty_completion_takes_no_place():
    empty = experience(A, (Author.POLICY, ()))
    batch = packed([empty, ONE])
    assert batch.tree == (Stem(3, (2,)),)
    assert batch.source_N.tolist() == [2, 3]


def test_prompts_alone_are_padded_on_the_left():
    batch = collate_prompts([A, B], Feed(), pad_id=PAD)
    assert batch.ids_BP.tolist() == [[1, 9, 2], [0, 0, 3]]
    assert batch.keep_BP.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch.positions_3BP[2].tolist() == [[0, 1, 2], [0, 0, 0]]


def test_text_alone_has_no_patches_and_no_grids():
    batch = packed([OTHER])
    assert (len(batch.media.images_ND), batch.media.image_grids_I3.shape) == (0, (0, 3))


def test_moving_a_batch_keeps_everything():
    batch = packed([ONE, TWO])
    moved = batch.to(torch.device("meta"))
    assert (moved.banned, moved.tree, moved.media.image_keys) == (batch.banned, batch.tree, batch.media.image_keys)
    assert moved.ids_BL.is_meta
    assert moved.media.images_ND.is_meta
    assert moved.ids_BL.shape == batch.ids_BL.shape


def test_siblings_with_different_prompts_are_refused():
    stranger = experience(replace(A, digest="changed"), (Author.POLICY, (11,)))
    with pytest.raises(ValueError, match="sample a: siblings must share one prompt, got 2"):
        collate([[ONE, stranger]], Feed(), pad_id=PAD)


def test_laws_that_ban_different_tokens_are_refused():
    stranger = experience(B, (Author.POLICY, (11,)), law=replace(LAW, banned=(4,)))
    with pytest.raises(ValueError, match="ban the same tokens, got 2 sets"):
        packed([ONE, stranger])


@pytest.mark.parametrize("shared_prefix", [True, False])
def test_every_token_carries_the_temperature_it_was_drawn_at(shared_prefix):
    """Greedy is evaluated at 1; a segment without a law of its own has its rollout's."""
    cooler = experience(A, (Author.POLICY, (11,)), law=replace(LAW, temperature=0.5, max_new_tokens=3))
    first, trigger, second = TWO.rollout.segments
    second = replace(second, law=replace(LAW, temperature=0.9))
    mixed = Experience(rollout=replace(TWO.rollout, segments=(first, trigger, second)), advantage=1.0)
    greedy = experience(B, (Author.POLICY, (11, 12)), law=replace(LAW, temperature=0.0))
    batch = packed([cooler, mixed, greedy], shared_prefix=shared_prefix)
    assert batch.ids_N.tolist() == [11, 13, 15, 11, 12]
    assert batch.temperature_N.tolist() == pytest.approx([0.5, 1.0, 0.9, 1.0, 1.0])


class Short(Feed):
    """One patch too few, and one position too many."""

    def __init__(self, *, patches=0, positions=0):
        self.patches, self.positions = patches, positions

    def tensors(self, prompt):
        whole = super().tensors(prompt)
        positions_3P = torch.arange(len(prompt.ids) + self.positions).expand(3, -1)
        return replace(whole, images_ND=whole.images_ND[self.patches :], positions_3P=positions_3P)


@pytest.mark.parametrize(
    ("asked", "feed", "message"),
    [
        (replace(A, grids=((1, 2, 2),)), Feed(), "picture grids call for 4 patches, there are 1, and 1 placeholders"),
        (replace(A, ids=(1, 2)), Feed(), "picture grids call for 1 patches, there are 0, and 0 placeholders"),
        (replace(A, ids=(1, IMAGE, VIDEO)), Feed(), "video grids call for 0 patches, there are 1, and 1 placeholders"),
        (A, Short(patches=1), "picture grids call for 1 patches, there are 0, and 1 placeholders"),
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
    assert batch.types_BP.tolist() == [[2, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 2]]
    assert batch.media.images_ND[:, 0].tolist() == [8.0, 8.0, 1.0]
    assert batch.media.videos_ND[:, 0].tolist() == [8.0, 2.0]
    assert batch.media.image_grids_I3.tolist() == [[1, 1, 1]] * 3
    assert batch.media.video_grids_V3.tolist() == [[1, 1, 1]] * 2


@pytest.mark.parametrize("token", [IMAGE, VIDEO])
def test_a_placeholder_in_a_completion_is_refused(token):
    with pytest.raises(ValueError, match=f"sample a: rollout 0 contains the placeholder {token}"):
        packed([experience(A, (Author.POLICY, (11, token)))])


def test_a_banned_token_is_refused_where_it_would_be_learned():
    law = replace(LAW, banned=(14,))
    forced = experience(A, (Author.POLICY, (11,)), (Author.TRIGGER, (14,)), law=law)
    assert packed([forced]).ids_N.tolist() == [11]
    with pytest.raises(ValueError, match="sample a: rollout 0 contains token 14, which its sampling law bans"):
        packed([experience(A, (Author.POLICY, (11, 14)), law=law)])

"""Experiences to tensors: the layout by hand, and what is refused."""

from dataclasses import replace

import pytest
import torch

from mmrl.answer import Grammar
from mmrl.batch import Placeholders, PromptTensors, collate, collate_prompts, rows
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


def packed(experiences, *, shared_prefix):
    return collate(rows(experiences, shared_prefix=shared_prefix), Feed(), pad_id=PAD)


A, B = prompt("a", 1, IMAGE, 2), prompt("b", 3)
ONE = experience(A, (Author.POLICY, (11, 12)), advantage=0.5)
TWO = experience(A, (Author.POLICY, (13,)), (Author.TRIGGER, (14,)), (Author.POLICY, (15,)), advantage=-0.5)
OTHER = experience(B, (Author.TEACHER, (16, 17)), advantage=0.0)


def test_one_row_for_each_completion_by_hand():
    batch = packed([ONE, TWO, OTHER], shared_prefix=False)
    assert batch.ids_BL.tolist() == [[1, 9, 2, 11, 12, 0], [1, 9, 2, 13, 14, 15], [0, 0, 3, 16, 17, 0]]
    assert batch.mask.tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]]
    assert batch.positions_3BL[1].tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 0]]
    assert batch.types_BL.tolist() == [[0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0] * 6]
    assert batch.source_BC.tolist() == [[0, 1, 0], [0, 1, 2], [0, 1, 0]]
    assert batch.policy_BC.int().tolist() == [[1, 1, 0], [1, 0, 1], [0, 0, 0]]
    assert batch.teacher_BC.int().tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 0]]
    assert batch.old_logps_BC[1].tolist() == pytest.approx([-1.3, -1.4, -1.5])
    assert batch.advantages_BC.tolist() == [[0.5, 0.5, 0.0], [-0.5, -0.5, -0.5], [0.0, 0.0, 0.0]]
    assert batch.completion_ids_BC.tolist() == [[11, 12, 0], [13, 14, 15], [16, 17, 0]]
    assert batch.media.image_grids_I3.tolist() == [[1, 1, 1]] * 2
    assert batch.media.images_ND.tolist() == [[1.0, 1.0]] * 2


def test_siblings_share_their_prompt_by_hand():
    batch = packed([ONE, TWO, OTHER], shared_prefix=True)
    assert batch.ids_BL.tolist() == [[1, 9, 2, 11, 12, 13, 14, 15], [0, 0, 3, 16, 17, 0, 0, 0]]
    assert batch.positions_3BL[0].tolist() == [[0, 1, 2, 3, 4, 3, 4, 5], [0, 0, 0, 1, 2, 0, 0, 0]]
    # The first token of each completion is predicted by the prompt's last column, which is column 0 of those kept.
    assert batch.source_BC.tolist() == [[0, 1, 0, 3, 4], [0, 1, 0, 0, 0]]
    assert batch.advantages_BC[0].tolist() == [0.5, 0.5, -0.5, -0.5, -0.5]
    assert batch.media.image_grids_I3.tolist() == [[1, 1, 1]]
    assert batch.mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 1, 0, 0],
        [1, 1, 1, 0, 0, 1, 1, 0],
        [1, 1, 1, 0, 0, 1, 1, 1],
    ]
    assert batch.mask[1, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],
    ]


def test_rows_keep_the_order_of_first_appearance():
    later = experience(A, (Author.POLICY, (18,)))
    assert rows([ONE, OTHER, later], shared_prefix=True) == [[ONE, later], [OTHER]]
    assert rows([ONE, OTHER, later], shared_prefix=False) == [[ONE], [OTHER], [later]]


def test_prompts_alone_are_padded_on_the_left():
    batch = collate_prompts([A, B], Feed(), pad_id=PAD)
    assert batch.ids_BP.tolist() == [[1, 9, 2], [0, 0, 3]]
    assert batch.keep_BP.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch.positions_3BP[2].tolist() == [[0, 1, 2], [0, 0, 0]]


def test_text_alone_has_no_patches_and_no_grids():
    batch = packed([OTHER], shared_prefix=True)
    assert (len(batch.media.images_ND), batch.media.image_grids_I3.shape) == (0, (0, 3))


def test_moving_a_batch_keeps_everything():
    batch = packed([ONE, TWO], shared_prefix=True)
    moved = batch.to(torch.device("cpu"))
    assert moved.law == batch.law
    assert torch.equal(moved.mask, batch.mask)


def test_siblings_with_different_prompts_are_refused():
    stranger = experience(replace(A, digest="changed"), (Author.POLICY, (11,)))
    with pytest.raises(ValueError, match="prompt digest of a: siblings must share one prompt, got 2"):
        packed([ONE, stranger], shared_prefix=True)


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"banned": (4,)}])
def test_two_sampling_laws_in_a_batch_are_refused(change):
    stranger = experience(B, (Author.POLICY, (11,)), law=replace(LAW, **change))
    with pytest.raises(ValueError, match="one sampling law, got 2"):
        packed([ONE, stranger], shared_prefix=True)


def test_a_law_may_differ_in_length_alone():
    shorter = experience(B, (Author.POLICY, (11,)), law=replace(LAW, max_new_tokens=3))
    assert packed([ONE, shorter], shared_prefix=True).policy_BC.sum() == 3


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
    with pytest.raises(ValueError, match=f"completion contains the placeholder {token}"):
        packed([experience(A, (Author.POLICY, (11, token)))], shared_prefix=True)

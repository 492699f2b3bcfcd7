"""The nouns: frozen data that crosses rooms. Standard library only.

A run is a chain of these, each made from the one before:

    Sample ──ask──► Prompt ──answer──► Rollout ──judge──► Group ──choose──► Experience ──learn──► weights

Example, one counting question on its way through the loop:

    Sample(id="count-7", task="count", parts=(ImageRef(path="7.png", sha256="ab.."), "How many red dots?"),
           target=Target(kind=Kind.NUMBER, value=3))
    Prompt(sample=..., ids=(5, 9, 9, ..), grids=((1, 6, 6),), resizes=(ResizeMap((48, 48), (48, 48)),), ..)
    Rollout(prompt=..., index=0, segments=(Segment(ids=(41, 3), logps=(-0.2, -1.1), author=Author.POLICY),), ..)
    Score(terms={"count": Term(0.0, "2, expected 3")}, total=0.0)
    Group(prompt=..., rollouts=(.., ..), scores=(.., ..))
    Experience(rollout=..., advantage=-0.7)
"""

from mmrl.types.errors import PromptTooLongError, RunInterrupted, Unscorable, UserError
from mmrl.types.experience import Experience, SelectedExperiences
from mmrl.types.media import (
    ContentPart,
    CoordinateSystem,
    Corruption,
    DatasetContext,
    ImageRef,
    MediaPolicy,
    MediaRef,
    ResizeMap,
    Size,
    VideoRef,
)
from mmrl.types.reward import Dropped, EvalRewards, Group, RewardErrorKind, RewardFailure, RewardValue, Score
from mmrl.types.rollout import (
    Answer,
    Author,
    FinishReason,
    MediaObservation,
    Prompt,
    Response,
    Rollout,
    RolloutBatch,
    SamplingParams,
    Segment,
)
from mmrl.types.sample import Action, AnswerType, Region, RejectedRow, Sample, Target
from mmrl.types.state import SampleStats, TrainingState

__all__ = [
    "Action",
    "Answer",
    "AnswerType",
    "Author",
    "ContentPart",
    "CoordinateSystem",
    "Corruption",
    "DatasetContext",
    "Dropped",
    "EvalRewards",
    "Experience",
    "FinishReason",
    "Group",
    "ImageRef",
    "MediaObservation",
    "MediaPolicy",
    "MediaRef",
    "Prompt",
    "PromptTooLongError",
    "Region",
    "RejectedRow",
    "ResizeMap",
    "Response",
    "RewardErrorKind",
    "RewardFailure",
    "RewardValue",
    "Rollout",
    "RolloutBatch",
    "RunInterrupted",
    "Sample",
    "SampleStats",
    "SamplingParams",
    "Score",
    "Segment",
    "SelectedExperiences",
    "Size",
    "Target",
    "TrainingState",
    "Unscorable",
    "UserError",
    "VideoRef",
]

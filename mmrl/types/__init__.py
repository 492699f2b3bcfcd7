"""The data that passes between packages, frozen but for `TrainingState`. They need the standard library alone.

Each is made from the one before it, by the part of the loop that is named above the arrow:

    Sample ──prompt──► Prompt ──rollout──► Rollout ──score──► Group ──select──► Experience ──learn──► new weights

    noun          made by                         module          holds
    Sample        a dataset function              sample          question, media references, Target
    Prompt        ports.PromptBuilder             rollout         the sample's tokens, grids, digest
    Rollout       ports.RolloutPipeline           rollout         Segments of tokens, each with its Author
    Group         ports.RewardScorer              rollout         a prompt's rollouts, a Score for each
    Experience    ports.ExperienceSelector        state           a rollout with its advantage
    TrainingState the loop, step by step          state           all that a checkpoint adds to weights and optimizer

`errors` has what may be raised across packages. Example, one counting question on its way through the loop:

    Sample(id="count-7", task="count", parts=(ImageRef(path="7.png", sha256="ab.."), "How many red dots?"),
           target=Target(answer_type=AnswerType.NUMBER, value=3))
    Prompt(sample=..., token_ids=(5, 9, 9, ..), grids=((1, 6, 6),), resize_maps=(ResizeMap((48, 48), (48, 48)),), ..)
    Segment(token_ids=(41, 3), logprobs=(-0.2, -1.1), author=Author.POLICY, version=12)
    Rollout(prompt=..., index=0, segments=(.., ..), text="2", ..)
    Score(terms={"count": RewardValue(0.0, "2, expected 3")}, total=0.0)
    Group(prompt=..., rollouts=(.., ..), scores=(.., ..))
    Experience(rollout=..., advantage=-0.7)
"""

from mmrl.types.errors import PromptTooLongError, RunInterrupted, Unscorable, UserError
from mmrl.types.rollout import (
    TRAINED_AUTHORS,
    Answer,
    Author,
    Dropped,
    EvalRewards,
    FinishReason,
    Group,
    MediaObservation,
    Prompt,
    Response,
    RewardErrorKind,
    RewardFailure,
    RewardValue,
    Rollout,
    RolloutBatch,
    SamplingParams,
    Score,
    Segment,
)
from mmrl.types.sample import (
    Action,
    AnswerType,
    ContentPart,
    CoordinateSystem,
    Corruption,
    DatasetContext,
    ImageRef,
    MediaPolicy,
    MediaRef,
    Region,
    RejectedRow,
    ResizeMap,
    Sample,
    Size,
    Target,
    VideoRef,
)
from mmrl.types.state import Experience, SampleStats, SelectedExperiences, TrainingState

__all__ = [
    "TRAINED_AUTHORS",
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

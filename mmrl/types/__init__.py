"""The data that passes between packages, frozen except for `TrainingState`. Needs only the standard library.

Each is made from the one before it, by the part of the loop that the arrow names:

    Sample ──prompt──► Prompt ──rollout──► Rollout ──score──► Group ──select──► Experience ──learn──► new weights

    type           made by                     module   holds
    Sample         a dataset function          sample   question, media references, Target
    Prompt         protocols.Processor         rollout  the sample's tokens, grids, digest
    Rollout        protocols.RolloutPipeline   rollout  Segments of tokens, each with its Author
    Group          protocols.RewardScorer      rollout  a prompt's rollouts, a Score for each
    Experience     protocols.Selector          state    a rollout with its advantage
    TrainingState  the loop, step by step      state    all that a checkpoint adds to weights and optimizer

`environment` defines what tools and environments show, and `errors` the exceptions that cross packages. As an example,
one counting question in the loop:

    Sample(id="count-7", task="count", parts=(ImageRef(path="7.png", sha256="ab.."), "How many red dots?"),
           target=Target(answer_type=AnswerType.NUMBER, value=3))
    Prompt(sample=..., token_ids=(5, 9, 9, ..), grids=((1, 6, 6),), resize_maps=(ResizeMap((48, 48), (48, 48)),), ..)
    Segment(token_ids=(41, 3), logprobs=(-0.2, -1.1), author=Author.POLICY, version=12)
    Rollout(prompt=..., index=0, segments=(.., ..), text="2", ..)
    Score(terms={"count": RewardValue(0.0, "2, expected 3")}, total=0.0)
    Group(prompt=..., rollouts=(.., ..), scores=(.., ..))
    Experience(rollout=..., advantage=-0.7)
"""

from mmrl.types.environment import LAST_MEDIUM as LAST_MEDIUM
from mmrl.types.environment import Environment as Environment
from mmrl.types.environment import ImageCrop as ImageCrop
from mmrl.types.environment import MediaResult as MediaResult
from mmrl.types.environment import Observation as Observation
from mmrl.types.environment import StepResult as StepResult
from mmrl.types.environment import Turn as Turn
from mmrl.types.environment import VideoClip as VideoClip
from mmrl.types.environment import VideoFrames as VideoFrames
from mmrl.types.errors import FunctionCall as FunctionCall
from mmrl.types.errors import MediaError as MediaError
from mmrl.types.errors import MediaRangeError as MediaRangeError
from mmrl.types.errors import PromptTooLongError as PromptTooLongError
from mmrl.types.errors import RunInterrupted as RunInterrupted
from mmrl.types.errors import Unscorable as Unscorable
from mmrl.types.errors import UserError as UserError
from mmrl.types.rollout import TRAINED_AUTHORS as TRAINED_AUTHORS
from mmrl.types.rollout import Answer as Answer
from mmrl.types.rollout import Author as Author
from mmrl.types.rollout import Contribution as Contribution
from mmrl.types.rollout import Dropped as Dropped
from mmrl.types.rollout import EvalRewards as EvalRewards
from mmrl.types.rollout import ExpertRoutes as ExpertRoutes
from mmrl.types.rollout import Failure as Failure
from mmrl.types.rollout import FailureKind as FailureKind
from mmrl.types.rollout import FinishReason as FinishReason
from mmrl.types.rollout import Group as Group
from mmrl.types.rollout import MediaObservation as MediaObservation
from mmrl.types.rollout import Prompt as Prompt
from mmrl.types.rollout import Response as Response
from mmrl.types.rollout import RewardValue as RewardValue
from mmrl.types.rollout import Rollout as Rollout
from mmrl.types.rollout import RolloutBatch as RolloutBatch
from mmrl.types.rollout import SamplingParams as SamplingParams
from mmrl.types.rollout import Score as Score
from mmrl.types.rollout import Segment as Segment
from mmrl.types.sample import Action as Action
from mmrl.types.sample import AnswerType as AnswerType
from mmrl.types.sample import ContentPart as ContentPart
from mmrl.types.sample import CoordinateSystem as CoordinateSystem
from mmrl.types.sample import Corruption as Corruption
from mmrl.types.sample import DatasetContext as DatasetContext
from mmrl.types.sample import ImageRef as ImageRef
from mmrl.types.sample import MediaOpener as MediaOpener
from mmrl.types.sample import MediaPolicy as MediaPolicy
from mmrl.types.sample import MediaRef as MediaRef
from mmrl.types.sample import Region as Region
from mmrl.types.sample import RejectedRow as RejectedRow
from mmrl.types.sample import ResizeMap as ResizeMap
from mmrl.types.sample import Sample as Sample
from mmrl.types.sample import Size as Size
from mmrl.types.sample import Target as Target
from mmrl.types.sample import VideoRef as VideoRef
from mmrl.types.sample import use_media_opener as use_media_opener
from mmrl.types.state import Experience as Experience
from mmrl.types.state import GroupSelection as GroupSelection
from mmrl.types.state import SampleStats as SampleStats
from mmrl.types.state import SelectedExperiences as SelectedExperiences
from mmrl.types.state import TokenValues as TokenValues
from mmrl.types.state import TrainingState as TrainingState
from mmrl.types.state import WorstToken as WorstToken

"""mmrl: reinforcement fine-tuning of Qwen's vision-language models on verifiable visual rewards.

The names below are public: programs, notebooks and plug-ins import them from here. docs/python.md lists them. A module
is imported when one of its names is first used, so that `import mmrl` takes milliseconds and loads no torch.
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmrl.api.evaluate import Evaluation as Evaluation
    from mmrl.api.evaluate import evaluate as evaluate
    from mmrl.api.policy import Generation as Generation
    from mmrl.api.policy import Policy as Policy
    from mmrl.api.train import TrainResult as TrainResult
    from mmrl.api.train import train as train
    from mmrl.benchmarks.benchmark import Benchmark as Benchmark
    from mmrl.benchmarks.extraction.text import Extraction as Extraction
    from mmrl.benchmarks.items import Item as Item
    from mmrl.benchmarks.items import ItemResponse as ItemResponse
    from mmrl.benchmarks.readers.table_layout import TableLayout as TableLayout
    from mmrl.config import Config as Config
    from mmrl.config import LoadedConfig as LoadedConfig
    from mmrl.config import load_config as load_config
    from mmrl.config.schema import Component as Component
    from mmrl.log.metric_registry import Metric as Metric
    from mmrl.media.pixel_reader import PixelReader as PixelReader
    from mmrl.policy.batch import BatchMedia as BatchMedia
    from mmrl.policy.expert_routing import encode_routes as encode_routes
    from mmrl.policy.families import ImageFormat as ImageFormat
    from mmrl.policy.families import ModelFamily as ModelFamily
    from mmrl.policy.families import PlaceholderRun as PlaceholderRun
    from mmrl.policy.families import VideoTimeEncoding as VideoTimeEncoding
    from mmrl.protocols import Sampler as Sampler
    from mmrl.rollout.engines.base import EngineContext as EngineContext
    from mmrl.rollout.engines.base import GenerationRequest as GenerationRequest
    from mmrl.rollout.engines.base import RolloutEngine as RolloutEngine
    from mmrl.rollout.engines.hf import HfEngine as HfEngine
    from mmrl.rollout.environments.gymnasium import GymnasiumEnvironment as GymnasiumEnvironment
    from mmrl.rollout.responses import GeneratedTokens as GeneratedTokens
    from mmrl.rollout.responses import append_generated as append_generated
    from mmrl.rollout.responses import empty_rollout as empty_rollout
    from mmrl.rollout.steps.base import RolloutContext as RolloutContext
    from mmrl.rollout.steps.base import RolloutStep as RolloutStep
    from mmrl.rollout.steps.base import add_metrics as add_metrics
    from mmrl.rollout.weight_sync import PolicyWeightStream as PolicyWeightStream
    from mmrl.training.build import RunComponents as RunComponents
    from mmrl.training.callbacks import Callback as Callback
    from mmrl.training.callbacks import TrainStepResult as TrainStepResult
    from mmrl.types import LAST_MEDIUM as LAST_MEDIUM
    from mmrl.types import Action as Action
    from mmrl.types import Answer as Answer
    from mmrl.types import AnswerType as AnswerType
    from mmrl.types import Author as Author
    from mmrl.types import CoordinateSystem as CoordinateSystem
    from mmrl.types import DatasetContext as DatasetContext
    from mmrl.types import Environment as Environment
    from mmrl.types import Experience as Experience
    from mmrl.types import FinishReason as FinishReason
    from mmrl.types import Group as Group
    from mmrl.types import ImageCrop as ImageCrop
    from mmrl.types import ImageRef as ImageRef
    from mmrl.types import MediaPolicy as MediaPolicy
    from mmrl.types import MediaRangeError as MediaRangeError
    from mmrl.types import Observation as Observation
    from mmrl.types import Prompt as Prompt
    from mmrl.types import Region as Region
    from mmrl.types import RejectedRow as RejectedRow
    from mmrl.types import ResizeMap as ResizeMap
    from mmrl.types import Response as Response
    from mmrl.types import RewardValue as RewardValue
    from mmrl.types import Rollout as Rollout
    from mmrl.types import RolloutBatch as RolloutBatch
    from mmrl.types import Sample as Sample
    from mmrl.types import SamplingParams as SamplingParams
    from mmrl.types import Score as Score
    from mmrl.types import Segment as Segment
    from mmrl.types import SelectedExperiences as SelectedExperiences
    from mmrl.types import Size as Size
    from mmrl.types import StepResult as StepResult
    from mmrl.types import Target as Target
    from mmrl.types import TrainingState as TrainingState
    from mmrl.types import Turn as Turn
    from mmrl.types import Unscorable as Unscorable
    from mmrl.types import UserError as UserError
    from mmrl.types import VideoClip as VideoClip
    from mmrl.types import VideoFrames as VideoFrames
    from mmrl.types import VideoRef as VideoRef
    from mmrl.types import use_media_opener as use_media_opener
    from mmrl_rewards.contract import TurnRewards as TurnRewards
    from mmrl_rewards.contract import reward as reward

__version__ = "0.2.0"


@cache
def _modules() -> dict[str, str]:
    """Return the module of each public name, as the imports above name it: only type checkers run them."""
    import ast

    modules: dict[str, str] = {}
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {alias.name: node.module for alias in node.names if alias.asname}
    return modules


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _modules():
        raise AttributeError(f"module 'mmrl' has no attribute {name!r}")
    value: object = getattr(import_module(_modules()[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, for completion in notebooks and editors."""
    return sorted([*globals(), *_modules()])

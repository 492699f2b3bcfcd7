"""Settings of `mmrl eval run MODEL key=value ...`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmrl.config.schema.base import NonNegativeInt, PositiveFraction, PositiveInt, StrictModel
from mmrl.config.schema.data import MediaLimitsConfig
from mmrl.config.schema.evaluation import EvalGenerationConfig
from mmrl.config.schema.model import ModelConfig
from mmrl.config.schema.response import ResponseFormatConfig
from mmrl.config.schema.rollout_engine import RolloutConfig


class EvalRunConfig(StrictModel):
    """Settings apart from the model and its responses."""

    seed: NonNegativeInt = 0
    """Seed that every random choice derives from."""
    cpu_threads: NonNegativeInt = 0
    """CPU threads; 0 is one per core."""


class LlmJudgeConfig(StrictModel):
    """A language model that reads responses in which no rule finds an answer; it never overrules a rule."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$")]
    """URL of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1/chat/completions."""
    model: str
    """Name of the model on that server."""
    key_file: str | None = None
    """File that holds the bearer token."""
    timeout_s: Annotated[float, Field(gt=0.0, le=3600.0)] = 60.0
    """Seconds that one request may take."""
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    """Retries of a failed request, with growing pauses. A response that still has no verdict then is counted."""
    max_tokens: PositiveInt = 512
    """Tokens of the judge's longest reply."""
    max_concurrency: PositiveInt = 8
    """Requests in flight at a time."""


class EvalConfig(StrictModel):
    """Settings of `mmrl eval run`. For a run directory they start from the run's own config."""

    run: EvalRunConfig = EvalRunConfig()
    """Seed and threads."""
    model: ModelConfig
    """The model, and the size of the images it sees."""
    response_format: ResponseFormatConfig = ResponseFormatConfig()
    """Format of responses. `response_format.thinking=required` lets the model think, `none` does not."""
    rollout: RolloutConfig = RolloutConfig()
    """The engine that generates responses."""
    evaluation: EvalGenerationConfig = EvalGenerationConfig()
    """Generation: temperature, longest response, batches, and rollout steps such as forced rethinking, whose
    `correct: [correct]` names the benchmark's verdict."""
    media_limits: MediaLimitsConfig = MediaLimitsConfig()
    """Safety limits on media."""
    responses_per_question: PositiveInt = 1
    """Responses to each question, for pass@k and maj@k."""
    top_p: PositiveFraction = 1.0
    """Nucleus sampling: the smallest set of tokens with this probability."""
    top_k: NonNegativeInt = 0
    """Sample among the k most likely tokens; 0 is all."""
    corruption: Literal["grey", "noise", "left_out"] | None = None
    """Hide the images and videos: a question that is still answered correctly was guessed."""
    judge: LlmJudgeConfig | None = None
    """The judge of responses in which no rule finds an answer; none when left out."""

    @property
    def stages(self) -> tuple[()]:
        """The stages of an evaluation: none, as nothing is trained."""
        return ()

    @model_validator(mode="after")
    def _check_sampling_not_greedy(self) -> EvalConfig:
        if self.responses_per_question > 1 and not self.evaluation.temperature:
            raise ValueError(
                f"all {self.responses_per_question} responses to a question are the same at temperature 0; set "
                "evaluation.temperature=1"
            )
        return self

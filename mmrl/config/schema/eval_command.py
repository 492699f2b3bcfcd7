"""How a benchmark is taken: a model, how its prompts and responses look, and the law that responses are drawn from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmrl.config.schema.base import NonNegativeInt, PositiveInt, StrictModel
from mmrl.config.schema.data import MediaLimitsConfig
from mmrl.config.schema.evaluation import EvalGenerationConfig
from mmrl.config.schema.model import ModelConfig
from mmrl.config.schema.response import ResponseFormatConfig
from mmrl.config.schema.rollout_engine import RolloutConfig


class EvalRunConfig(StrictModel):
    """What is not about the model."""

    seed: NonNegativeInt = 0
    """Every random choice derives from it."""
    cpu_threads: NonNegativeInt = 0
    """CPU threads; 0 takes one per core."""


class LlmJudgeConfig(StrictModel):
    """A language model, asked about responses in which no rule finds an answer; it never overrules one."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$")]
    """Of an OpenAI-compatible server's /chat/completions, such as http://127.0.0.1:8000/v1/chat/completions."""
    model: str
    """Its name there."""
    key_file: str | None = None
    """File that holds the bearer token."""
    timeout_s: Annotated[float, Field(gt=0.0, le=3600.0)] = 60.0
    """Seconds for one answer."""
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    """Further tries, with growing pauses; a response of which it then still says nothing is counted."""
    max_tokens: PositiveInt = 512
    """Longest answer of the judge."""
    max_concurrency: PositiveInt = 8
    """Requests under way at a time."""


class EvalConfig(StrictModel):
    """The settings of `mmrl eval MODEL`. Those of a run are the run's own, unless they are set."""

    run: EvalRunConfig = EvalRunConfig()
    """Seed and threads."""
    model: ModelConfig
    """The model, and how large it sees pictures."""
    response_format: ResponseFormatConfig = ResponseFormatConfig()
    """How responses are asked for and read: `answer.think=required` lets it think, `answer.think=none` does not."""
    rollout: RolloutConfig = RolloutConfig()
    """What draws responses."""
    evaluation: EvalGenerationConfig = EvalGenerationConfig()
    """Temperature, longest response, batches, and what is done with a prompt: forced rethinking, for example, with
    `correct: [right]`, the verdict of the benchmark."""
    media_limits: MediaLimitsConfig = MediaLimitsConfig()
    """Safety limits on media."""
    responses_per_question: PositiveInt = 1
    """Responses to each question, for pass@k and maj@k."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling: the smallest set of tokens with this probability."""
    top_k: NonNegativeInt = 0
    """Sample among so many tokens; 0 is all."""
    corruption: Literal["grey", "noise", "left_out"] | None = None
    """Hide the pictures and videos: what is then still right, was guessed."""

    judge: LlmJudgeConfig | None = None
    """Who is asked where rules abstain. Nobody, when left out."""

    @property
    def stages(self) -> tuple[()]:
        """Nothing is trained."""
        return ()

    @model_validator(mode="after")
    def _check_sampling_not_greedy(self) -> EvalConfig:
        if self.responses_per_question > 1 and not self.evaluation.temperature:
            raise ValueError(
                f"samples {self.responses_per_question} of a greedy law are all the same; set evaluation.temperature=1"
            )
        return self

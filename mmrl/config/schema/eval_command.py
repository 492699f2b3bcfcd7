"""How a benchmark is taken: a model, how its prompts and responses look, and the law that responses are drawn from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mmrl.config.schema.base import Count, Positive, Strict
from mmrl.config.schema.data import Limits
from mmrl.config.schema.evaluation import Evaluation
from mmrl.config.schema.model import Model
from mmrl.config.schema.response import AnswerGrammar
from mmrl.config.schema.rollout_engine import Rollouts


class ExamRun(Strict):
    """What is not about the model."""

    seed: Count = 0
    """Every random choice derives from it."""
    threads: Count = 0
    """CPU threads; 0 takes one per core."""


class ExamJudge(Strict):
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
    max_tokens: Positive = 512
    """Longest answer of the judge."""
    at_once: Positive = 8
    """Requests under way at a time."""


class Exam(Strict):
    """The settings of `mmrl eval MODEL`. Those of a run are the run's own, unless they are set."""

    run: ExamRun = ExamRun()
    """Seed and threads."""
    model: Model
    """The model, and how large it sees pictures."""
    answer: AnswerGrammar = AnswerGrammar()
    """How responses are asked for and read: `answer.think=required` lets it think, `answer.think=none` does not."""
    rollout: Rollouts = Rollouts()
    """What draws responses."""
    evaluation: Evaluation = Evaluation()
    """Temperature, longest response, batches, and what is done with a prompt: forced rethinking, for example, with
    `correct: [right]`, the verdict of the benchmark."""
    limits: Limits = Limits()
    """Safety limits on media."""
    samples: Positive = 1
    """Responses to each question, for pass@k and maj@k."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling: the smallest set of tokens with this probability."""
    top_k: Count = 0
    """Sample among so many tokens; 0 is all."""
    blind: Literal["grey", "noise", "left_out"] | None = None
    """Hide the pictures and videos: what is then still right, was guessed."""

    judge: ExamJudge | None = None
    """Who is asked where rules abstain. Nobody, when left out."""

    @property
    def stages(self) -> tuple[()]:
        """Nothing is trained."""
        return ()

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Exam:
        if self.samples > 1 and not self.evaluation.temperature:
            raise ValueError(f"samples {self.samples} of a greedy law are all the same; set evaluation.temperature=1")
        return self

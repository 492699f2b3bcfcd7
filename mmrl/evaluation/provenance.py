"""What an evaluation is of, so that no other is taken for it; and how its responses were made, for the report."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.benchmarks.predictions import Prediction
from mmrl.benchmarks.readers.questions import Questions
from mmrl.config import Exam, settings
from mmrl.policy.build import grammar_of


def made_of(bench: str, revision: str, questions: Questions, exam: Exam) -> dict[str, Any]:
    """All that decides the responses: `revision` tells the model's weights from others."""
    law = settings(exam.model_dump(mode="json", exclude={"model": {"path"}, "judge": True}))
    return {"bench": bench, "model": revision, "data": questions.digest(), **law}


def made_with(
    model: str,
    data: Sequence[str],
    of: Mapping[str, Any],
    exam: Exam,
    *,
    questions: Questions,
    predictions: Sequence[Prediction],
) -> dict[str, Any]:
    """How the responses were made, by `model` as people call it."""
    law = exam.evaluation
    return {
        "model": model,
        "revision": of["model"],
        "data": list(data),
        "data_sha256": of["data"],
        "left_out": questions.left_out,
        "pixels": [exam.model.min_pixels, exam.model.max_pixels],
        "dtype": exam.model.dtype,
        "engine": exam.rollout.engine,
        "temperature": law.temperature,
        "top_p": exam.top_p,
        "top_k": exam.top_k,
        "max_new_tokens": law.max_new_tokens,
        "stop": list(grammar_of(exam).stop),
        "samples": exam.samples,
        "seed": exam.run.seed,
        "answer": exam.answer.model_dump(mode="json"),
        "program": [step.model_dump(mode="json") for step in law.program],
        "blind": exam.blind,
        "prompts": _prompts(predictions),
    }


def _prompts(predictions: Sequence[Prediction]) -> str:
    """A hash over everything that the model read: words, pictures, positions."""
    return hashlib.sha256("".join(one.prompt for one in predictions).encode()).hexdigest()

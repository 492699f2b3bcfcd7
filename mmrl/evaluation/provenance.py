"""What an evaluation is of, so that no other is taken for it; and how its responses were made, for the report."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.benchmarks.predictions import Prediction
from mmrl.benchmarks.readers.questions import BenchmarkQuestions
from mmrl.config import EvalConfig, flatten_settings
from mmrl.policy.build import build_response_format


def evaluation_identity(
    benchmark: str, revision: str, questions: BenchmarkQuestions, eval_config: EvalConfig
) -> dict[str, Any]:
    """All that decides the responses: `revision` tells the model's weights from others."""
    law = flatten_settings(eval_config.model_dump(mode="json", exclude={"model": {"path"}, "judge": True}))
    return {"benchmark": benchmark, "model": revision, "data": questions.digest(), **law}


def describe_generation(
    model: str,
    data_files: Sequence[str],
    identity: Mapping[str, Any],
    eval_config: EvalConfig,
    *,
    questions: BenchmarkQuestions,
    predictions: Sequence[Prediction],
) -> dict[str, Any]:
    """How the responses were made, by `model` as people call it."""
    law = eval_config.evaluation
    return {
        "model": model,
        "revision": identity["model"],
        "data": list(data_files),
        "data_sha256": identity["data"],
        "left_out": questions.num_unscorable,
        "pixels": [eval_config.model.min_pixels, eval_config.model.max_pixels],
        "dtype": eval_config.model.dtype,
        "engine": eval_config.rollout.engine_name,
        "temperature": law.temperature,
        "top_p": eval_config.top_p,
        "top_k": eval_config.top_k,
        "max_new_tokens": law.max_new_tokens,
        "stop": list(build_response_format(eval_config).all_stop_strings),
        "samples": eval_config.responses_per_question,
        "seed": eval_config.run.seed,
        "response_format": eval_config.response_format.model_dump(mode="json"),
        "rollout_steps": [step.model_dump(mode="json") for step in law.rollout_steps],
        "blind": eval_config.corruption,
        "prompts": _prompts_digest(predictions),
    }


def _prompts_digest(predictions: Sequence[Prediction]) -> str:
    """A hash over everything that the model read: words, pictures, positions."""
    return hashlib.sha256("".join(one.prompt_digest for one in predictions).encode()).hexdigest()

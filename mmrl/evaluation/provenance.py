"""Facts that identify an evaluation, and those that a report tells about how its responses were made."""

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
    """Return everything that decides the responses, so that no folder mixes two evaluations.

    Args:
        benchmark: name of the benchmark.
        revision: hash of the model's weights.
        questions: what is asked.
        eval_config: settings; the model's path and the judge are left out, which change no response.
    """
    settings = flatten_settings(eval_config.model_dump(mode="json", exclude={"model": {"path"}, "judge": True}))
    return {"benchmark": benchmark, "model": revision, "data": questions.digest(), **settings}


def describe_generation(
    model: str,
    data_files: Sequence[str],
    identity: Mapping[str, Any],
    eval_config: EvalConfig,
    *,
    questions: BenchmarkQuestions,
    predictions: Sequence[Prediction],
) -> dict[str, Any]:
    """Return the `generation` section of a report.

    Args:
        model: name of the model as the user gave it.
        data_files: files of the benchmark as the user gave them.
        identity: result of `evaluation_identity`.
        eval_config: settings.
        questions: what was asked.
        predictions: all responses.
    """
    generation = eval_config.evaluation
    return {
        "model": model,
        "revision": identity["model"],
        "data": list(data_files),
        "data_sha256": identity["data"],
        "left_out": questions.num_unscorable,
        "pixels": [eval_config.model.min_pixels, eval_config.model.max_pixels],
        "dtype": eval_config.model.dtype,
        "engine": eval_config.rollout.engine_name,
        "temperature": generation.temperature,
        "top_p": eval_config.top_p,
        "top_k": eval_config.top_k,
        "max_new_tokens": generation.max_new_tokens,
        "stop": list(build_response_format(eval_config).all_stop_strings),
        "responses_per_question": eval_config.responses_per_question,
        "seed": eval_config.run.seed,
        "response_format": eval_config.response_format.model_dump(mode="json"),
        "rollout_steps": [step.model_dump(mode="json") for step in generation.rollout_steps],
        "corruption": eval_config.corruption,
        "prompts": _prompts_digest(predictions),
    }


def _prompts_digest(predictions: Sequence[Prediction]) -> str:
    """Return a hash of everything that the model read: text, images and positions."""
    return hashlib.sha256("".join(prediction.prompt_digest for prediction in predictions).encode()).hexdigest()

"""Builds requests to vLLM and reads its replies, in this process or from a server. Imports without vLLM.

Letters in shapes: T tokens, L layers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmrl.policy.expert_routing import encode_routes
from mmrl.rollout.engines.base import GenerationRequest
from mmrl.rollout.responses import GeneratedTokens
from mmrl.types import ExpertRoutes, FinishReason, SamplingParams, UserError

# vLLM reads a seed as a signed 64-bit number and gives sibling i the seed plus i; the bound leaves room for both.
_SEED_LIMIT = 2**62

# The least bias that vLLM accepts. It leaves a banned token e^-100 of its probability, which is nothing in float32.
_BANNED_LOGIT_BIAS = -100.0

START_PROMPT, START_SAMPLING = [0, 0], {"max_tokens": 2, "ignore_eos": True}
"""Prompt and sampling of a trial request at startup: kernels that cannot run the model fail then and not in training.
One token is too few: vLLM 0.32's recurrent layers refuse such a prompt on CPUs with AVX512-BF16.
"""


def sampling_arguments(request: GenerationRequest, sampling_params: SamplingParams, eos_id: int) -> dict[str, Any]:
    """Return the fields of vLLM's `SamplingParams` for a request."""
    return {
        "n": request.num_samples,
        "seed": request.seed % _SEED_LIMIT,
        "temperature": sampling_params.temperature,
        "top_p": sampling_params.top_p,
        "top_k": sampling_params.top_k,
        "max_tokens": sampling_params.max_new_tokens,
        "logprobs": 0,  # only of the sampled token
        "logit_bias": dict.fromkeys(sampling_params.banned_token_ids, _BANNED_LOGIT_BIAS),
        "stop": list(sampling_params.stop),
        "stop_token_ids": [eos_id],
        # A model's generation config may name more end tokens than the one that ends a response here.
        "ignore_eos": True,
        "detokenize": bool(sampling_params.stop),
    }


def parse_completion(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str | None,
    stop_reason: object,
    *routes: ExpertRoutes,
) -> GeneratedTokens:
    """Read one completion of vLLM: token ids with the end token, and log-probabilities in nats.

    `finish_reason` is vLLM's own; `stop_reason` is the stop string that ended it, or the id of the end token. `routes`
    are those of the prompt and of the response, if they are recorded.

    Raises:
        RuntimeError: the completion was aborted, or has no token.
    """
    reason: FinishReason | None = None
    match finish_reason:
        case "length":
            reason = FinishReason.LENGTH
        case "stop":
            reason = FinishReason.STOP if isinstance(stop_reason, str) else FinishReason.EOS
    if reason is None or not token_ids or len(token_ids) != len(logprobs):
        raise RuntimeError(
            f"the rollout engine gave {len(token_ids)} tokens, finished by {finish_reason!r}: they are not a response"
        )
    return GeneratedTokens(tuple(token_ids), tuple(logprobs), reason, *routes)


def read_routes(
    routed_TLK: np.ndarray[Any, Any] | None, num_prompt_tokens: int, layers: Sequence[int]
) -> tuple[ExpertRoutes, ExpertRoutes] | tuple[()]:
    """Return the routes of a prompt, and those of its response without the last token, from vLLM's `routed_experts`.

    Args:
        routed_TLK: numbers of experts, [tokens of prompt and response but the last, all layers, K].
        num_prompt_tokens: tokens of the prompt.
        layers: numbers of the layers that have experts; vLLM leaves rows of zeros for the others. Empty if no routes
            are wanted; the result is then empty.

    Raises:
        UserError: vLLM returned no routes, or routes of a model with fewer layers.
    """
    if not layers:
        return ()
    if routed_TLK is None:
        raise UserError(
            "loss.routing_replay: engine: vLLM returned no routes; start servers of your own with "
            "--enable-return-routed-experts (docs/vllm.md), or set loss.routing_replay: learner"
        )
    if max(layers) >= routed_TLK.shape[1]:
        raise UserError(
            f"loss.routing_replay: engine: vLLM returned routes of {routed_TLK.shape[1]} layers, and the policy has "
            f"experts in layer {max(layers)}; start the engine with the model that is trained"
        )
    # The width of the unsigned type that vLLM chose bounds the number of experts.
    routes = encode_routes(routed_TLK[:, list(layers)], 2 ** (8 * routed_TLK.dtype.itemsize))
    return routes.cut(0, num_prompt_tokens), routes.cut(num_prompt_tokens, routes.num_tokens)

"""Speed of rollouts by vLLM compared with vLLM alone, cost of a weight sync, and engine minus learner.

    python tools/bench/rollout_vllm.py            # in float32
    python tools/bench/rollout_vllm.py --dtype bfloat16

Ours is `EngineSampler.generate`: from prompts to rollouts with text and parsed answers. By turns, the same
requests go straight to vLLM's engine: inputs and parameters are ready, answers are not parsed. Seconds are CPU time of
this process on a CPU, where all runs in one process, and wall-clock on a GPU. Questions are a picture each, of
the `counting` scenes; the model is a Qwen2.5-VL with random weights.
"""

from __future__ import annotations

import argparse
import json
import operator
import tempfile
import time
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from results import make_parser, write_results

from mmrl.answer import ResponseFormat
from mmrl.checkpoint import export_hf_folder
from mmrl.config.schema import (
    FromScratchConfig,
    LanguageFromScratchConfig,
    MediaLimitsConfig,
    VideoConfig,
    VisionFromScratchConfig,
    VllmConfig,
)
from mmrl.distributed.ranks import SingleProcess
from mmrl.media.cache import MediaCache
from mmrl.policy.batch import collate, group_by_prompt
from mmrl.policy.encoder import PromptEncoder
from mmrl.policy.families import get_family
from mmrl.policy.policy import PolicyModel, banned_ids
from mmrl.policy.pretrained import ProcessorBundle
from mmrl.policy.processor import PromptProcessor
from mmrl.policy.tiny_models import make_model, make_processor, train_tokenizer
from mmrl.rollout.engine_sampler import EngineSampler
from mmrl.rollout.engines.base import EngineContext, GenerationRequest
from mmrl.rollout.engines.vllm_colocated import VllmEngine
from mmrl.rollout.engines.vllm_requests import sampling_arguments
from mmrl.rollout.engines.vllm_start import build_engine_args
from mmrl.rollout.engines.vllm_weights import check_weights_arrived
from mmrl.rollout.responses import empty_rollout
from mmrl.rollout.weight_sync import PolicyWeightStream, fingerprint
from mmrl.types import DatasetContext, Experience, MediaPolicy, Rollout, SamplingParams
from mmrl_datasets.generators import scenes

SCRATCH = FromScratchConfig(
    vision=VisionFromScratchConfig(hidden_size=128, num_heads=4, intermediate_size=256),
    language=LanguageFromScratchConfig(
        hidden_size=256, num_heads=4, num_kv_heads=2, intermediate_size=1024, num_layers=6
    ),
)

MAX_SEQUENCE_TOKENS = 2048


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        numbers = measure_all(asked, Path(folder))
    print(json.dumps(numbers, indent=1))
    write_results(asked.json, "rollout_vllm", numbers)


def measure_all(cli_args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    place = DatasetContext(work_dir=folder, base_dir=folder, seed=0)
    samples = list(scenes.counting(place, split="train", size=cli_args.prompts))
    response_format = ResponseFormat()
    texts = [part for sample in samples for part in sample.parts if isinstance(part, str)]
    tokenizer = train_tokenizer(
        [*texts, *(response_format.render(sample.target) for sample in samples)], SCRATCH.language.vocab_size
    )
    model = make_model(SCRATCH, tokenizer, seed=1, dtype=cli_args.dtype)
    hf = make_processor(SCRATCH, tokenizer, (12544, 12544))
    store = MediaCache(MediaPolicy(roots=(folder,)), MediaLimitsConfig(), max_bytes=10**8)
    options: dict[str, Any] = {"video": VideoConfig(), "add_instruction": False, "max_prompt_tokens": 500}
    bundle = ProcessorBundle(family=get_family(model.config), processor=hf)
    processor = PromptProcessor(PromptEncoder(bundle, response_format, store, **options))
    policy = PolicyModel(model)
    export_hf_folder(folder / "model", model, hf)
    arguments = build_engine_args(
        VllmConfig(),
        dtype=cli_args.dtype,
        max_model_len=MAX_SEQUENCE_TOKENS,
        cuda=torch.cuda.is_available(),
        lora=None,
        family=policy.family,
    )
    context = EngineContext(
        policy=policy,
        processor=processor,
        adapter=None,
        model_folder=lambda: str(folder / "model"),
        max_model_len=MAX_SEQUENCE_TOKENS,
        concurrent=False,
        record_routes=False,
        work_dir=folder,
        ranks=SingleProcess(),
        warn=print,
    )
    engine = VllmEngine(context.model_folder(), arguments, context, restarts=0)
    weights = PolicyWeightStream(policy)
    engine.load_weights(weights)
    sampler = EngineSampler(engine, processor, load_version=lambda _: None, seed_parts=("bench",))
    sampling_params = SamplingParams(
        banned_token_ids=banned_ids(tokenizer, len(tokenizer)), max_new_tokens=cli_args.tokens
    )
    prompts = [processor.build(sample) for sample in samples]
    found = compare_speed(engine, sampler, prompts, sampling_params, cli_args)
    found["prompt tokens"] = len(prompts[0].token_ids)
    return (
        found
        | measure_weight_sync(engine, weights)
        | measure_logprob_diff(sampler, policy, processor, prompts, sampling_params)
    )


def read_clock() -> float:
    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


def compare_speed(
    engine: VllmEngine, sampler: EngineSampler, prompts: list, sampling_params: SamplingParams, cli_args: Any
) -> dict[str, Any]:
    """Measure tokens per second of both, by turns; neither has the prompts in its caches."""
    speeds: dict[str, list[float]] = {"ours": [], "direct": []}
    for step in range(cli_args.rounds + 1):
        for name, measured in speeds.items():
            engine._reset_caches()
            act = prepare_requests(engine, prompts, sampling_params, cli_args.siblings) if name == "direct" else None
            start = read_clock()
            if act is None:
                groups = sampler.generate(prompts, cli_args.siblings, sampling_params, step=step)
                tokens = sum(rollout.num_tokens for group in groups for rollout in group)
            else:
                tokens = act()
            if step:  # the first is for warming up
                measured.append(tokens / (read_clock() - start))
    ratios = [ours / direct for ours, direct in zip(speeds["ours"], speeds["direct"], strict=True)]
    return {
        **{f"tokens/s {name}": round(median(values)) for name, values in speeds.items()},
        "ratio": round(median(ratios), 3),
        "ratio least, most": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def prepare_requests(engine: VllmEngine, prompts: list, sampling_params: SamplingParams, group_size: int) -> Any:
    """Build the same requests as the engine, without sending them."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    from mmrl.rollout.engines.vllm_inputs import build_engine_input

    processor = engine._context.processor
    inputs, asked = [], []
    for number, prompt in enumerate(prompts):
        empty = empty_rollout(prompt, 0, sampling_params)
        request = GenerationRequest(rollout=empty, seed=number, sample_seeds=(number,) * group_size)
        inputs.append(build_engine_input(empty, processor))
        asked.append(sampling_arguments(request, sampling_params, processor.tokenizer.eos_token_id))
    params = [VllmSamplingParams(**each, output_kind=RequestOutputKind.FINAL_ONLY) for each in asked]

    def act() -> int:
        direct, tokens = engine._llm.llm_engine, 0
        for number, (ready, how) in enumerate(zip(inputs, params, strict=True)):
            direct.add_request(str(number), ready, how)
        while direct.has_unfinished_requests():
            tokens += sum(len(one.token_ids) for output in direct.step() if output.finished for one in output.outputs)
        return tokens

    return act


def measure_weight_sync(engine: VllmEngine, weights: PolicyWeightStream) -> dict[str, Any]:
    """Return the milliseconds per MB (10^6 bytes) of a weight sync, and of its checks alone."""
    size = sum(tensor.nbytes for _, tensor in weights) / 1e6
    whole, checking = [], []
    for _ in range(5):
        start = read_clock()
        engine.load_weights(weights)
        middle = read_clock()
        check_weights_arrived({name: fingerprint(tensor) for name, tensor in weights}, engine._read_fingerprints())
        whole.append(middle - start)
        checking.append(read_clock() - middle)
    return {
        "weights MB": round(size, 1),
        "sync ms": round(1e3 * median(whole), 1),
        "sync ms per MB": round(1e3 * median(whole) / size, 2),
        "of it checksums ms per MB": round(1e3 * median(checking) / size, 2),
    }


@torch.no_grad()
def measure_logprob_diff(
    sampler: EngineSampler,
    policy: PolicyModel,
    processor: PromptProcessor,
    prompts: list,
    sampling_params: SamplingParams,
) -> dict:
    """Return the difference in nats a token: engine from learner, and between two runs of the engine.

    The second run generates prompt by prompt. Only rollouts that came out the same are compared.
    """
    first = []
    for group in sampler.generate(prompts, 4, sampling_params, step=0):
        first += group
    second = []
    for prompt in prompts:
        second += sampler.generate([prompt], 4, sampling_params, step=0)[0]
    eos = processor.tokenizer.eos_token_id
    gaps = []
    for rollout in first:
        batch = collate(group_by_prompt([Experience(rollout=rollout, advantage=0.0)]), processor, pad_id=eos)
        batch = batch.to(policy.model.device)
        gaps.append(
            (policy.compute_logprobs(batch).logprobs_N.cpu() - torch.tensor(rollout.segments[0].logprobs)).abs()
        )
    noise = [
        abs(a - b) for one, other in zip(first, second, strict=True) for a, b in _common_token_logprobs(one, other)
    ]
    return {
        "engine and learner, nats": f"{torch.cat(gaps).mean():.2g}, at most {torch.cat(gaps).max():.2g}",
        "two runs of the engine, nats": f"{sum(noise) / len(noise):.2g}, at most {max(noise):.2g}",
        "tokens that both runs drew": f"{len(noise)} of {sum(rollout.num_tokens for rollout in first)}",
    }


def _common_token_logprobs(one: Rollout, other: Rollout) -> list[tuple[float, float]]:
    """Return the log-probs of both for each token up to the first that differs."""
    (a,), (b,) = one.segments, other.segments
    same = list(takewhile(bool, map(operator.eq, a.token_ids, b.token_ids)))
    return list(zip(a.logprobs, b.logprobs, strict=False))[: len(same)]


if __name__ == "__main__":
    main()

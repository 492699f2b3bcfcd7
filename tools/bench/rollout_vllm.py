"""What rollouts by vLLM cost beside vLLM alone, what a sync of weights costs, and how far engine and learner differ.

    python tools/bench/rollout_vllm.py            # in float32
    python tools/bench/rollout_vllm.py --dtype bfloat16

Ours is `EngineSampler.generate`: from prompts to rollouts with text and parsed answers. Beside it, taking turns, the
very requests go to vLLM's engine: inputs ready, parameters made, answers left as they come. Seconds are of this
process's CPU time on a CPU, where all runs in one process, and of the clock on a GPU. Questions are a picture each, of
the `counting` scenes; the model is a Qwen2.5-VL with random weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mmrl.answer import Grammar
from mmrl.checkpoint import export_hf
from mmrl.config.schema import LanguageScratch, Limits, Scratch, Video, VisionScratch, Vllm
from mmrl.media.cache import MediaStore
from mmrl.policy.batch import by_prompt, collate
from mmrl.policy.encoder import Encoder
from mmrl.policy.families import family_of
from mmrl.policy.processor import QwenProcessor
from mmrl.policy.qwen_vl import Policy, banned_ids
from mmrl.policy.tiny_models import make_model, make_processor, train_tokenizer
from mmrl.rollout.engines.base import EngineSampler, Publisher, Request
from mmrl.rollout.engines.vllm_args import engine_arguments
from mmrl.rollout.engines.vllm_colocated import VllmEngine
from mmrl.rollout.responses import begun
from mmrl.rollout.weight_sync import PolicyWeights, check_arrival, fingerprint
from mmrl.types import Access, Experience, Place, Rollout, SamplingLaw
from mmrl_datasets.generators import scenes

SPEC = Scratch(
    vision=VisionScratch(width=128, heads=4, mlp=256),
    language=LanguageScratch(width=256, heads=4, kv_heads=2, mlp=1024, depth=6),
)

LONGEST = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(asked, Path(folder)), indent=1))


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    place = Place(work=folder, base=folder, seed=0)
    samples = list(scenes.counting(place, split="train", size=asked.prompts))
    grammar = Grammar()
    texts = [part for sample in samples for part in sample.parts if isinstance(part, str)]
    tokenizer = train_tokenizer([*texts, *(grammar.render(sample.target) for sample in samples)], SPEC.language.vocab)
    model = make_model(SPEC, tokenizer, seed=1, dtype=asked.dtype)
    hf = make_processor(SPEC, tokenizer, (12544, 12544))
    store = MediaStore(Access(roots=(folder,)), Limits(), max_bytes=10**8)
    options: dict[str, Any] = {"video": Video(), "instruct": False, "max_prompt_tokens": 500}
    processor = QwenProcessor(Encoder(hf, family_of(model.config), grammar, store, **options))
    policy = Policy(model)
    export_hf(folder / "model", model, hf)
    cuda = torch.cuda.is_available()
    arguments = engine_arguments(Vllm(), dtype=asked.dtype, longest=LONGEST, cuda=cuda, lora=None)
    engine = VllmEngine(str(folder / "model"), processor, arguments, cuda=cuda, restarts=0, warn=print)
    weights = PolicyWeights(policy)
    sampler = EngineSampler(Publisher(engine, lambda e: e.load(weights)), processor, longest=LONGEST, salt=("bench",))
    sampler.sync(0)
    law = SamplingLaw(banned=banned_ids(tokenizer, len(tokenizer)), max_new_tokens=asked.tokens)
    prompts = [processor.ask(sample) for sample in samples]
    found = compare(engine, sampler, prompts, law, asked)
    found["prompt tokens"] = len(prompts[0].ids)
    return found | sync(engine, weights) | parity(sampler, policy, processor, prompts, law)


def now() -> float:
    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


def compare(engine: VllmEngine, sampler: EngineSampler, prompts: list, law: SamplingLaw, asked: Any) -> dict[str, Any]:
    """Tokens per second of both, by turns; prompts are in the caches of neither."""
    speeds: dict[str, list[float]] = {"ours": [], "direct": []}
    for step in range(asked.rounds + 1):
        for name, measured in speeds.items():
            engine._forget()
            act = prepared(engine, prompts, law, asked.siblings) if name == "direct" else None
            start = now()
            if act is None:
                groups = sampler.generate(prompts, asked.siblings, law, step=step)
                tokens = sum(rollout.num_tokens for group in groups for rollout in group)
            else:
                tokens = act()
            if step:  # the first is for warming up
                measured.append(tokens / (now() - start))
    ratios = [ours / direct for ours, direct in zip(speeds["ours"], speeds["direct"], strict=True)]
    return {
        **{f"tokens/s {name}": round(median(values)) for name, values in speeds.items()},
        "ratio": round(median(ratios), 3),
        "ratio least, most": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def prepared(engine: VllmEngine, prompts: list, law: SamplingLaw, siblings: int) -> Any:
    """The same requests, up to the moment of sending them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from mmrl.rollout.engines.vllm_inputs import engine_input

    eos = engine._processor.tokenizer.eos_token_id
    asked = [
        Request(begun=begun(prompt, 0, law), times=siblings, seed=n, law=law).parameters(eos)
        for n, prompt in enumerate(prompts)
    ]
    inputs = [engine_input(begun(prompt, 0, law), engine._processor) for prompt in prompts]
    params = [SamplingParams(**each, output_kind=RequestOutputKind.FINAL_ONLY) for each in asked]

    def act() -> int:
        direct, tokens = engine._llm.llm_engine, 0
        for number, (ready, how) in enumerate(zip(inputs, params, strict=True)):
            direct.add_request(str(number), ready, how)
        while direct.has_unfinished_requests():
            tokens += sum(len(one.token_ids) for output in direct.step() if output.finished for one in output.outputs)
        return tokens

    return act


def sync(engine: VllmEngine, weights: PolicyWeights) -> dict[str, Any]:
    """Milliseconds a MB (10^6 bytes) of weights, all of it and the checking alone."""
    size = sum(tensor.nbytes for _, tensor in weights) / 1e6
    whole, checking = [], []
    for _ in range(5):
        start = now()
        engine.load(weights)
        middle = now()
        check_arrival({name: fingerprint(tensor) for name, tensor in weights}, engine._prints())
        whole.append(middle - start)
        checking.append(now() - middle)
    return {
        "weights MB": round(size, 1),
        "sync ms": round(1e3 * median(whole), 1),
        "sync ms per MB": round(1e3 * median(whole) / size, 2),
        "of it checksums ms per MB": round(1e3 * median(checking) / size, 2),
    }


@torch.no_grad()
def parity(sampler: EngineSampler, policy: Policy, processor: QwenProcessor, prompts: list, law: SamplingLaw) -> dict:
    """Nats a token: between engine and learner, and between two runs of the engine where they drew the same."""
    runs = [sampler.generate(prompts, 4, law, step=0), [sampler.generate([p], 4, law, step=0)[0] for p in prompts]]
    first, second = ([rollout for group in run for rollout in group] for run in runs)
    eos = processor.tokenizer.eos_token_id
    gaps = []
    for rollout in first:
        batch = collate(by_prompt([Experience(rollout=rollout, advantage=0.0)]), processor, pad_id=eos)
        batch = batch.to(policy.device)
        gaps.append((policy.score(batch).logps_N.cpu() - torch.tensor(rollout.segments[0].logps)).abs())
    noise = [abs(a - b) for one, other in zip(first, second, strict=True) for a, b in _alike(one, other)]
    return {
        "engine and learner, nats": f"{torch.cat(gaps).mean():.2g}, at most {torch.cat(gaps).max():.2g}",
        "two runs of the engine, nats": f"{sum(noise) / len(noise):.2g}, at most {max(noise):.2g}",
        "tokens that both runs drew": f"{len(noise)} of {sum(rollout.num_tokens for rollout in first)}",
    }


def _alike(one: Rollout, other: Rollout) -> list[tuple[float, float]]:
    """Log-probabilities of the tokens up to the first that differs."""
    pairs = []
    for a, b, p, q in zip(
        one.segments[0].ids, other.segments[0].ids, one.segments[0].logps, other.segments[0].logps, strict=False
    ):
        if a != b:
            break
        pairs.append((p, q))
    return pairs


if __name__ == "__main__":
    main()

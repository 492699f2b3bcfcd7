"""Scenes of an engine in this process: what it agrees on with the learner, seeds, ends, new weights, a failure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm_rendering import Upstream, differences
from vllm_scenes import LONGEST, SIBLINGS, STEP, Questions, Scene, ids, logprobs, refusal

from mmrl.checkpoint import export_hf_folder
from mmrl.config.schema import LogprobCheckConfig, LoraConfig, VllmConfig
from mmrl.policy.families import VideoTimeEncoding
from mmrl.policy.lora import LoraAdapter
from mmrl.policy.policy import Policy
from mmrl.policy.pretrained import ModelExport
from mmrl.policy.tiny_models import make_model
from mmrl.rollout.engine_sampler import EngineSampler
from mmrl.rollout.engines.vllm_colocated import VllmEngine
from mmrl.rollout.engines.vllm_start import build_engine_args
from mmrl.rollout.logprob_check import LogprobCheck
from mmrl.rollout.weight_sync import PolicyWeightStream
from mmrl.types import FinishReason, Rollout


def engine_of(scene: Scene) -> VllmEngine:
    takes_adapter = scene.adapter is not None
    return VllmEngine(scene.model, scene.arguments, scene.context(), restarts=1, takes_adapter=takes_adapter)


def agreement(questions: Questions) -> dict[str, Any]:
    """A family, with the weights it was started with and with new ones."""
    scene = Scene(questions)
    engine = engine_of(scene)
    sampler = scene.sampler(engine)
    facts = _agreement(scene, engine, sampler) | _new_weights(scene, engine, sampler) | _merged(scene, engine)
    engine.close()
    return facts


def experts(questions: Questions) -> dict[str, Any]:
    """A family with experts: the same, and a sync after which nobody packs them for the kernels of a CPU."""
    scene = Scene(questions)
    engine = engine_of(scene)
    sampler = scene.sampler(engine)
    facts = _agreement(scene, engine, sampler) | _new_weights(scene, engine, sampler) | _merged(scene, engine)
    facts |= _unpacked(scene, engine)
    engine.close()
    return facts


def hybrid(questions: Questions) -> dict[str, Any]:
    """A family with recurrent layers: agreement, and new weights against an engine that starts with them."""
    scene = Scene(questions)
    engine = engine_of(scene)
    sampler = scene.sampler(engine)
    facts = _agreement(scene, engine, sampler)
    facts["mean gap"] = scene.mean_gap(scene.draw(sampler))
    facts |= _new_weights(scene, engine, sampler)
    reloaded = scene.draw(sampler)
    facts["mean gap after sync"] = scene.mean_gap(reloaded)
    engine.close()
    learned = ModelExport(scene.policy.model, scene.policy.family)
    export_hf_folder(questions.folder / "model", learned, questions.processor.hf_processor)
    engine = engine_of(scene)
    fresh = scene.draw(scene.sampler(engine))
    facts["as a fresh engine"] = ids(fresh) == ids(reloaded) and logprobs(fresh) == logprobs(reloaded)
    engine.close()
    return facts


def in_process(questions: Questions) -> dict[str, Any]:
    """The same; then everything that does not depend on the family."""
    scene = Scene(questions)
    before = _disturbable()
    engine = engine_of(scene)
    facts: dict[str, Any] = {"disturbed": [name for name, was in before.items() if _disturbable()[name] != was]}
    facts["second engine"] = refusal(lambda: engine_of(scene))
    sampler = scene.sampler(engine)
    sampler.sync(1)
    facts |= _agreement(scene, engine, sampler)
    groups = scene.draw(sampler)
    facts |= _seeds(scene, sampler, groups) | _continuation(scene, sampler, groups) | _ends(scene, sampler, groups)
    facts |= _new_weights(scene, engine, sampler)
    groups = scene.draw(sampler)
    facts["version"] = groups[0][0].segments[0].version
    facts |= _lost(scene, engine)
    language = questions.spec.language.model_copy(update={"hidden_size": 96, "num_heads": 3, "num_kv_heads": 3})
    other = make_model(questions.spec.model_copy(update={"language": language}), scene.processor.tokenizer, seed=1)
    facts["another model"] = refusal(lambda: engine.load_weights(PolicyWeightStream(Policy(other))))
    facts["gaps after refusal"] = scene.gaps(scene.draw(sampler))
    facts |= _failures(scene, engine, sampler, groups)
    engine.close()
    return facts


def adapted(questions: Questions) -> dict[str, Any]:
    """An adapter alone goes to the engine, twice."""
    scene = Scene(questions, lora=LoraConfig(rank=4, alpha=8, use_rslora=True))
    assert scene.adapter is not None
    engine = engine_of(scene)
    sampler = scene.sampler(engine)
    facts: dict[str, Any] = {}
    for version in (1, 2):
        scene.learn()
        facts[f"gaps before {version}"] = scene.gaps(scene.draw(sampler))
        sampler.sync(version)
        facts[f"gaps after {version}"] = scene.gaps(scene.draw(sampler))
    with _failing(engine):
        facts["gaps after death"] = scene.gaps(scene.draw(sampler))
    engine.close()
    return facts


def float32_layer(questions: Questions) -> dict[str, Any]:
    """A bfloat16 model whose logits share an offset, with an output layer in bfloat16, then in float32."""
    scene = Scene(questions)
    model = scene.policy.model.to(torch.bfloat16)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head += torch.randn(1, head.shape[1], generator=torch.Generator().manual_seed(0)).to(head)
    export_hf_folder(questions.folder / "model", model, questions.processor.hf_processor)
    facts: dict[str, Any] = {}
    for name, float32 in (("bfloat16", False), ("float32", True)):
        scene.policy = Policy(model, float32_output_layer=float32)
        scene.arguments = build_engine_args(
            VllmConfig(gpu_memory_utilization=0.2, cpu_kv_cache_mib=64, max_num_seqs=64),
            dtype="bfloat16",
            max_model_len=LONGEST,
            cuda=scene.cuda,
            lora=None,
            family=scene.policy.family,
            float32_output_layer=float32,
        )
        engine = engine_of(scene)
        sampler = scene.sampler(engine)
        sampler.sync(1)
        facts[name] = {"logits": sorted(engine.logits_dtypes()), "gaps": scene.gaps(scene.draw(sampler))}
        engine.close()
    return facts


def _agreement(scene: Scene, engine: VllmEngine, sampler: EngineSampler) -> dict[str, Any]:
    """What is sampled, behind prompts and after what tools show; and what the engine is told of the prompts."""
    groups = scene.draw(sampler)
    facts: dict[str, Any] = {
        "read ids": ids(groups),
        "gaps": scene.gaps(groups),
        "differences": {name: differences(engine._llm, scene, name) for name in scene.prompts},
        **scene.shown(sampler, groups),
    }
    if scene.processor.encoder.family.video_time is not VideoTimeEncoding.TEXT_TIMESTAMPS:
        video = groups[list(scene.prompts).index("video")]
        facts["gap with positions of transformers"] = scene.gap(video, Upstream(scene))
    return facts


def _new_weights(scene: Scene, engine: VllmEngine, sampler: EngineSampler) -> dict[str, Any]:
    """The engine draws once more with what it has, rests, and draws with what the learner has learned."""
    scene.learn()
    old = scene.gaps(scene.draw(sampler))
    awake = _memory()
    engine.sleep()
    given_back = awake - _memory()
    sampler.sync(2)
    after = scene.gaps(scene.draw(sampler))
    return {"gaps with old weights": old, "given back while resting": given_back, "gaps after sync": after}


def _merged(scene: Scene, engine: VllmEngine) -> dict[str, Any]:
    """An adapter that vLLM knows nothing of is sent as what it makes of the matrices, vision's too."""
    family = scene.policy.family
    targets = (*family.default_lora_targets, *family.lora_parameters, "vision.mlp")
    LoraAdapter(scene.policy.model, LoraConfig(rank=4, targets=targets), seed=2)
    scene.policy = Policy(scene.policy.model)
    scene.learn()
    sampler = scene.sampler(engine)
    without = scene.gaps(scene.draw(sampler))
    sampler.sync(3)
    return {"gaps without an adapter": without, "gaps after merging": scene.gaps(scene.draw(sampler))}


def _unpacked(scene: Scene, engine: VllmEngine) -> dict[str, Any]:
    """Experts are reloaded and not packed anew; then they are."""
    sampler, rpc = scene.sampler(engine), engine._llm.collective_rpc
    check = LogprobCheck(
        sampler,
        scene.policy,
        scene.processor,
        samples=list(scene.samples.values()),
        sampling_params=scene.params,
        options=LogprobCheckConfig(),
        warn=scene.warnings.append,
    )

    def careless(method: str, **given: Any) -> Any:
        return [] if method == "repack_experts" else rpc(method, **given)

    with patch.object(engine._llm, "collective_rpc", careless):
        sampler.sync(4)
    groups = scene.draw(sampler)
    facts = {"unpacked": refusal(lambda: check.measure(0)), "gaps unpacked": scene.gaps(groups)}
    facts["mean gap unpacked"] = scene.mean_gap(groups)
    sampler.sync(5)
    return facts | {"packed again": check.measure(0)["logprob_check/diff_mean"]}


def _lost(scene: Scene, engine: VllmEngine) -> dict[str, Any]:
    """Weights are taken and never put in place; then they are, as they were."""
    weights, rpc = PolicyWeightStream(scene.policy), engine._llm.collective_rpc
    kept = {name: parameter.detach().clone() for name, parameter in scene.policy.trained.items()}
    scene.learn()

    def forgetful(method: str, **given: Any) -> Any:
        if method != "reload_weights":
            return rpc(method, **given)
        return [sum(1 for _ in given["kwargs"]["weights_iterator"])]

    with patch.object(engine._llm, "collective_rpc", forgetful):
        lost = refusal(lambda: engine.load_weights(weights))
    for name, parameter in scene.policy.trained.items():
        parameter.data.copy_(kept[name])
    return {"lost weights": lost}


def _disturbable() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads.__module__ + torch.set_num_threads.__name__,
        "torch": hash(torch.get_rng_state().numpy().tobytes()),
        "random": hash(random.getstate()),
        "numpy": hash(np.random.get_state()[1].tobytes()),
    }


def _memory() -> int:
    return (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0


def _seeds(scene: Scene, sampler: EngineSampler, groups: list[list[Rollout]]) -> dict[str, Any]:
    prompts = list(scene.prompts.values())
    alone = [sampler.generate([prompt], SIBLINGS, scene.params, step=STEP)[0] for prompt in prompts]
    likeliest, greedy = (
        sampler.generate(prompts, 1, replace(scene.params, **params), step=STEP)
        for params in ({"top_k": 1}, {"temperature": 0.0})
    )
    return {
        "alone": ids(alone) == ids(groups),
        "again": ids(scene.draw(sampler)) == ids(groups),
        "another step": ids(scene.draw(sampler, step=STEP + 1)) == ids(groups),
        "distinct siblings": min(len({tuple(row) for row in group}) for group in ids(groups)),
        "likeliest alone": ids(likeliest) == ids(greedy),
        "banned": sorted(
            set(scene.params.banned_token_ids) & {token for group in ids(groups) for row in group for token in row}
        ),
    }


def _continuation(scene: Scene, sampler: EngineSampler, groups: list[list[Rollout]]) -> dict[str, Any]:
    """Greedily, 4 tokens and 8 more are the same as 12."""
    greedy = [replace(scene.params, temperature=0.0, max_new_tokens=count) for count in (12, 4, 8)]
    prompts = list(scene.prompts.values())
    whole, start = (sampler.generate(prompts, 1, params, step=STEP) for params in greedy[:2])
    longer = sampler.extend([rollout for (rollout,) in start], greedy[2], step=STEP)
    drawn = sampler.extend([group[0] for group in groups], scene.params, step=STEP)
    return {
        "greedy": ids([[rollout] for rollout in longer]) == ids(whole),
        "segments": [len(rollout.segments) for rollout in longer],
        "gaps of continuation": scene.gaps([[rollout] for rollout in drawn]),
        "extended again": ids([sampler.extend([group[0]], scene.params, step=STEP) for group in groups])
        == ids([[rollout] for rollout in drawn]),
    }


def _ends(scene: Scene, sampler: EngineSampler, groups: list[list[Rollout]]) -> dict[str, Any]:
    eos = scene.processor.tokenizer.eos_token_id
    long = [r for group in scene.draw(sampler, replace(scene.params, max_new_tokens=200)) for r in group]
    ended = [r for r in long if r.finish_reason is FinishReason.EOS]
    first_response = next(r for group in groups for r in group if r.text.strip())
    mark = first_response.text.strip()[-1]
    (stopped,) = sampler.generate([first_response.prompt], SIBLINGS, replace(scene.params, stop=(mark,)), step=STEP)
    again = stopped[first_response.index]
    return {
        "ended": len(ended),
        "eos is last": all(ids([[r]])[0][0].index(eos) == r.num_tokens - 1 for r in ended),
        "eos elsewhere": any(eos in ids([[r]])[0][0] for r in long if r not in ended),
        "stopped by": again.finish_reason,
        "stop string at the end": mark in scene.processor.decode([again.segments[0].token_ids[-1]]),
        "stop string before": mark in scene.processor.decode(again.segments[0].token_ids[:-1]),
        "as without": again.segments[0].token_ids == first_response.segments[0].token_ids[: again.num_tokens],
        "across tokens": _across(scene, sampler, groups),
    }


def _across(scene: Scene, sampler: EngineSampler, groups: list[list[Rollout]]) -> list[bool]:
    """Whether responses end at the token that completes a string: from the last character of one token to the first of
    the next but one.
    """
    decode, found = scene.processor.decode, []
    for rollout in (rollout for group in groups for rollout in group):
        drawn = rollout.segments[0].token_ids
        for n in range(len(drawn) - 2):
            parts = [decode([token]) for token in drawn[n : n + 3]]
            if all(part and part.isascii() and part.isprintable() for part in parts):
                params = replace(scene.params, stop=(parts[0][-1] + parts[1] + parts[2][0],))
                ends = next(count for count in range(len(drawn) + 1) if params.stop[0] in decode(drawn[:count]))
                (siblings,) = sampler.generate([rollout.prompt], SIBLINGS, params, step=STEP)
                again = siblings[rollout.index]
                found.append((again.segments[0].token_ids, again.finish_reason) == (drawn[:ends], FinishReason.STOP))
                break
    return found


def _failures(scene: Scene, engine: VllmEngine, sampler: EngineSampler, groups: list[list[Rollout]]) -> dict[str, Any]:
    """The engine fails at work; then its successor does."""
    with _failing(engine):
        again = scene.draw(sampler)
    facts = {"same after death": ids(again) == ids(groups), "gaps after death": scene.gaps(again)}
    with _failing(engine):
        facts["dead twice"] = refusal(lambda: scene.draw(sampler))
    return {**facts, "warnings": scene.warnings}


@contextmanager
def _failing(engine: VllmEngine) -> Iterator[None]:
    """The device breaks in an engine's third step."""
    step, calls = engine._llm.llm_engine.step, iter(range(3))

    def broken() -> Any:
        if next(calls, None) is None:
            raise RuntimeError("the device broke")
        return step()

    with patch.object(engine._llm.llm_engine, "step", broken):
        yield

"""Scenes of an engine in this process: agreement with the learner, seeds, ends of responses, new weights, a failure."""

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from vllm_scenes import SIBLINGS, STEP, Questions, Scene, ids, logprobs, refusal

from mmrl.checkpoint import export_hf_folder
from mmrl.config.schema import LogprobCheckConfig, LoraConfig
from mmrl.policy.batch import PromptTensors
from mmrl.policy.families import VideoTimeEncoding
from mmrl.policy.lora import LoraAdapter
from mmrl.policy.policy import PolicyModel
from mmrl.policy.pretrained import ModelExport
from mmrl.policy.tiny_models import make_model
from mmrl.rollout.engine_sampler import EngineSampler
from mmrl.rollout.engines.vllm_colocated import VllmEngine
from mmrl.rollout.logprob_check import LogprobCheck
from mmrl.rollout.weight_sync import PolicyWeightStream
from mmrl.types import FinishReason, MediaObservation, Prompt, Rollout

Groups = list[list[Rollout]]
Facts = dict[str, Any]


def start_engine(scene: Scene) -> VllmEngine:
    takes_adapter = scene.adapter is not None
    return VllmEngine(scene.model, scene.arguments, scene.context(), restarts=1, takes_adapter=takes_adapter)


def agreement(questions: Questions) -> Facts:
    """A family with the weights that the engine was started with, with new ones, and with an adapter merged."""
    scene = Scene(questions)
    with closing(start_engine(scene)) as engine:
        sampler = scene.sampler(engine)
        facts = _agreement(scene, sampler) | _new_weights(scene, engine, sampler) | _merged(scene, engine)
        if scene.policy.routers:
            facts |= _unpacked(scene, engine)
    return facts


experts = agreement


def hybrid(questions: Questions) -> Facts:
    """A family with recurrent layers: agreement, and new weights against an engine that starts with them."""
    scene = Scene(questions)
    with closing(start_engine(scene)) as engine:
        sampler = scene.sampler(engine)
        facts = _agreement(scene, sampler)
        facts["mean gap"] = scene.mean_gap(scene.draw(sampler))
        facts |= _new_weights(scene, engine, sampler)
        reloaded = scene.draw(sampler)
        facts["mean gap after sync"] = scene.mean_gap(reloaded)
    learned = ModelExport(scene.policy.model, scene.policy.family)
    export_hf_folder(questions.folder / "model", learned, questions.processor.hf_processor)
    with closing(start_engine(scene)) as engine:
        fresh = scene.draw(scene.sampler(engine))
    facts["as a fresh engine"] = ids(fresh) == ids(reloaded) and logprobs(fresh) == logprobs(reloaded)
    return facts


def in_process(questions: Questions) -> Facts:
    """Agreement, and everything that does not depend on the family."""
    scene = Scene(questions)
    before = _global_state()
    with closing(start_engine(scene)) as engine:
        after = _global_state()
        facts: Facts = {"disturbed": [name for name in before if after[name] != before[name]]}
        facts["second engine"] = refusal(lambda: start_engine(scene))
        sampler = scene.sampler(engine)
        sampler.sync(1)
        facts |= _agreement(scene, sampler)
        groups = scene.draw(sampler)
        facts |= _seeds(scene, sampler, groups) | _continuation(scene, sampler, groups) | _ends(scene, sampler, groups)
        facts |= _new_weights(scene, engine, sampler)
        groups = scene.draw(sampler)
        facts["version"] = groups[0][0].segments[0].version
        facts |= _lost_weights(scene, engine)
        language = questions.spec.language.model_copy(update={"hidden_size": 96, "num_heads": 3, "num_kv_heads": 3})
        other = make_model(questions.spec.model_copy(update={"language": language}), scene.processor.tokenizer, seed=1)
        facts["another model"] = refusal(lambda: engine.load_weights(PolicyWeightStream(PolicyModel(other))))
        facts["gaps after refusal"] = scene.gaps(scene.draw(sampler))
        with _failing(engine):
            again = scene.draw(sampler)
        facts |= {"same after death": ids(again) == ids(groups), "gaps after death": scene.gaps(again)}
        facts["counted"] = list(scene.activity.counts["rollout"])
        with _failing(engine):
            facts["dead twice"] = refusal(lambda: scene.draw(sampler))
    return {**facts, "warnings": scene.warnings}


def adapted(questions: Questions) -> Facts:
    """An adapter alone goes to the engine, twice."""
    scene = Scene(questions, lora=LoraConfig(rank=4, alpha=8, use_rslora=True))
    facts: Facts = {}
    with closing(start_engine(scene)) as engine:
        sampler = scene.sampler(engine)
        for version in (1, 2):
            scene.learn()
            facts[f"gaps before {version}"] = scene.gaps(scene.draw(sampler))
            sampler.sync(version)
            facts[f"gaps after {version}"] = scene.gaps(scene.draw(sampler))
        with _failing(engine):
            facts["gaps after death"] = scene.gaps(scene.draw(sampler))
    return facts


def float32_layer(questions: Questions) -> Facts:
    """A bfloat16 model whose logits share an offset, with an output layer in bfloat16, then in float32."""
    scene = Scene(questions)
    model = scene.policy.model.to(torch.bfloat16)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head += torch.randn(1, head.shape[1], generator=torch.Generator().manual_seed(0)).to(head)
    export_hf_folder(questions.folder / "model", model, questions.processor.hf_processor)
    facts: Facts = {}
    for name, float32 in (("bfloat16", False), ("float32", True)):
        scene.policy = PolicyModel(model, float32_output_layer=float32)
        scene.arguments = scene.build_arguments("bfloat16", float32_output_layer=float32)
        with closing(start_engine(scene)) as engine:
            sampler = scene.sampler(engine)
            sampler.sync(1)
            facts[name] = {"logits": sorted(engine.logits_dtypes()), "gaps": scene.gaps(scene.draw(sampler))}
    return facts


def _agreement(scene: Scene, sampler: EngineSampler) -> Facts:
    """What is sampled after prompts, and after what tools show."""
    groups = scene.draw(sampler)
    facts: Facts = {"ids": ids(groups), "gaps": scene.gaps(groups), **scene.show_media(sampler, groups)}
    if scene.processor.encoder.family.video_time is not VideoTimeEncoding.TEXT_TIMESTAMPS:
        video = groups[list(scene.prompts).index("video")]
        facts["gap with positions of transformers"] = scene.gap(video, PositionsOfTransformers(scene))
    return facts


class PositionsOfTransformers:
    """Gives the learner the positions that transformers computes itself."""

    def __init__(self, scene: Scene) -> None:
        self.placeholders = scene.processor.placeholders
        self._processor, self._model = scene.processor, scene.policy.model

    def prompt_tensors(self, prompt: Prompt) -> PromptTensors:
        ours = self._processor.prompt_tensors(prompt)
        ids = torch.tensor([prompt.token_ids])
        positions, _ = self._model.model.get_rope_index(
            input_ids=ids,
            mm_token_type_ids=self.placeholders.token_types(ids),
            video_grid_thw=torch.tensor(prompt.grids),
            second_per_grid_ts=ours.second_per_grid_V,
            attention_mask=torch.ones_like(ids),
        )
        return replace(ours, position_ids_3P=positions[:, 0])

    def tool_media_tensors(self, view: MediaObservation) -> PromptTensors:
        return self._processor.tool_media_tensors(view)


def _new_weights(scene: Scene, engine: VllmEngine, sampler: EngineSampler) -> Facts:
    """The engine samples once more with what it has, sleeps, and samples with what the learner has learned."""
    scene.learn()
    facts: Facts = {"gaps with old weights": scene.gaps(scene.draw(sampler))}
    before = _used_bytes()
    engine.sleep()
    facts["freed bytes"] = before - _used_bytes()
    sampler.sync(2)
    return {**facts, "gaps after sync": scene.gaps(scene.draw(sampler))}


def _used_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _merged(scene: Scene, engine: VllmEngine) -> Facts:
    """An adapter that the engine knows nothing of, the vision tower's too, is sent merged into the matrices."""
    family = scene.policy.family
    targets = (*family.default_lora_targets, *family.lora_parameters, "vision.mlp")
    LoraAdapter(scene.policy.model, LoraConfig(rank=4, targets=targets), seed=2)
    scene.policy = PolicyModel(scene.policy.model)
    scene.learn()
    sampler = scene.sampler(engine)
    without = scene.gaps(scene.draw(sampler))
    sampler.sync(3)
    return {"gaps without an adapter": without, "gaps after merging": scene.gaps(scene.draw(sampler))}


def _unpacked(scene: Scene, engine: VllmEngine) -> Facts:
    """Experts are reloaded and not packed again for the kernels of a CPU; then they are."""
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

    def skip_repacking(method: str, **arguments: Any) -> Any:
        return [] if method == "repack_experts" else rpc(method, **arguments)

    with patch.object(engine._llm, "collective_rpc", skip_repacking):
        sampler.sync(4)
    facts = {"unpacked": refusal(lambda: check.measure(0)), "gaps unpacked": scene.gaps(scene.draw(sampler))}
    sampler.sync(5)
    return facts | {"packed again": check.measure(0)["logprob_check/diff_mean"]}


def _lost_weights(scene: Scene, engine: VllmEngine) -> Facts:
    """Weights are read and never put in place."""
    weights, rpc = PolicyWeightStream(scene.policy), engine._llm.collective_rpc

    def read_only(method: str, **arguments: Any) -> Any:
        if method != "reload_weights":
            return rpc(method, **arguments)
        return [sum(1 for _ in arguments["kwargs"]["weights_iterator"])]

    with scene.other_weights(), patch.object(engine._llm, "collective_rpc", read_only):
        return {"lost weights": refusal(lambda: engine.load_weights(weights))}


def _global_state() -> Facts:
    return {
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": random.getstate(),
        "numpy": np.random.get_state()[1].tobytes(),
    }


def _seeds(scene: Scene, sampler: EngineSampler, groups: Groups) -> Facts:
    prompts = list(scene.prompts.values())
    alone = [sampler.generate([prompt], SIBLINGS, scene.params, step=STEP)[0] for prompt in prompts]
    top_k_1, greedy = (
        sampler.generate(prompts, 1, replace(scene.params, **params), step=STEP)
        for params in ({"top_k": 1}, {"temperature": 0.0})
    )
    rows = [row for group in ids(groups) for row in group]
    return {
        "alone": ids(alone) == ids(groups),
        "again": ids(scene.draw(sampler)) == ids(groups),
        "another step": ids(scene.draw(sampler, step=STEP + 1)) == ids(groups),
        "distinct siblings": min(len(set(map(tuple, group))) for group in ids(groups)),
        "top_k 1 is greedy": ids(top_k_1) == ids(greedy),
        "banned": sorted(set(scene.params.banned_token_ids) & {token for row in rows for token in row}),
    }


def _continuation(scene: Scene, sampler: EngineSampler, groups: Groups) -> Facts:
    """Greedily, 4 tokens and 8 more are the same as 12."""
    greedy = [replace(scene.params, temperature=0.0, max_new_tokens=count) for count in (12, 4, 8)]
    prompts = list(scene.prompts.values())
    whole, start = (sampler.generate(prompts, 1, params, step=STEP) for params in greedy[:2])
    longer = sampler.extend([rollout for (rollout,) in start], greedy[2], step=STEP)
    first_of_groups = [group[0] for group in groups]
    extended = sampler.extend(first_of_groups, scene.params, step=STEP)
    one_by_one = [sampler.extend([rollout], scene.params, step=STEP)[0] for rollout in first_of_groups]
    return {
        "greedy": ids([longer]) == ids([[rollout for (rollout,) in whole]]),
        "segments": [len(rollout.segments) for rollout in longer],
        "gaps of continuation": scene.gaps([[rollout] for rollout in extended]),
        "extended again": ids([one_by_one]) == ids([extended]),
    }


def _ends(scene: Scene, sampler: EngineSampler, groups: Groups) -> Facts:
    eos = scene.processor.tokenizer.eos_token_id
    long = [rollout for group in scene.draw(sampler, replace(scene.params, max_new_tokens=200)) for rollout in group]
    ended = [rollout.segments[0].token_ids for rollout in long if rollout.finish_reason is FinishReason.EOS]
    others = [rollout.segments[0].token_ids for rollout in long if rollout.finish_reason is not FinishReason.EOS]
    first_response = next(rollout for group in groups for rollout in group if rollout.text.strip())
    stop = first_response.text.strip()[-1]
    (stopped,) = sampler.generate([first_response.prompt], SIBLINGS, replace(scene.params, stop=(stop,)), step=STEP)
    again = stopped[first_response.index]
    return {
        "ended": len(ended),
        "eos is last": all(token_ids.index(eos) == len(token_ids) - 1 for token_ids in ended),
        "eos elsewhere": any(eos in token_ids for token_ids in others),
        "stopped by": again.finish_reason,
        "stop string at the end": stop in scene.processor.decode([again.segments[0].token_ids[-1]]),
        "stop string before": stop in scene.processor.decode(again.segments[0].token_ids[:-1]),
        "as without": again.segments[0].token_ids == first_response.segments[0].token_ids[: again.num_tokens],
        "across tokens": _stops_across_tokens(scene, sampler, groups),
    }


def _stops_across_tokens(scene: Scene, sampler: EngineSampler, groups: Groups) -> list[bool]:
    """For each response with three printable tokens in a row: true if it ends at the token that completes a string,
    from the last character of the first to the first character of the third.
    """
    decode, found = scene.processor.decode, []
    for rollout in (rollout for group in groups for rollout in group):
        token_ids = rollout.segments[0].token_ids
        for n in range(len(token_ids) - 2):
            parts = [decode([token]) for token in token_ids[n : n + 3]]
            if all(part and part.isascii() and part.isprintable() for part in parts):
                params = replace(scene.params, stop=(parts[0][-1] + parts[1] + parts[2][0],))
                end = next(count for count in range(len(token_ids) + 1) if params.stop[0] in decode(token_ids[:count]))
                (siblings,) = sampler.generate([rollout.prompt], SIBLINGS, params, step=STEP)
                again = siblings[rollout.index]
                expected = (token_ids[:end], FinishReason.STOP)
                found.append((again.segments[0].token_ids, again.finish_reason) == expected)
                break
    return found


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
